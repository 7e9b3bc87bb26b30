"""What `prl-submit --replay` refuses before anything is written, and what it starts."""

from pathlib import Path

import numpy as np
import pytest

from prl.cli import submit
from prl.cluster.allocation import Allocation, Host
from prl.cluster.split import make_split
from prl.config.load import ConfigError, dump, load
from prl.flow.events import LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.orchestrator.binding import bind
from prl.orchestrator.resume import find_start
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import LedgerWriter
from prl.streams.records import MicroBatch, StepFacts
from prl.streams.steps import write_step

CONFIG = """
run: {name: one, steps: 3}
model: {init: random, architecture: qwen2}
domains: [{name: digits}]
train: {tensor_parallel: 2}
sample: {dtype: float32, max_model_len: 64, kv_cache_mib: 64}
actor: {max_tokens: 5}
verifier: {processes: 1}
"""


@pytest.fixture
def original(tmp_path, monkeypatch):
    """A run of three step files, and the working folder of the commands."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    run = RunFolder(tmp_path / "original")
    run.create()
    run.attempt(1).mkdir()
    run.config.write_text(dump(load(Path("c.yaml"), [])))
    for step in (1, 2, 3):
        step_file(run, step, "one", attempt=1)
    return run


def step_file(run, step, writer, attempt):
    ones = np.ones(2, np.float32)
    tokens = np.arange(2, dtype=np.int32)
    ends, ids = np.array([0, 2], np.int32), (RolloutId(0, "digits/1", step, 0, 0),)
    batch = MicroBatch(tokens, tokens, ends, ones, ones, ones, None, np.zeros(2, np.int32), ids)
    write_step(run.steps, [batch], StepFacts(step, 2.0, 2, 1, 1), run=writer, attempt=attempt, sequence=step)


def refused(capsys, *arguments: str) -> str:
    assert submit.main(["c.yaml", "--dry-run", *arguments]) == 2
    return capsys.readouterr().err


def test_a_torn_step_file_is_told_before_anything_starts(original, capsys):
    first, second, _ = sorted(original.steps.glob("step_*"))
    second.write_bytes(second.read_bytes()[:-1])
    words = f"run.replay = {original}: the file of step 2 is not whole ({second}); set at most run.steps=1"
    assert words in refused(capsys, "--replay", "original")
    assert submit.main(["c.yaml", "--dry-run", "--replay", "original", "--set", "run.steps=1"]) == 0
    first.unlink()
    first.mkdir()
    assert f"the file of step 1 is not whole ({first}); name another run" in refused(capsys, "--replay", "original")


def test_a_replay_starts_trainers_alone(original, capsys):
    assert submit.main(["c.yaml", "--replay", "original", "--dry-run"]) == 0
    assert "2 trainer ranks (tensor parallel 2 x data parallel 1), 0 samplers" in capsys.readouterr().out
    config = load(Path("c.yaml"), [f"run.replay={original}"])
    start = find_start(RunFolder("new"), config)
    allocation = Allocation(None, 0, 0, ((Host("here", "127.0.0.1"),),))
    plan = bind(config, make_split(config), allocation, 1)
    assert [child.name for child in plan.children] == ["trainer 0", "trainer 1"]
    assert [entry.file["step"] for entry in start.waiting] == [1, 2, 3]
    assert all(Path(entry.file["path"]).is_file() for entry in start.waiting)
    assert not any(entry.trained for entry in start.waiting)


def test_a_foreign_step_file_hides_none_of_the_replayed_run(original, caplog):
    original.attempt(2).mkdir()
    step_file(original, 2, "another", attempt=2)
    step_file(original, 2, "one", attempt=999)
    start = find_start(RunFolder("new"), load(Path("c.yaml"), [f"run.replay={original}"]))
    assert ["_a001_" in entry.file["path"] for entry in start.waiting] == [True] * 3
    assert "of run 'another', this is run 'one'" in caplog.text
    assert "of attempt 999, the run's newest is attempt 2" in caplog.text


def test_a_replay_from_rollouts_has_a_preprocessor_and_no_steps_yet(original):
    config = load(Path("c.yaml"), [f"run.replay={original}", "run.replay_from=rollouts"])
    start = find_start(RunFolder("new"), config)
    allocation = Allocation(None, 0, 0, ((Host("here", "127.0.0.1"),),))
    plan = bind(config, make_split(config), allocation, 1)
    assert [child.name for child in plan.children] == ["trainer 0", "trainer 1", "preprocess 0"]
    assert not start.waiting


def test_what_does_not_fit_is_refused(original, capsys):
    assert "no run lies there" in refused(capsys, "--replay", "elsewhere")
    assert "has the step files 1 to 3; set at most run.steps=3" in refused(
        capsys, "--replay", "original", "--set", "run.steps=4"
    )
    other = refused(capsys, "--replay", "original", "--set", "model.layers=3", "run.seed=2")
    assert "model.layers = 3" in other
    assert "a replay trains the same model" in other
    assert "run.seed = 2: draws the initial weights" in other
    assert submit.main(["--resume", "original", "--replay", "original"]) == 2
    assert "leave out one of them" in capsys.readouterr().err
    assert "the step files of run.replay = " in refused(
        capsys, "--replay", "original", "--set", "train.value_head=true", "preprocess.advantage=reward"
    )
    assert "name that run too" in refused(capsys, "--replay-rollouts")


def test_steps_that_were_never_trained_are_told_before_the_replay_begins(original, capsys):
    again = ("--replay", "original", "--replay-rollouts", "--set", "run.steps=3")
    assert "trained on no rollouts of its own (a replay, or it never began); name the run that did" in refused(capsys, *again)
    with LedgerWriter(original.ledger(1)) as ledger:
        ids = [RolloutId(0, "digits/1", step, 0, 0) for step in (1, 2, 3)]
        ledger.append([LedgerEvent(i, "issued", Version(0, 0), -1, "") for i in ids])
        ledger.append([LedgerEvent(i, "trained", Version(0, i.group), i.group, "") for i in ids[:2]])
        assert "trained the steps 1 to 2; set at most run.steps=2" in refused(capsys, *again)
        ledger.append([LedgerEvent(ids[2], "trained", Version(0, 3), 3, "")])
    assert submit.main(["c.yaml", "--dry-run", *again]) == 0
    ledger.path.write_bytes(bytes(8) + ledger.path.read_bytes())
    assert "what it trained on cannot be read: " in refused(capsys, *again)


def test_rollouts_that_went_through_redis_are_told(original, capsys):
    through_redis = load(Path("c.yaml"), ["streams.backend=redis", "streams.redis.start=true"])
    original.config.write_text(dump(through_redis))
    words = refused(capsys, "--replay", "original", "--replay-rollouts")
    assert "its rollouts went through Redis (streams.backend: redis), which keeps none; replay its step files" in words
    assert submit.main(["c.yaml", "--replay", "original", "--dry-run"]) == 0


def test_a_damaged_record_of_deleted_files_is_told(original, capsys):
    original.reclaimed.write_text('{"kind": "step"}\n')
    words = refused(capsys, "--replay", "original", "--replay-rollouts")
    assert "whether rollouts of it were deleted cannot be read: " in words
    assert "reclaimed.jsonl: no record of a deleted file" in words


def test_deleted_step_files_are_told(original, capsys):
    for path in original.steps.iterdir():
        path.unlink()
    assert "has no step file 1; give a run that is to be replayed streams.keep: all" in refused(capsys, "--replay", "original")
    original.reclaimed.touch()
    assert "deleted behind its checkpoints (streams.keep: needed)" in refused(capsys, "--replay", "original")
    config = load(Path("c.yaml"), [f"run.replay={original}"])
    with pytest.raises(ConfigError, match="no step file 1"):
        find_start(RunFolder("new"), config)
