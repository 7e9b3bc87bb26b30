import math
import subprocess
import sys

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from prl.metrics.events import MetricsWriter
from prl.metrics.tensorboard import TensorBoardSink


def scalars(path):
    """(tag, step, value) of every scalar, read with TensorBoard's own reader."""
    found = []
    for event in LegacyEventFileLoader(str(path)).Load():
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_scalars_of_all_processes_arrive_once(tmp_path):
    metrics = tmp_path / "metrics"
    with TensorBoardSink(metrics, tmp_path / "tensorboard", attempt=1) as sink:
        orchestrator = MetricsWriter(metrics, "orchestrator", 0, 1)
        orchestrator.write({"train/loss": 0.5, "train/entropy": math.nan}, step=1, kind="step")
        orchestrator.write({}, kind="phase", labels={"name": "joined"})
        orchestrator.flush()
        assert sink.update() == 1
        assert sink.update() == 0
        orchestrator.write({"train/loss": 0.25}, step=2, kind="step")
        orchestrator.close()
        assert sink.update() == 1
        with MetricsWriter(metrics, "actor", 1, 1) as late:
            late.write({"actor/rollouts": 7})
    found = scalars(sink.path)
    assert found[0] == ("train/loss", 1, 0.5)
    assert found[1][:2] == ("train/entropy", 1)
    assert math.isnan(found[1][2])
    assert found[2:] == [("train/loss", 2, 0.25), ("actor/rollouts/actor-1", 2, 7.0)]


def test_earlier_attempts_are_left_to_their_own_files(tmp_path):
    for attempt, step in ((1, 1), (2, 2)):
        with MetricsWriter(tmp_path / "metrics", "orchestrator", 0, attempt) as writer:
            writer.write({"x": step}, step=step)
    with TensorBoardSink(tmp_path / "metrics", tmp_path / "tensorboard", attempt=2) as sink:
        pass
    assert scalars(sink.path) == [("x", 2, 2.0)]


def test_importing_it_loads_no_framework():
    program = (
        "import sys, prl.metrics.tensorboard\n"
        "heavy = {'torch', 'tensorflow', 'pandas', 'vllm', 'transformers'} & {name.split('.')[0] for name in sys.modules}\n"
        "raise SystemExit(f'loaded {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
