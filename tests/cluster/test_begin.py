"""Which attempt a job begins that nobody submitted for one: put into the queue again, or behind another one in a chain."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from stand_ins import stand_in

from prl.cluster.begin import BeginError, begin
from prl.cluster.record import Record, read_record
from prl.cluster.run import ProgramError
from prl.cluster.slurm_output import ENDED
from prl.metrics.events import MetricsWriter
from prl.runfolder.outcome import Outcome, OutcomeError, read_outcome
from prl.runfolder.paths import RunFolder

RECORD = Record("het", "7", (1, 2), "login", 5.0, RunFolder("/runs/a").attempt(1) / "submitit", "lab", ("7", "9", "11"))
CONFIG = "run: {name: one}\ncluster: {fruitless_attempts: 2}\n"
LEFT = Outcome("left", "warned", "time limit", "chain", "time limit", code=75, steps=3)


@pytest.fixture
def run(tmp_path):
    """Its first attempt is that of job 7, behind which jobs 9 and 11 follow."""
    run = RunFolder(tmp_path / "my run")
    run.create()
    run.config.write_text(CONFIG)
    made(run, 1, RECORD)
    run.plan(1).write_text("{}")
    return run


def made(run, attempt, record):
    run.attempt(attempt).mkdir()
    run.attempt_config(attempt).write_text(CONFIG)
    record.write(run.submission(attempt))


def trained(run, attempt, step):
    with MetricsWriter(run.metrics, "orchestrator", 0, attempt) as metrics:
        metrics.write({}, step, kind="step")


def nobody(_job_id):
    raise AssertionError("Slurm is asked only where an attempt did not say how it ended")


def test_a_job_that_is_put_into_the_queue_again_begins_one_attempt_after_another(run):
    for attempt, step in ((2, 5), (3, 8)):
        trained(run, attempt - 1, step)
        assert begin(run, "7", nobody)[0] == attempt
        assert read_outcome(run.exit(attempt - 1)).next == "requeue"
        assert read_record(run, attempt) == RECORD
        assert run.attempt_config(attempt).read_text() == CONFIG
        assert run.logs(attempt).is_dir()
        assert run.latest.readlink().name == run.attempt(attempt).name
        assert begin(run, "7", nobody)[0] == attempt  # again, before anything of it began
        run.plan(attempt).write_text("{}")


@pytest.mark.parametrize(
    "ends",
    [
        (None, None),
        (None, replace(LEFT, reason="preempted", next="stop", steps=0)),
        (replace(LEFT, reason="preempted", next="requeue", steps=0), None),
    ],
)
def test_a_job_that_slurm_puts_into_the_queue_again_ends_once_it_gets_nowhere(run, monkeypatch, ends):
    """Two attempts in a row that trained no step; their orchestrators said so, or could not say anything."""
    stand_in(
        run.path.parent,
        monkeypatch,
        squeue="echo '9|PENDING|N/A||Dependency'",
        scancel=f'echo "$@" >>{run.path.parent}/cancelled',
    )
    for attempt, outcome in enumerate(ends, 1):
        run.plan(attempt).write_text("{}")
        if outcome is not None:
            outcome.write(run.exit(attempt))
        goes_on, words = begin(run, "7", nobody)
        assert goes_on == {1: 2, 2: None}[attempt]
    assert run.attempts() == [1, 2]
    assert words.startswith("job 7 was put into the queue again and has nothing to do: ")
    assert words.endswith("; 2 attempts in a row trained no step")
    assert read_outcome(run.exit(2)).next == "stop"
    assert (run.path.parent / "cancelled").read_text() == "--state=PENDING 11 9\n"


@pytest.mark.parametrize("reason", ["error", "quota", ""])
def test_a_job_that_somebody_puts_into_the_queue_again_after_an_error_goes_on(run, reason):
    """Who did that has removed the cause; the last one is of an older program."""
    Outcome("failed", "said why", reason, "stop", reason, code=1, steps=0).write(run.exit(1))
    assert begin(run, "7", nobody)[0] == 2


def test_a_job_of_a_chain_goes_on_where_the_one_before_it_left(run):
    LEFT.write(run.exit(1))
    attempt, words = begin(run, "9", nobody)
    assert (attempt, words) == (2, "job 9 goes on as attempt 2 after attempt 1: time limit")
    record = read_record(run, 2)
    assert record == replace(RECORD, job_id="9")
    assert (record.followers, RECORD.followers) == (("11",), ("9", "11"))
    assert json.loads(run.submission(2).read_text())["component_job_ids"] == ["9", "10"]
    run.plan(2).write_text("{}")
    LEFT.write(run.exit(2))
    assert begin(run, "11", nobody)[0] == 3
    assert read_record(run, 3).followers == ()


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome("done", "all 20 steps trained", "done", "stop", "done"), "done"),
        (Outcome("done", "asked to stop by STOP", "stopped", "stop", "stopped"), "stopped"),
        (Outcome("cancelled", "cancelled by SIGTERM", "cancelled", "stop", "cancelled"), "cancelled"),
        (Outcome("failed", "trainer 0: ValueError: no", "error", "stop", "error"), "error"),
        (Outcome("left", "warned", "time limit", "stop", "time limit; 2 attempts in a row trained no step"), "trained no step"),
        (Outcome("failed", "of an older program"), "failed"),
    ],
)
def test_the_rest_of_a_chain_leaves_nothing_behind_once_the_run_has_ended(run, outcome, words):
    outcome.write(run.exit(1))
    before = sorted(run.path.rglob("*"))
    for job in ("9", "11"):
        attempt, said = begin(run, job, nobody)
        assert attempt is None
        assert said.startswith(f"job {job} has nothing to do: attempt 1 was the last one of the run: ")
        assert words in said
    assert sorted(run.path.rglob("*")) == before


def test_a_stop_between_two_attempts_counts(run):
    LEFT.write(run.exit(1))
    run.stop.touch()
    assert begin(run, "9", nobody) == (
        None,
        f"job 9 has nothing to do: attempt 1 was the last one of the run: asked to stop by {run.stop}",
    )


def test_what_slurm_says_of_a_job_that_could_not_say_it_itself(run):
    on = {"NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "TIMEOUT", "DEADLINE", "PREEMPTED"}
    asked = []

    def says(state):
        def ask(job_id):
            asked.append(job_id)
            return state

        return ask

    def gives_no_answer(_job_id):
        raise ProgramError("squeue: no such program on PATH")

    def remove_second():
        shutil.rmtree(run.attempt(2))
        assert json.loads(run.exit(1).read_text())["next"] == "chain"  # written by whoever begins the second
        run.exit(1).unlink()

    for state in set(ENDED) - on:
        assert begin(run, "9", says(state))[0] is None
    assert set(asked) == {"7"}
    for state in (*on, None):
        assert begin(run, "9", says(state))[0] == 2
        remove_second()
    assert begin(run, "9", gives_no_answer)[1].endswith("Slurm cannot be asked about its job: squeue: no such program on PATH)")
    remove_second()
    with pytest.raises(BeginError, match="job 7 of attempt 1 is RUNNING, and two attempts at once are one too many"):
        begin(run, "9", says("RUNNING"))
    run.exit(1).write_text("{")
    with pytest.raises(OutcomeError):
        begin(run, "9", nobody)


@pytest.mark.parametrize(("steps", "goes_on"), [([], False), ([(1, 5)], True), ([(1, 5), (2, 5)], True), ([(2, 1)], True)])
def test_attempts_that_died_without_a_word_count_as_fruitless_unless_they_trained(run, steps, goes_on):
    """Two in a row that got no further end the run."""
    made(run, 2, replace(RECORD, job_id="9"))
    for attempt, step in steps:
        trained(run, attempt, step)
    attempt, words = begin(run, "11", lambda _job_id: "NODE_FAIL")
    assert (attempt == 3) == goes_on
    assert ("2 attempts in a row trained no step" in words) == (not goes_on)


def test_the_program_prints_a_number_or_nothing_and_loads_little(run, monkeypatch):
    """It stands before every step of a chain."""
    program = (
        "import runpy, sys; runpy.run_module('prl.cluster.begin', run_name='__main__'); "
        "print({'torch', 'pyarrow', 'aiohttp', 'numpy', 'submitit'} & set(sys.modules), file=sys.stderr)"
    )
    stand_in(run.path.parent, monkeypatch, squeue="echo '7+0|COMPLETED|N/A|n1|None'; echo '7+1|NODE_FAIL|N/A|n2|None'")
    monkeypatch.setenv("PRL_RUN", str(run))

    def printed(job):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr.endswith("set()\n")
        return done.stdout, done.stderr

    out, err = printed("9")
    assert out == "2\n"
    assert err.startswith("prl: job 9 goes on as attempt 2 after attempt 1: node failure (it left no exit.json, and Slurm says")
    run.plan(2).write_text("{}")
    Outcome("done", "all steps", "done", "stop", "done").write(run.exit(2))
    assert printed("11")[0] == ""
