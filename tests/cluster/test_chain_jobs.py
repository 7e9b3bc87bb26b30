"""Jobs of the lab cluster that go on with a run by themselves: in a chain, or put into the queue again."""

import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest

from prl.cluster import claims, submission
from prl.cluster.claims import check_not_running
from prl.cluster.record import read_record
from prl.cluster.slurm import job_state, jobs_in_queue
from prl.cluster.slurm_output import has_ended
from prl.cluster.split import make_split
from prl.config.load import ConfigError, replace
from prl.config.schema import Config
from prl.runfolder.outcome import read_outcome
from prl.runfolder.paths import RunFolder

sys.path.insert(0, str(Path(__file__).parent))
import jobs

cloudpickle.register_pickle_by_value(jobs)
pytestmark = [pytest.mark.slurm, pytest.mark.deadline(600), pytest.mark.usefixtures("slurm_cluster")]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Submits a function as a run; its jobs do not outlive the test."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    sent = []

    def submit(function, **cluster):
        model = {"init": "random", "architecture": "qwen2"}
        cluster = {"nodes": 3, "time_min": 2, **cluster}
        config = replace(Config(), run={"name": "chain", "folder": str(tmp_path / "run")}, model=model, cluster=cluster)
        folder = RunFolder(config.run.folder)
        with claims.undone_on_error(config, folder, 1, resume=False):
            job = submission.submit(config, make_split(config), folder, 1, function, str(folder))
        sent.extend((job.job_id, *job.followers))
        return folder, [job.job_id, *job.followers]

    yield submit
    subprocess.run(["scancel", *reversed(sent)], check=False, timeout=30)


def wait_until(condition, what, limit_s=180):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s} s for {what}; {queue()}"
        time.sleep(0.2)


