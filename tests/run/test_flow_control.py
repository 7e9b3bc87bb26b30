"""A trainer that stands still: actors stop at the limit of what may wait, no process grows, and nothing is lost."""

import os
import signal
import subprocess
import time

import psutil
import pytest
from children import children_of
from test_faults import SHORT, wait_for_steps
from whole_runs import ROOT, command

from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder

LIMIT_MIB = 1
STEPS = 30
GROWTH_BYTES = 64 * 2**20  # of one process, what Python and its libraries happen to take included

pytestmark = [pytest.mark.slow, pytest.mark.deadline(480)]


def rollout_bytes(folder: RunFolder) -> int:
    return sum(path.stat().st_size for path in folder.rollouts.rglob("*.arrow"))


def settled(folder: RunFolder, process: subprocess.Popen) -> int:
    """The bytes of all rollouts once they have not grown for some seconds."""
    end = time.monotonic() + 60
    seen, since = rollout_bytes(folder), time.monotonic()
    while time.monotonic() - since < 6:
        assert process.poll() is None
        assert time.monotonic() < end, "rollouts keep coming although nothing is trained"
        time.sleep(0.5)
        if (now := rollout_bytes(folder)) != seen:
            seen, since = now, time.monotonic()
    return seen


def test_a_trainer_that_stands_still_stops_the_actors_and_not_the_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    overrides = [f"run.max_waiting_mib={LIMIT_MIB}", "run.max_lag=100", f"run.steps={STEPS}", "control.lost_after_s=120"]
    process = subprocess.Popen(
        command(*SHORT, *overrides, folder=folder.path), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stopped: list[psutil.Process] = []
    try:
        wait_for_steps(process, folder, 3)
        children = children_of(process.pid, folder)
        others = {name: child for name, child in children.items() if not name.startswith("trainer")}
        others["agent and orchestrator"] = psutil.Process(children["actor 0"].ppid())
        before = {name: child.memory_info().rss for name, child in others.items()}
        stopped = [child for name, child in children.items() if name.startswith("trainer")]
        for child in stopped:
            os.kill(child.pid, signal.SIGSTOP)
        at_stop = rollout_bytes(folder)
        waiting = settled(folder, process)
        grown = {name: child.memory_info().rss - before[name] for name, child in others.items()}
        for child in stopped:
            os.kill(child.pid, signal.SIGCONT)
        output, _ = process.communicate(timeout=240)
    finally:
        for child in stopped:
            if child.is_running():
                os.kill(child.pid, signal.SIGCONT)
        process.kill()
        process.communicate(timeout=60)
    assert waiting - at_stop <= 2 * LIMIT_MIB * 2**20  # what was in flight came, too; by lag alone ten times as much might
    assert waiting >= LIMIT_MIB * 2**20 // 2
    assert max(grown.values()) < GROWTH_BYTES, grown
    assert process.returncode == 0, output
    result = audit(folder.path)
    assert result.passed, render(result)
    assert result.trained == STEPS * 512
