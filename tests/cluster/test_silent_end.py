"""Of an attempt that left no exit.json Slurm tells how it ended."""

from datetime import datetime

import pytest

from prl.cluster.record import Record
from prl.cluster.run import ProgramError
from prl.cluster.silent_end import silent_end, write_silent_end
from prl.cluster.slurm_output import ENDED, JobRow
from prl.flow.ending import Decision
from prl.metrics import names
from prl.metrics.events import MetricsWriter
from prl.runfolder.outcome import read_outcome
from prl.runfolder.paths import RunFolder

START = datetime(2026, 11, 29, 16, 13, 27)


def rows(*states):
    return [JobRow("63", k, state, START, f"n{k + 1}") for k, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (("NODE_FAIL", "NODE_FAIL"), "node failure"),
        (("NODE_FAIL", "RUNNING"), "node failure"),
        (("PREEMPTED", "PREEMPTED"), "preempted"),
        (("REQUEUED", "REQUEUED"), "requeued"),
        (("TIMEOUT", "CANCELLED"), "time limit"),
        (("CANCELLED", "CANCELLED"), "cancelled"),
        (("FAILED", "CANCELLED"), "error"),
        (("OUT_OF_MEMORY", "CANCELLED"), "out of memory"),
        ((), "error"),
    ],
)
def test_its_reason(states, reason):
    found, words = silent_end(rows(*states))
    assert found == reason
    assert words.startswith(f"{reason}: the first process ended without a word")
    assert all(f"{state} on n{k + 1}" in words for k, state in enumerate(states))


@pytest.mark.parametrize("state", ENDED)
def test_every_end_has_a_reason(state):
    assert silent_end(rows(state))[0] in ("node failure", "out of memory", "time limit", "error", "preempted", "cancelled")


def test_whoever_begins_the_next_attempt_writes_what_the_one_before_it_could_not(tmp_path):
    run = RunFolder(tmp_path)
    run.create()
    for attempt, job, steps in ((2, "62", (6,)), (3, "63", (7, 8)), (4, "63", (8, 9, 10)), (5, "63", (11,))):
        run.attempt(attempt).mkdir()
        Record("het", job, (1, 1), "login", 0.0, tmp_path).write(run.submission(attempt))
        with MetricsWriter(run.metrics, "orchestrator", 0, attempt) as writer:
            for step in steps:
                writer.write({}, kind=names.STEP, step=step)
    turns = [rows("PREEMPTED", "PREEMPTED"), rows("NODE_FAIL", "NODE_FAIL"), rows("RUNNING", "RUNNING")]
    write_silent_end(run, 4, Decision("requeue", "again"), lambda job: turns if job == "63" else [])
    ended = read_outcome(run.exit(4))
    assert (ended.outcome, ended.reason, ended.next, ended.code, ended.steps) == ("failed", "node failure", "requeue", 1, 10)
    assert ended.cause.endswith("NODE_FAIL on n1, NODE_FAIL on n2")

    def silence(job):
        raise ProgramError("sacct: no answer within 30 s")

    write_silent_end(run, 4, Decision("chain", "next"), silence)
    ended = read_outcome(run.exit(4))
    assert "Slurm says of the job: nothing (sacct: no answer within 30 s)" in ended.cause
    assert (ended.next, ended.next_words) == ("chain", "next")