def queue():
    return subprocess.run(["squeue"], capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.mark.parametrize("mode", ["het", "plain"])
def test_each_job_of_a_chain_goes_on_after_the_one_before_it_and_the_rest_leaves(start, mode):
    folder, chain = start(jobs.leave_once, mode=mode, chain=3)
    with pytest.raises(ConfigError, match="end it first: prl-submit --cancel"):
        check_not_running(folder)
    wait_until(lambda: not jobs_in_queue(chain), "the end of the chain")
    assert folder.attempts() == [1, 2]
    assert [read_record(folder, attempt).job_id for attempt in (1, 2)] == chain[:2]
    assert folder.latest.readlink().name == "attempt_002"
    assert [job_state(job) for job in chain] == ["COMPLETED"] * 3
    left = f"job {chain[2]} has nothing to do: attempt 2 was the last one of the run: done"
    assert left in folder.chain_log(1).read_text()
    said = [(folder.attempt(1) / "submitit" / f"{job}_0_log.out").read_text() for job in chain[:2]]
    assert ["this is attempt 1" in said[0], "this is attempt 2" in said[1]] == [True, True]
    assert folder.batch_log(2).exists()
    check_not_running(folder)


def test_a_chain_ends_with_the_job_that_was_cancelled(start):
    folder, chain = start(jobs.wait_for_term, chain=3)
    wait_until((folder.path / "started").exists, "the first job to run")
    submission.reopen(folder, 1).cancel(0)
    wait_until(lambda: all(has_ended(job_state(job)) for job in chain), "the end of the chain")
    assert [job_state(job) for job in chain] == ["CANCELLED"] * 3
    assert folder.attempts() == [1]
    check_not_running(folder)


@pytest.mark.parametrize("requeue", [pytest.param(True, marks=pytest.mark.slow), False])
def test_after_an_orchestrator_that_was_killed_the_run_goes_on_until_it_gets_nowhere(start, requeue):
    folder, chain = start(jobs.begin_and_die, requeue=requeue, chain=1 if requeue else 3, time_min=10)
    wait_until(lambda: not jobs_in_queue(chain), "the end of the jobs", 540)
    assert folder.attempts() == [1, 2]  # cluster.fruitless_attempts
    ends = [read_outcome(folder.exit(attempt)) for attempt in (1, 2)]
    assert [(end.outcome, end.reason, end.next) for end in ends] == [
        ("failed", "killed", "requeue" if requeue else "chain"),
        ("failed", "killed", "stop"),
    ]
    assert ends[0].cause.startswith("the orchestrator was killed before it could say why (srun's exit code: 1")
    assert ends[1].next_words == "killed; 2 attempts in a row trained no step"
    assert [read_record(folder, attempt).job_id for attempt in (1, 2)] == ([chain[0]] * 2 if requeue else chain[:2])
    assert [job_state(job) for job in chain] == ["FAILED"] * (1 if requeue else 2) + ["CANCELLED"] * (0 if requeue else 1)


def test_after_an_end_without_a_word_before_the_orchestrator_begins_the_next_job_goes_on_once(start):
    folder, chain = start(jobs.die, chain=3, time_min=10)
    wait_until(lambda: not jobs_in_queue(chain), "the end of the jobs")
    assert folder.attempts() == [1, 2]  # cluster.fruitless_attempts
    assert [job_state(job) for job in chain] == ["FAILED", "FAILED", "CANCELLED"]
    first = read_outcome(folder.exit(1))
    assert (first.outcome, first.reason, first.next) == ("failed", "killed", "chain")
    assert first.cause.startswith("its step ended without a word before its orchestrator had begun (srun's exit code: 1")
    assert read_outcome(folder.exit(2)) is None
    said = "prl: attempt 2: its step ended without a word before its orchestrator had begun (srun's exit code: "
    assert said in folder.batch_log(2).read_text()


def test_an_error_before_the_orchestrator_begins_would_be_met_again(start):
    folder, (job,) = start(jobs.fail, requeue=True)
    wait_until(lambda: not jobs_in_queue([job]), "the end of the job")
    assert job_state(job) == "FAILED"
    assert folder.attempts() == [1]
    assert "prl: attempt 1: its step failed before its orchestrator had begun: an error" in folder.batch_log(1).read_text()


def test_a_job_that_is_put_into_the_queue_again_has_a_log_of_its_own(start):
    folder, (job,) = start(jobs.begin_and_wait, requeue=True)
    wait_until(folder.plan(1).exists, "the first attempt")
    before = folder.batch_log(1).read_text()
    subprocess.run(["scontrol", "requeue", job], check=True, timeout=30)
    wait_until(folder.plan(2).exists, "the second attempt")
    assert read_record(folder, 2).job_id == job
    assert folder.batch_log(2).exists()
    assert f"job {job} was put into the queue again and goes on as attempt 2" in folder.batch_log(1).read_text()
    assert folder.batch_log(1).read_text().startswith(before)


@pytest.mark.slow
def test_a_job_that_is_put_into_the_queue_again_and_again_ends_once_it_gets_nowhere(start):
    folder, (job,) = start(jobs.begin_and_wait, requeue=True, time_min=10)
    for attempt in (1, 2):  # cluster.fruitless_attempts
        wait_until(folder.plan(attempt).exists, f"attempt {attempt}")
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=30)
    wait_until(lambda: not jobs_in_queue([job]), "the end of the job")
    assert folder.attempts() == [1, 2]
    assert job_state(job) == "COMPLETED"
    ends = [read_outcome(folder.exit(attempt)) for attempt in (1, 2)]
    assert [(end.outcome, end.reason, end.next) for end in ends] == [
        ("failed", "requeued", "requeue"),
        ("failed", "requeued", "stop"),
    ]
    nothing = f"job {job} was put into the queue again and has nothing to do: requeued; 2 attempts in a row trained no step"
    assert nothing in folder.batch_log(1).read_text()


@pytest.mark.slow
def test_a_chain_goes_on_after_the_loss_of_a_node(start, slurm_cluster):
    folder, chain = start(jobs.begin_and_wait, nodes=2, chain=2)
    wait_until(folder.plan(1).exists, "the first attempt")
    lab = ["bash", str(Path(__file__).parents[2] / "tools" / "slurmlab.sh")]
    asked = ["squeue", "-h", "-j", chain[0], "-o", "%N"]
    nodes = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    subprocess.run([*lab, "kill-node", nodes[-1]], check=True, timeout=60)
    try:
        wait_until(folder.plan(2).exists, "the second attempt")
    finally:
        subprocess.run(["scancel", *reversed(chain)], check=True, timeout=30)
        subprocess.run([*lab, "start-node", nodes[-1]], check=True, timeout=60)
    assert read_record(folder, 2).job_id == chain[1]
    said = folder.chain_log(1).read_text()
    assert "after attempt 1: node failure (it left no exit.json, and Slurm says of its job NODE_FAIL)" in said, said
    idle = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
    wait_until(
        lambda: set(slurm_cluster) <= set(subprocess.run(idle, capture_output=True, text=True, timeout=30).stdout.split()),
        "the node to come back",
    )
