"""The learning itself, from other starting points. Minutes each."""

import subprocess
import time

import pytest
from whole_runs import ROOT, Ended, command, learned, submit

from prl.runfolder.paths import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.deadline(900)]


@pytest.mark.parametrize(("seed", "transport"), [(2, "gather"), (3, "lanes")])
def test_other_seeds_learn_too(tmp_path, seed, transport):
    overrides = (f"run.seed={seed}", f"weights.transport={transport}")
    ended = submit(tmp_path / "run", "configs/quickstart.yaml", "--set", *overrides)
    assert ended.code == 0, ended.logs()
    assert learned(ended), ended.held_out()


def test_without_a_learning_rate_nothing_is_learned(tmp_path):
    """The check that the learning tests make must be able to fail."""
    ended = submit(tmp_path / "run", "configs/quickstart.yaml", "--set", "train.learning_rate=0", "run.steps=60")
    assert ended.code == 0, ended.logs()
    assert not learned(ended)
    assert max(reward for _, reward in ended.held_out()) < 0.12


def test_a_run_stopped_half_way_learns_on_after_it_is_resumed(tmp_path):
    folder = RunFolder(tmp_path / "run")
    process = subprocess.Popen(command("configs/quickstart.yaml", folder=folder.path), cwd=ROOT, stdout=subprocess.DEVNULL)
    running = Ended(folder, 0, "")
    end = time.monotonic() + 600
    while not any(event.step >= 40 for event in running.events("step")):
        assert process.poll() is None, "the run ended before its 40th step"
        assert time.monotonic() < end, "no 40 steps within 600 s"
        time.sleep(0.5)
    folder.stop.touch()
    assert process.wait(120) == 0
    stopped = running.exit
    assert "asked to stop" in stopped["cause"]
    assert 40 <= stopped["steps"] < 100
    resumed = submit(folder.path, "--resume", folder.path)
    assert resumed.code == 0, resumed.logs()
    assert learned(resumed), resumed.held_out()
    assert resumed.events("step", attempt=2)[0].step == stopped["steps"] + 1
