"""Why an attempt under Slurm ended that left no exit.json: its orchestrator was killed, or its node is gone. Its batch script
tells that where it can, else whoever comes next asks Slurm."""

import time
from collections.abc import Callable, Mapping, Sequence

from prl.cluster.record import read_record
from prl.cluster.run import ProgramError, Runner, run
from prl.cluster.slurm import job_rows, past_runs
from prl.cluster.slurm_output import JobRow, fold_states
from prl.flow.ending import Decision, Reason
from prl.metrics.progress import last_step
from prl.runfolder.outcome import CANCELLED, EXIT_CODES, FAILED, Outcome
from prl.runfolder.paths import RunFolder

OUT_OF_MEMORY = 253  # srun's exit code where Slurm saw the kernel kill a task for that (SIG_OOM in slurm_protocol_defs.h)

# By the state of its job. One that Slurm calls FAILED or COMPLETED failed in its batch script, which would have written the
# outcome else.
REASONS: Mapping[str, Reason] = {
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"), "node failure"),
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), "time limit"),
    **dict.fromkeys(("CANCELLED", "REVOKED"), "cancelled"),
    **dict.fromkeys(("FAILED", "COMPLETED"), "error"),
    "REQUEUED": "requeued",
    "PREEMPTED": "preempted",
    "OUT_OF_MEMORY": "out of memory",
}


def silent_end(rows: Sequence[JobRow]) -> tuple[Reason, str]:
    """The reason, and a sentence, by the rows of the components of a job that has ended; or of which one has ended, while Slurm
    keeps the other for the time when it starts the first again."""
    ended = [row.state for row in rows if row.state in REASONS]
    reason = REASONS[fold_states(ended)] if ended else "error"
    states = ", ".join(f"{row.state} on {row.nodes}" if row.nodes else row.state for row in rows)
    return reason, f"{reason}: the first process ended without a word; Slurm says of the job: {states or 'nothing'}"


def killed_end(code: int, *, begun: bool) -> tuple[Reason, str]:
    """The reason, and a sentence, of an attempt whose step has ended with srun's exit code, while its job goes on, and of which
    nobody has said why: an orchestrator that had `begun` writes down itself what goes wrong, so that it was killed."""
    how = f"(srun's exit code: {code})"
    if code == OUT_OF_MEMORY:
        return "out of memory", f"the kernel has killed a process, out of memory, and nobody was left to say more {how}"
    if not begun:
        return "killed", f"its step ended without a word before its orchestrator had begun {how}"
    return "killed", f"the orchestrator was killed before it could say why {how}"


def has_raised(folder: RunFolder, attempt: int) -> bool:
    """Whether a task of the attempt has ended with its own words, which submitit has kept: its job's earlier attempts left
    theirs in the same place."""
    record, since = read_record(folder, attempt), folder.attempt_config(attempt).stat().st_mtime
    kept = record.folder.glob(f"{record.job_id}_*_result.pkl")
    return any(path.stat().st_mtime >= since for path in kept)


def ended_runs(job_id: str, runner: Runner = run) -> list[list[JobRow]]:
    """What became of a job each time that it was put into the queue. Where the accounting knows nothing, or cannot be asked
    from here, of its last time alone, if the queue remembers that. Raises ProgramError where neither answers."""
    try:
        found = past_runs(job_id, runner)
    except ProgramError:
        found = []
    return found or [[row for row in job_rows(job_id, runner) if row.state in REASONS]]


def write_silent_end(
    folder: RunFolder, attempt: int, then: Decision, ask: Callable[[str], list[list[JobRow]]] = ended_runs
) -> None:
    """Write the exit.json that the attempt did not write. `then`: what follows it."""
    job_id = read_record(folder, attempt).job_id
    turn = sum(read_record(folder, number).job_id == job_id for number in folder.attempts() if number < attempt)
    try:
        turns, unknown = ask(job_id), ""
    except ProgramError as error:  # in a container there may be none of Slurm's programs
        turns, unknown = [], f" ({error})"
    reason, words = silent_end(turns[turn] if turn < len(turns) else [])
    write_for(folder, attempt, reason, f"{words}{unknown}", then)


def write_for(folder: RunFolder, attempt: int, reason: Reason, words: str, then: Decision) -> Outcome:
    """Write an attempt's exit.json in its place."""
    outcome = CANCELLED if reason == "cancelled" else FAILED
    steps = last_step(folder, attempt)
    code = EXIT_CODES[outcome]
    written = Outcome(outcome, words, reason, then.next, then.words, code=code, steps=steps, ended=time.time())
    written.write(folder.exit(attempt))
    return written
