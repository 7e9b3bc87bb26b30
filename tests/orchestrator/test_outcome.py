"""Which of several causes is the cause."""

import json
import subprocess
import time
from dataclasses import replace

import pytest

from prl.flow.ending import Decision
from prl.metrics.events import MetricsWriter
from prl.metrics.progress import steps_before
from prl.orchestrator.outcome import (
    AGENT,
    CANCEL,
    ENDED,
    KILLED,
    LOST,
    MEMORY_KILL,
    REPORTED,
    Cause,
    Ending,
    child_cause,
    conclude,
)
from prl.runfolder.outcome import read_outcome, reserve
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import in_words

LOST_PEER = Cause("trainer 0: connection reset by peer", "trainer", REPORTED)
DEATH = Cause("trainer 1 was ended by SIGKILL", "trainer", KILLED)
SILENCE = Cause("sampler 0 was silent", "sampler", ENDED)
TERM = Cause("cancelled by SIGTERM", None, CANCEL, reason="cancelled")
TRAINED = Ending("all steps trained")
NO_START = Cause("agent 2: no such interpreter", "agent", AGENT, "Traceback ...")


def stop(reason):
    return Decision("stop", reason)


@pytest.mark.parametrize(
    ("causes", "ending", "reason", "outcome", "code"),
    [
        ([], TRAINED, "done", "done", 0),
        ([], Ending("asked to stop by control/STOP", "stopped"), "stopped", "done", 0),
        ([], Ending("warned by SIGUSR1", "time limit"), "time limit", "left", 75),
        ([], Ending("asked to leave", "preempted"), "preempted", "left", 75),
        ([TERM], TRAINED, "cancelled", "cancelled", 130),
        ([DEATH], TRAINED, "error", "failed", 1),
        (
            [LOST_PEER, DEATH, Cause("agent 3 was silent", "agent", LOST, reason="node failure")],
            TRAINED,
            "node failure",
            "failed",
            1,
        ),
        ([Cause("trainer 0: OutOfMemoryError: CUDA", "trainer", REPORTED)], TRAINED, "out of memory", "failed", 1),
        ([replace(DEATH, words=f"{DEATH.words}: {MEMORY_KILL}")], TRAINED, "out of memory", "failed", 1),
        ([Cause(in_words(OSError(28, "No space left on device")), None, REPORTED)], TRAINED, "quota", "failed", 1),
    ],
)
def test_the_reason_is_one_of_the_table_of_what_follows(causes, ending, reason, outcome, code):
    ended = conclude(causes, ending, 7, time.time(), lambda why: Decision("requeue", f"it was {why}"))
    assert (ended.reason, ended.outcome, ended.code) == (reason, outcome, code)
    assert (ended.next, ended.next_words) == ("requeue", f"it was {reason}")


@pytest.mark.parametrize(
    ("causes", "cause", "outcome", "code"),
    [
        ([], "all steps trained", "done", 0),
        ([LOST_PEER, DEATH, SILENCE], DEATH.words, "failed", 1),  # the death explains the error that came first
        ([SILENCE, LOST_PEER], LOST_PEER.words, "failed", 1),
        ([DEATH, TERM], TERM.words, "cancelled", 130),  # who cancels also kills the children
        ([TERM, NO_START], NO_START.words, "failed", 1),  # the batch system ends all after an agent's fault
        ([SILENCE, Cause("actor 0 was silent", "actor", ENDED)], SILENCE.words, "failed", 1),  # else the first
    ],
)
def test_the_cause_that_explains_the_others_wins(tmp_path, causes, cause, outcome, code):
    ended = conclude(causes, TRAINED, 7, time.time(), stop)
    assert (ended.cause, ended.outcome, ended.code, ended.steps) == (cause, outcome, code, 7)
    ended.write(tmp_path / "exit.json")
    written = json.loads((tmp_path / "exit.json").read_text())
    assert written["cause"] == cause
    assert written["detail"] == ("Traceback ..." if cause == NO_START.words else "")


@pytest.mark.parametrize(
    ("code", "log", "log_end"),
    [(-9, "warning: harmless", ""), (3, "", ""), (3, "no memory", "the end of logs/sampler-0.log:\nno memory")],
)
def test_a_cause_is_one_line_with_the_end_of_a_log_that_may_explain_it_beside(tmp_path, code, log, log_end):
    body = {"child": "sampler 0", "code": code, "words": "how it ended", "log": "logs/sampler-0.log", "log_end": log}
    conclude([child_cause(body)], TRAINED, 3, time.time(), stop).write(tmp_path / "exit.json")
    ended = read_outcome(tmp_path / "exit.json")
    assert (ended.cause, ended.role, ended.log_end, ended.detail) == ("how it ended", "sampler", log_end, "")


def test_there_is_room_for_the_outcome_on_a_full_filesystem(tmp_path):
    """A real one, of 1 MiB, mounted where root may; elsewhere the reserve's release is looked at."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False, timeout=30).returncode == 0
    )
    try:
        reserve(folder / "exit.json")
        assert (folder / ".reserve").stat().st_size >= 65536
        if mounted:
            with pytest.raises(OSError, match="No space left"):
                (folder / "filler").write_bytes(bytes(2 * 2**20))
        conclude([DEATH], TRAINED, 3, time.time(), stop).write(folder / "exit.json")
        assert json.loads((folder / "exit.json").read_text())["cause"] == DEATH.words
        assert not (folder / ".reserve").exists()
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True, timeout=30)


def test_what_earlier_attempts_trained_is_read_from_their_outcomes_or_else_from_their_records(tmp_path):
    run = RunFolder(tmp_path)
    for number in (1, 2, 3, 4):
        run.attempt(number).mkdir()
    conclude([DEATH], TRAINED, 5, time.time(), stop).write(run.exit(1))
    run.exit(3).write_text("{torn")  # the second was killed before it could say anything
    for attempt, step in ((2, 6), (2, 7), (4, 8)):
        with MetricsWriter(run.metrics, "orchestrator", 0, attempt) as metrics:
            metrics.write({}, step, kind="step")
    conclude([], TRAINED, 9, time.time(), stop).write(run.exit(4))
    assert steps_before(run, 5) == [5, 7, 7, 9]
    assert steps_before(run, 2) == [5]
