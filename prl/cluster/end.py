"""What follows an attempt whose step has failed: `python -m prl.cluster.end CODE JOB`, run by its batch script with srun's exit
code and what `scontrol -o show job` says of the job.

An orchestrator decides itself, and has its job put into the queue again. Where it was killed, as Slurm also kills all of a step
that loses a node while the job goes on, this decides for it. `requeue` goes to standard output where the batch script is to put
the job into the queue again, nothing where it is not, or Slurm has done it; what was decided, and why, to standard error.
"""

import os
import sys
import time

from prl.cluster.means import dismiss_followers, means_of
from prl.cluster.silent_end import killed_end, write_for
from prl.cluster.slurm import still_runs, termination
from prl.config.load import load
from prl.flow.ending import decide
from prl.runfolder.outcome import is_reserved, read_outcome, steps_before
from prl.runfolder.paths import RunFolder


def end(run: RunFolder, attempt: int, code: int, shown: str, restarts: int) -> tuple[bool, str]:
    """Whether the job is to be put into the queue again, and what was decided, in words. `shown`: of scontrol; `restarts`: how
    often the job had been put into the queue again before it began."""
    outcome = read_outcome(run.exit(attempt))
    if not still_runs(shown, restarts):
        return False, "Slurm ends the job, or has put it into the queue again" if shown else "Slurm does not say of the job"
    if outcome is None and not is_reserved(run.exit(attempt)):
        return False, "its step ended before its orchestrator had begun: an error that it would meet again"
    if outcome is None:
        config = load(run.attempt_config(attempt))
        reason, words = killed_end(code)
        reason = termination(shown, time.time(), restarts) or reason
        then = decide(reason, steps_before(run, attempt + 1), means_of(run, attempt, config))
        outcome = write_for(run, attempt, reason, words, then)
        if then.next == "stop":
            dismiss_followers(run, attempt)
    return outcome.next == "requeue", f"{outcome.cause}; what follows: {outcome.next} ({outcome.next_words})"


def main() -> None:
    run, attempt = RunFolder(os.environ["PRL_RUN"]), int(os.environ["PRL_ATTEMPT"])
    again, words = end(run, attempt, int(sys.argv[1]), sys.argv[2], int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    print(f"prl: attempt {attempt}: {words}", file=sys.stderr, flush=True)
    if again:
        print("requeue", flush=True)


if __name__ == "__main__":
    main()
