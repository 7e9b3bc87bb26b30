"""A Slurm that gives no answer for a while is waited for, and not for ever."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from prl.cluster.claims import SubmissionError
from prl.cluster.run import ProgramError
from prl.cluster.submission import ENDING_POLL_S, SLURM_POLL_S, Submission
from prl.runfolder.paths import RunFolder


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def sleep(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


def followed(answer):
    """A job whose state at second s is answer(s), None for no answer; the second at which it was seen to have ended."""
    clock = Clock()

    def ask(job_id):
        assert job_id == "63"
        state = answer(clock.now - 1000)
        if state is None:
            raise ProgramError("squeue: Unable to contact slurm controller")
        return state

    job = Submission(RunFolder("/runs/a"), 1, "het", SimpleNamespace(job_id="63"), 0.0, ask=ask, sleep=clock.sleep, clock=clock)
    while not job.ended(1.0):
        assert clock.now < 1e6
    return clock.now - 1000


def test_a_silence_of_minutes_is_waited_out():
    assert followed(lambda s: "RUNNING" if s < 100 or 690 < s < 1500 else "COMPLETED" if s > 2080 else None) == pytest.approx(
        2080, abs=SLURM_POLL_S + 1
    )


def test_slurm_is_asked_seldom_until_the_attempt_says_that_it_ends(tmp_path):
    clock, run, asked = Clock(), RunFolder(tmp_path), []

    def ask(_job_id):
        asked.append(clock.now - 1000)
        return "COMPLETED" if clock.now > 1104 else "RUNNING"

    run.attempt(1).mkdir()
    job = Submission(run, 1, "het", SimpleNamespace(job_id="63"), 0.0, ask=ask, sleep=clock.sleep, clock=clock)
    while not job.ended(0.25):
        if clock.now == 1100:
            run.exit(1).touch()
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses == [SLURM_POLL_S] * 3 + [100.25 - asked[3], ENDING_POLL_S]


def test_a_job_is_given_up_with_words_after_a_longer_one():
    with pytest.raises(
        SubmissionError, match=r"not answered for 10 minutes \(squeue: Unable to contact .* job 63 is left as it"
    ):
        followed(lambda s: "RUNNING" if s < 100 else None)


def test_a_state_that_nobody_can_tell_is_told_as_such():
    def ask(_job_id):
        raise ProgramError("squeue: no answer within 30 s")

    job = Submission(RunFolder("/runs/a"), 1, "het", SimpleNamespace(job_id="63"), 0.0, ask=ask)
    assert job.state() == "UNKNOWN (squeue: no answer within 30 s)"
