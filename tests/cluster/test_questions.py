"""How often Slurm's controller is asked anything for the sake of a run that goes on: by its own count of what it was asked."""

import math
import re
import subprocess
import sys
import time

import lab_cluster
import pytest
from small_runs import small_run, wait_for_processes

LOOK_S = 59.0
EVERY_S = 30.0  # between two questions
_COUNT = re.compile(r"^\s+(\w+)\s+\(\s*\d+\)\s+count:(\d+)", re.MULTILINE)


def asked() -> dict[str, int]:
    """Calls of the controller since its counts were set to nothing, by their kind, but for those of Slurm's own daemons and of
    this test."""
    kinds, _, _ = lab_cluster.slurm("sdiag").partition("Remote Procedure Call statistics by user")
    counts = {kind: int(count) for kind, count in _COUNT.findall(kinds)}
    return {kind: count for kind, count in counts.items() if kind.startswith("REQUEST_") and kind != "REQUEST_STATS_INFO"}


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.slurm_netns
def test_the_controller_is_asked_once_in_30_s_by_a_run_and_whoever_follows_it(tmp_path, slurm_cluster):
    with small_run(tmp_path / "run", slurm_cluster) as run:
        wait_for_processes(run)
        line = [sys.executable, "-m", "prl.cli.submit", "--status", str(run.folder), "--follow"]
        follower = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert "starting" in "".join(follower.stdout.readline() for _ in range(4))  # has begun to follow
            lab_cluster.slurm("sdiag", "--reset")
            time.sleep(LOOK_S)
            found = asked()
            assert follower.poll() is None
        finally:
            follower.terminate()
            follower.communicate(timeout=30)
        assert 1 <= max(found.values()) <= math.ceil(LOOK_S / EVERY_S), found  # one squeue makes a call of each of some kinds
