"""What a batch script does once its step has failed: whether the job is put into the queue again, and what is written for an
orchestrator that could not say how it ended."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from stand_ins import stand_in

from prl.cluster.end import end
from prl.cluster.record import Record, read_record
from prl.metrics import names
from prl.metrics.events import MetricsWriter
from prl.runfolder.outcome import Outcome, read_outcome, reserve
from prl.runfolder.paths import RunFolder

RUNNING = (
    "JobId=63 HetJobId=63 HetJobOffset=0 JobName=a JobState=RUNNING Reason=None Requeue=1 Restarts=1 PreemptTime=None "
    "EndTime=2999-01-01T00:00:00\nJobId=64 HetJobId=63 HetJobOffset=1 JobName=a JobState=RUNNING Reason=None Requeue=1 "
    "Restarts=1 PreemptTime=None EndTime=2999-01-01T00:00:00\n"
)
QUEUED = RUNNING.replace("RUNNING Reason=None", "PENDING Reason=BeginTime").replace("Restarts=1", "Restarts=2")
AGAIN = RUNNING.replace("Restarts=1", "Restarts=2")  # and it runs already
COMPLETING = RUNNING.replace("RUNNING", "COMPLETING", 1)
PREEMPTED = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-29T16:13:27")
TIME_IS_UP = RUNNING.replace("2999", "2020")
KILL = 137
OUT_OF_MEMORY = 253  # SIG_OOM


@pytest.fixture
def run(tmp_path):
    """Job 63 has begun for the second time, with attempt 2, whose orchestrator runs."""
    run = RunFolder(tmp_path / "run")
    run.create()
    for attempt in (1, 2):
        run.attempt(attempt).mkdir()
        run.attempt_config(attempt).write_text("run: {name: one}\ncluster: {requeue: true}\n")
        Record("het", "63", (1, 1), "login", 5.0, run.attempt(1) / "submitit", "lab", ()).write(run.submission(attempt))
    Outcome("left", "warned", "time limit", "requeue", "time limit", code=75, steps=3).write(run.exit(1))
    reserve(run.exit(2))
    return run


def said(outcome):
    return outcome.outcome, outcome.reason, outcome.next


@pytest.mark.parametrize(
    ("shown", "code", "ended", "again"),
    [
        (RUNNING, KILL, ("failed", "killed", "requeue"), True),
        (PREEMPTED, KILL, ("failed", "preempted", "requeue"), True),
        (TIME_IS_UP, KILL, ("failed", "time limit", "requeue"), True),
        (RUNNING, OUT_OF_MEMORY, ("failed", "out of memory", "stop"), False),
        (QUEUED, KILL, None, False),
        (AGAIN, KILL, None, False),
        (COMPLETING, KILL, None, False),
        ("", KILL, None, False),
    ],
)
def test_a_killed_orchestrator_s_job_is_queued_again_where_slurm_has_not_done_so(run, shown, code, ended, again):
    assert end(run, 2, code, shown, 1)[0] == again
    written = read_outcome(run.exit(2))
    assert (written and said(written)) == ended
    if written is not None:
        assert str(code) in written.cause
        assert end(run, 2, code, shown, 1)[0] == again  # by what is written


UNKNOWN = RUNNING.replace("RUNNING", "FROZEN", 1)
DOUBT = "the job is not put into the queue again: Slurm calls the job's state 'FROZEN', which prl does not know"


@pytest.mark.parametrize("requeue", [True, False])
@pytest.mark.parametrize(("chain", "follows"), [((), "stop"), (("63", "64"), "chain")])
def test_a_job_in_an_unknown_state_is_not_queued_again_and_that_is_said(run, monkeypatch, requeue, chain, follows):
    stand_in(run.path.parent, monkeypatch, squeue="echo '64|PENDING|N/A||Dependency'")
    run.attempt_config(2).write_text(f"run: {{name: one}}\ncluster: {{requeue: {requeue}}}\n")
    replace(read_record(run, 2), chain=chain).write(run.submission(2))
    again, words = end(run, 2, KILL, UNKNOWN, 1)
    written = read_outcome(run.exit(2))
    assert (again, said(written)) == (False, ("failed", "killed", follows))
    assert DOUBT in written.cause
    assert written.cause in words
    Outcome("left", "warned", "time limit", "requeue", "time limit").write(run.exit(2))
    again, words = end(run, 2, KILL, UNKNOWN, 1)
    assert not again
    assert words.startswith(f"warned; {DOUBT}")
    assert "FROZEN" not in end(run, 2, KILL, UNKNOWN, 0)[1]  # it has been put into the queue again since


def result_of_a_task(run, at_s):
    """As submitit keeps it, written so long after the attempt began."""
    path = read_record(run, 2).folder / "63_1_result.pkl"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    began_s = run.attempt_config(2).stat().st_mtime
    os.utime(path, (began_s + at_s, began_s + at_s))


@pytest.mark.parametrize(
    ("shown", "code", "failed_at_s", "ended"),
    [
        (RUNNING, KILL, None, ("failed", "killed", "requeue")),
        (RUNNING, KILL, -5, ("failed", "killed", "requeue")),  # that of the attempt before
        (RUNNING, KILL, 5, None),  # an error, which it would meet again
        (PREEMPTED, KILL, 5, ("failed", "preempted", "requeue")),  # as Slurm ended it
        (RUNNING, OUT_OF_MEMORY, None, None),
        (QUEUED, KILL, None, None),
    ],
)
def test_an_end_before_the_orchestrator_has_begun_is_an_error_where_a_task_says_so(run, shown, code, failed_at_s, ended):
    """Which leaves what its tasks and the batch script say for an exit.json."""
    (run.attempt(2) / ".reserve").unlink()
    if failed_at_s is not None:
        result_of_a_task(run, failed_at_s)
    assert end(run, 2, code, shown, 1)[0] == (ended is not None)
    written = read_outcome(run.exit(2))
    assert (written and said(written)) == ended
    if written is not None:
        assert written.cause == f"its step ended without a word before its orchestrator had begun (srun's exit code: {code})"


def test_attempts_that_end_before_their_orchestrator_has_begun_are_limited(run):
    for attempt in (1, 2):
        run.exit(attempt).unlink(missing_ok=True)
        (run.attempt(attempt) / ".reserve").unlink(missing_ok=True)
    assert end(run, 1, KILL, RUNNING, 1)[0]
    again, words = end(run, 2, KILL, RUNNING, 1)
    assert not again
    assert words.endswith("what follows: stop (killed; 2 attempts in a row trained no step)")
    assert not run.exit(2).exists()


@pytest.mark.parametrize(
    ("outcome", "again"),
    [
        (Outcome("left", "warned", "time limit", "requeue", "time limit"), True),  # in a container scontrol may be missing
        (Outcome("left", "warned", "time limit", "chain", "time limit"), False),
        (Outcome("failed", "trainer 0: ValueError: no", "error", "stop", "error"), False),
    ],
)
def test_what_an_orchestrator_has_said_counts(run, outcome, again):
    outcome.write(run.exit(2))
    assert end(run, 2, KILL, RUNNING, 1)[0] == again
    assert end(run, 2, KILL, QUEUED, 1)[0] is False
    assert read_outcome(run.exit(2)) == outcome


def test_attempts_that_are_killed_without_progress_end_the_run_and_its_chain(run, monkeypatch):
    stand_in(
        run.path.parent,
        monkeypatch,
        squeue="echo '64|PENDING|N/A||Dependency'",
        scancel=f'echo "$@" >>{run.path.parent}/cancelled',
    )
    for attempt in (1, 2):
        run.attempt_config(attempt).write_text("run: {name: one}\ncluster: {requeue: false}\n")
        replace(read_record(run, attempt), chain=("63", "64")).write(run.submission(attempt))
    Outcome("left", "warned", "time limit", "chain", "time limit", code=75, steps=0).write(run.exit(1))  # trained no step
    with MetricsWriter(run.metrics, "orchestrator", 0, 2) as writer:
        writer.write({}, kind=names.STEP, step=4)  # of which nothing was saved
    for then, steps in (("chain", 4), ("stop", 0)):
        assert not end(run, 2, KILL, RUNNING, 1)[0]
        written = read_outcome(run.exit(2))
        assert (said(written), written.steps) == (("failed", "killed", then), steps)
        run.orchestrator_metrics.unlink(missing_ok=True)
        run.exit(2).unlink()
        reserve(run.exit(2))
    assert (run.path.parent / "cancelled").read_text() == "--state=PENDING 64\n"


def test_the_program_says_requeue_or_nothing_and_loads_little(run, monkeypatch):
    program = (
        "import runpy, sys; runpy.run_module('prl.cluster.end', run_name='__main__'); "
        "print({'torch', 'pyarrow', 'aiohttp', 'numpy', 'submitit'} & set(sys.modules), file=sys.stderr)"
    )
    for name, value in (("PRL_RUN", str(run)), ("PRL_ATTEMPT", "2"), ("SLURM_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)

    def printed(shown):
        line = [sys.executable, "-c", program, str(KILL), shown]
        done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr.endswith("set()\n")
        return done.stdout

    assert printed(QUEUED) == ""
    assert printed(RUNNING) == "requeue\n"
