"""What follows an attempt whose step has failed: `python -m prl.cluster.end CODE JOB`, run by its batch script with srun's exit
code and what `scontrol -o show job` says of the job.

An orchestrator decides itself, and has its job put into the queue again. Where it was killed, as Slurm also kills all of a step
that loses a node while the job goes on, this decides for it; also before it has begun, unless a task has said what is wrong.
`requeue` goes to standard output where the batch script is to put the job into the queue again, nothing where it is not, or
Slurm has done it; what was decided, and why, to standard error.
"""

import os
import sys
import time
from dataclasses import replace

from prl.cluster.means import dismiss_followers, means_of
from prl.cluster.silent_end import has_raised, killed_end, write_for
from prl.cluster.slurm import still_runs, termination
from prl.cluster.slurm_output import SlurmOutputError
from prl.config.load import load
from prl.flow.ending import decide
from prl.metrics.progress import steps_before
from prl.runfolder.outcome import is_reserved, read_outcome
from prl.runfolder.paths import RunFolder


def end(run: RunFolder, attempt: int, code: int, shown: str, restarts: int) -> tuple[bool, str]:
    """Whether the job is to be put into the queue again, and what was decided, in words. `shown`: of scontrol; `restarts`: how
    often the job had been put into the queue again before it began. One in a state that prl does not know, which may be that of
    a job that somebody has ended, is not put into the queue again."""
    outcome, doubt = read_outcome(run.exit(attempt)), ""
    try:
        if not still_runs(shown, restarts):
            return False, "Slurm ends the job, or has put it into the queue again" if shown else "Slurm does not say of the job"
    except SlurmOutputError as error:
        doubt = f"; the job is not put into the queue again: {error}"
    if outcome is None:
        begun, said = is_reserved(run.exit(attempt)), None if doubt else termination(shown, time.time(), restarts)
        if not begun and said is None and has_raised(run, attempt):
            return False, "its step failed before its orchestrator had begun: an error that it would meet again"
        reason, words = killed_end(code, begun=begun)
        reason, words = said or reason, f"{words}{doubt}"
        means = means_of(run, attempt, load(run.attempt_config(attempt)))
        then = decide(reason, steps_before(run, attempt + 1), replace(means, requeue=means.requeue and not doubt))
        if then.next == "stop":
            dismiss_followers(run, attempt)
            if not begun:  # what its tasks and the batch script say tells more than an exit.json would
                return False, f"{words}; what follows: stop ({then.words})"
        outcome = write_for(run, attempt, reason, words, then)
    if doubt and outcome.next == "requeue":
        return False, f"{outcome.cause}{doubt}"
    return outcome.next == "requeue", f"{outcome.cause}; what follows: {outcome.next} ({outcome.next_words})"


def main() -> None:
    run, attempt = RunFolder(os.environ["PRL_RUN"]), int(os.environ["PRL_ATTEMPT"])
    again, words = end(run, attempt, int(sys.argv[1]), sys.argv[2], int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    print(f"prl: attempt {attempt}: {words}", file=sys.stderr, flush=True)
    if again:
        print("requeue", flush=True)


if __name__ == "__main__":
    main()
