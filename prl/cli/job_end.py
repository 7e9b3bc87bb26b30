"""A job from its start to its end: progress, the cause of its end, and what to do next."""

import shlex
from collections.abc import Callable

from prl.cli import console
from prl.cli.ending import explain, full_filesystem
from prl.cli.progress import follow
from prl.cluster.record import read_record
from prl.cluster.submission import Submission, reopen
from prl.config.schema import Config
from prl.runfolder.logs import log_end
from prl.runfolder.outcome import Outcome, read_outcome
from prl.runfolder.paths import RunFolder

FAILED = 1
KILLED = "the job's first process was killed before it could say why"
NOT_BEGUN = "the job ended before its first process began"
BATCH_LINES = 5  # of what a batch script said
CHAIN_LOOK_S = 1.0  # between two looks for the next attempt


def follow_job(job: Submission, config: Config, check: Callable[[], None]) -> int:
    """Show progress to the end, also of the attempts that the job begins once Slurm has put it into the queue again, or another
    job of its chain; the run's exit code. `check` raises Cancelled where the user wants to leave."""

    def ended(wait_s: float) -> bool:
        check()
        return job.ended(wait_s) or _begun_after(job) is not None

    outcome = follow(job.run, job.attempt, config, ended)
    how = "ended without a word" if outcome is None else f"{outcome.outcome}: {console.printable(outcome.cause)}"
    later = _begun_after(job)
    if later is None and job.followers and (outcome is None or outcome.next == "chain"):
        print(f"attempt {job.attempt} {how}; waiting for the next job of the chain", flush=True)
        later = _wait_for_chain(job, check)
    if later is not None:
        print(f"attempt {job.attempt} {how}; job {later.job_id} goes on as attempt {later.attempt}", flush=True)
        return follow_job(later, config, check)
    left = job.end_rest(config.control.stop_s)  # a killed job leaves processes behind
    if left:
        console.tell(f"{KILLED}; it left {left} processes, which were ended")
    return report_end(job, outcome or read_outcome(job.run.exit(job.attempt)))


def _begun_after(job: Submission) -> Submission | None:
    """The next attempt, where the same job or another one of its chain has begun it."""
    later = job.attempt + 1
    if not job.run.submission(later).exists() or read_record(job.run, later).job_id not in (job.job_id, *job.followers):
        return None
    return reopen(job.run, later)


def _wait_for_chain(job: Submission, check: Callable[[], None]) -> Submission | None:
    """The next attempt, once one of the jobs behind this one has begun it; None where they all have ended without."""
    for waiting in job.behind():
        while not waiting.ended(CHAIN_LOOK_S):
            check()
            if (later := _begun_after(job)) is not None:
                return later
    return _begun_after(job)


def report_end(job: Submission, outcome: Outcome | None) -> int:
    """Say how a job ended, why, and how to go on; the exit code."""
    if outcome is not None and outcome.code == 0:
        print(f"{outcome.outcome}: {console.printable(outcome.cause)} (exit code 0)\nrun folder: {job.run}")
        return 0
    if outcome is None:
        said = _last_words(job)
        if job.kind == "local":
            explain(job, FAILED, said)
        ended, code = f"the run failed (job {job.job_id} is {job.state()}): {console.printable(said)}", FAILED
        log = f"see {job.job.paths.stderr}" if said == KILLED and job.job.paths.stderr.exists() else ""
    else:
        code, log = outcome.code or FAILED, outcome.log_end
        ended = f"{outcome.outcome}: {console.printable(outcome.cause)} (exit code {code})"
    console.tell("\n".join(filter(None, [ended, console.printable(log), f"logs: {job.run.logs(job.attempt)}"])))
    tell_how_to_go_on(job.run)
    return code


def _last_words(job: Submission) -> str:
    """What is known of the end of a job that wrote no exit.json."""
    full = full_filesystem(job.run.path)
    traceback = job.traceback()
    if full or traceback:
        return full or (traceback or "").rstrip().splitlines()[-1]
    if job.kind == "local":
        return KILLED
    said = log_end(job.run.batch_log(job.attempt), BATCH_LINES)
    how = KILLED if job.run.plan(job.attempt).exists() else NOT_BEGUN
    return f"{how}; its batch script said ({job.run.batch_log(job.attempt)}):\n{said}" if said else how


def tell_how_to_go_on(run: RunFolder) -> None:
    console.tell(f"run folder: {run}")
    if run.manifests():
        console.tell(f"go on with: prl-submit --resume {shlex.quote(str(run))}")


def tell_next_steps(job: Submission) -> None:
    """How a Slurm job is looked at, saved and ended from now on."""
    run, logs = shlex.quote(str(job.run)), shlex.quote(str(job.run.logs(job.attempt)))
    behind = f", and behind it in its chain job {' '.join(job.followers)}" if job.followers else ""
    print(f"job {job.job_id} submitted{behind}; what to do next:")
    print(f"  prl-submit --status {run}            is it running?")
    print(f"  prl-submit --status {run} --follow   its progress, to its end")
    print(f"  prl-report {run}                     how does it learn?")
    print(f"  tail -F {logs}/*.log")
    print("\n".join(how_to_end(job.run)), flush=True)


def how_to_end(run: RunFolder) -> list[str]:
    """Lines that say how a run is saved and ended from outside."""
    return [
        f"  touch {shlex.quote(str(run.save))}   save the step in hand, and go on",
        f"  touch {shlex.quote(str(run.stop))}   end after the step in hand, with a checkpoint",
        f"  prl-submit --cancel {shlex.quote(str(run))}            end at once",
    ]
