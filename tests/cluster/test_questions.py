"""How often Slurm's controller is asked anything for the sake of a run that goes on: by its own count of what it was asked."""

import re
import subprocess
import sys
import time
from collections import Counter

import lab_cluster
import pytest
from lab_runs import LabRun
from small_runs import small_run, wait_for_processes

from prl.cluster.slurm import job_state

LOOK_S = 59.0
EVERY_S = 30.0  # between two questions
OF_DAEMONS = re.compile("MESSAGE_|ACCOUNTING_|REQUEST_STATS_INFO$")  # which tell it how their nodes are; and of this test
_COUNT = re.compile(r"^\s+(\w+)\s+\(\s*\d+\)\s+count:(\d+)", re.MULTILINE)


def asked() -> Counter[str]:
    """Calls of the controller since its counts were set to nothing, by their kind, but for those of Slurm's own daemons and of
    this test."""
    return _counts("sdiag", but=OF_DAEMONS)


def asked_accounting() -> Counter[str]:
    """Calls of slurmdbd for jobs, since it started."""
    return _counts("sacctmgr", "show", "stats", but=re.compile("(?!DBD_GET_JOBS)"))


def _counts(*command: str, but: re.Pattern[str]) -> Counter[str]:
    kinds, _, _ = lab_cluster.slurm(*command).partition("Remote Procedure Call statistics by user")
    counts = Counter({kind: int(count) for kind, count in _COUNT.findall(kinds) if not but.match(kind)})
    return +counts


def one_question(run: LabRun) -> Counter[str]:
    """The calls that one question for the job's state is made of: squeue makes some of several kinds."""
    lab_cluster.slurm("sdiag", "--reset")
    assert job_state(run.job) == "RUNNING"
    return asked()


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.slurm_netns
def test_the_controller_is_asked_once_in_30_s_by_a_run_and_whoever_follows_it(tmp_path, slurm_cluster):
    """Whatever asks, nodes or follower: all calls of all kinds together are those of so many questions, and no more. The
    accounting, which is another daemon's, is not asked at all."""
    with small_run(tmp_path / "run", slurm_cluster) as run:
        wait_for_processes(run)
        question, accounting = one_question(run), asked_accounting()
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
        questions = -(-LOOK_S // EVERY_S)
        too_many = {kind: count for kind, count in found.items() if count > questions * question[kind]}
        assert not too_many, f"{too_many} of {found}, where one question is {question}"
        assert found, "not even the follower has asked: nothing was measured"
        assert asked_accounting() == accounting
