"""Which attempt a Slurm job is for that nobody submitted for one: `python -m prl.cluster.begin`, run by its batch script.

A job that Slurm has put into the queue again goes on with the run as the next attempt, unless too many in a row trained no
step. So does a job that follows another one in a chain, unless the run has ended, or somebody asks for its end. One that does
not go on makes nothing, and ends well. The attempt's number goes to standard output, nothing where there is none; what was
decided, and why, to standard error.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prl.cluster.claims import next_attempt, point_latest, write_canary
from prl.cluster.means import dismiss_followers
from prl.cluster.record import Record, read_record
from prl.cluster.run import ProgramError
from prl.cluster.silent_end import REASONS, write_silent_end
from prl.cluster.slurm import job_state
from prl.cluster.slurm_output import has_ended
from prl.config.load import load
from prl.config.plain_files import read_plain
from prl.flow.ending import GOES_ON, Decision, Means, decide
from prl.metrics.progress import steps_before
from prl.runfolder.outcome import read_outcome
from prl.runfolder.paths import RunFolder, listed
from prl.runfolder.publish import publish


class BeginError(Exception):
    """The job cannot go on with the run, nor say that it has ended; the message says what is in the way."""


def begin(run: RunFolder, job_id: str, ask: Callable[[str], str | None] = job_state) -> tuple[int | None, str]:
    """The attempt that the job is for, whose folder is made; None where the run has ended. And what was decided, in words.
    `ask`: Slurm, for a job's state. Raises BeginError, and what is raised where the folder or Slurm's answer cannot be read."""
    last = run.attempts()[-1]
    record = read_record(run, last)
    if record.job_id == job_id:
        return _again(run, last, record)
    decision = _after(run, last, record, ask)
    if decision.next != "chain":
        return None, f"job {job_id} has nothing to do: attempt {last} was the last one of the run: {decision.words}"
    if not run.exit(last).exists():
        write_silent_end(run, last, decision)
    goes_on = _claim(run, last, replace(record, job_id=job_id))
    return goes_on, f"job {job_id} goes on as attempt {goes_on} after attempt {last}: {decision.words}"


def _again(run: RunFolder, last: int, record: Record) -> tuple[int | None, str]:
    """The attempt of a job that was put into the queue again, by Slurm itself, too, which counts no attempts."""
    job_id, outcome = record.job_id, read_outcome(run.exit(last))
    if outcome is None and not run.plan(last).exists():
        return last, f"job {job_id} begins attempt {last}, with which it had not begun"
    reason = "requeued" if outcome is None else outcome.reason
    means = Means(requeue=True, chain=0, fruitless=load(run.config).cluster.fruitless_attempts)
    then = decide(reason, steps_before(run, last + 1), means) if reason in GOES_ON else Decision("requeue", reason)
    if outcome is None:
        write_silent_end(run, last, then)
    if then.next == "stop":
        dismiss_followers(run, last)
        return None, f"job {job_id} was put into the queue again and has nothing to do: {then.words}"
    return _claim(run, last, record), f"job {job_id} was put into the queue again and goes on as attempt {last + 1}"


def _after(run: RunFolder, last: int, record: Record, ask: Callable[[str], str | None]) -> Decision:
    """What follows the last attempt, whose job was another one."""
    if run.stop in listed(run.control, run.stop.name):
        return Decision("stop", f"asked to stop by {run.stop}")
    outcome = read_outcome(run.exit(last))
    if outcome is not None:
        return Decision("chain" if outcome.next == "chain" else "stop", outcome.next_words or outcome.outcome)
    try:
        state = ask(record.job_id)
        known = "does not know its job any more" if state is None else f"says of its job {state}"
    except ProgramError as error:  # in a container there may be none of Slurm's programs
        state, known = None, f"cannot be asked about its job: {error}"
    if state is not None and not has_ended(state):
        raise BeginError(f"{run}: job {record.job_id} of attempt {last} is {state}, and two attempts at once are one too many")
    # One of which nobody knows is worth another attempt: those that train nothing are counted.
    reason = "node failure" if state is None else REASONS[state]
    means = Means(requeue=False, chain=1, fruitless=load(run.config).cluster.fruitless_attempts)
    decision = decide(reason, steps_before(run, last + 1), means)
    return replace(decision, words=f"{decision.words} (it left no {run.exit(last).name}, and Slurm {known})")


def _claim(run: RunFolder, last: int, record: Record) -> int:
    """Make the next attempt's folder with all that a submission leaves there, of the configuration of the last one. Raises
    FileExistsError where another job, or a command, has claimed it."""
    attempt = next_attempt(run)
    run.attempt(attempt).mkdir()
    run.logs(attempt).mkdir()
    publish(run.attempt_config(attempt), read_plain(run.attempt_config(last)))
    write_canary(run, attempt)
    record.write(run.submission(attempt))
    point_latest(run, Path(run.attempt(attempt).name))
    return attempt


def main() -> None:
    attempt, words = begin(RunFolder(os.environ["PRL_RUN"]), os.environ["SLURM_JOB_ID"])
    print(f"prl: {words}", file=sys.stderr, flush=True)
    if attempt is not None:
        print(attempt, flush=True)


if __name__ == "__main__":
    main()
