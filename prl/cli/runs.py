"""A run by its folder: what its job is doing, and how to end it."""

import os
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from prl.cli import console
from prl.cli.interrupts import Cancelled
from prl.cli.job_end import follow_job, how_to_end
from prl.cluster.processes import end_processes, first_processes, processes_of
from prl.cluster.record import Record, read_record
from prl.cluster.silent_end import silent_end
from prl.cluster.slurm import job_rows, jobs_in_queue
from prl.cluster.slurm_output import WAITING, JobRow, SlurmOutputError, fold_states, has_ended
from prl.cluster.submission import reopen
from prl.config.load import ConfigError, load
from prl.config.paths import current_folder
from prl.runfolder.outcome import OutcomeError, read_outcome
from prl.runfolder.paths import RunFolder, run_of_attempt

LEFT = 130  # exit code of a command that follows a job and is interrupted; the job goes on


def show_status(path: str, follow: Callable[[], None] | None) -> int:
    """Print the state of a run's latest attempt, and with `follow` its progress to its end (it raises Cancelled where the user
    wants to leave); the exit code. Raises ConfigError, ProgramError, SubmissionError and, with `follow`, OutcomeError."""
    run, attempt, record = _latest(path)
    print(f"run {run}, attempt {attempt}, {_job(record)}")
    if record.kind == "local":
        here = first_processes(processes_of(run, attempt)) if record.host == os.uname().nodename else []
        print("\n".join(f"  runs here, process {process.pid}" for process in here) or f"  {_end(run, attempt)}")
        if follow:
            raise ConfigError(f"--follow {path}: a run without Slurm is followed where it was started, on {record.host}")
        return 0
    rows = job_rows(record.job_id)
    for row in rows:
        print(f"  {_component(record, row)}{_words(row)}")
    if not rows or has_ended(fold_states([row.state for row in rows])):
        print(f"  {_end(run, attempt, rows)}", flush=True)
    for job_id in record.followers:
        print(f"  behind it in the chain: job {job_id} {_words_of(job_rows(job_id))}", flush=True)
    if follow is None:
        return 0
    job = reopen(run, attempt)
    try:
        return follow_job(job, load(run.config), follow)
    except Cancelled as reason:
        return leave_running(run, reason)


def cancel(path: str) -> int:
    """End the job of a run's latest attempt, and those behind it in its chain: of a heterogeneous job the leader, with which
    all components end (Slurm lets one component alone be cancelled, and the step over all of them goes on without it). Raises
    ConfigError and ProgramError."""
    run, attempt, record = _latest(path)
    if record.kind == "local":
        if record.host != os.uname().nodename:
            raise ConfigError(f"--cancel {path}: the run was started on {record.host} without Slurm; end it there")
        ended = end_processes(run, attempt, load(run.config).control.stop_s)
        print(f"attempt {attempt}: {f'{ended} processes were ended' if ended else 'nothing of it runs here'}")
        return 0
    job_ids = [record.job_id, *record.followers]
    try:
        left = jobs_in_queue(job_ids)
    except SlurmOutputError as error:
        console.tell(f"prl-submit: warning: {error}; it is cancelled whatever it is")
        left = job_ids
    if not left:
        print(f"{_job(record)} has ended: {_end(run, attempt, job_rows(record.job_id))}")
        return 0
    reopen(run, attempt).cancel(0)
    was = "is cancelled" if record.job_id in left else "had ended"
    behind = " ".join(job_id for job_id in left if job_id != record.job_id)
    chain = f", and job {behind} behind it in its chain is cancelled" if behind else ""
    print(f"{_job(record)}, attempt {attempt}, {was}{chain}; see prl-submit --status {shlex.quote(str(run))}")
    return 0


def leave_running(run: RunFolder, reason: Cancelled) -> int:
    """Say that the job goes on, and how to follow, save or end it."""
    console.tell(f"\n{reason}: the job goes on\n  prl-submit --status {shlex.quote(str(run))} --follow   follow it again")
    console.tell("\n".join(how_to_end(run)))
    return LEFT


def _latest(path: str) -> tuple[RunFolder, int, Record]:
    folder = Path(path).expanduser()
    run = RunFolder(folder if folder.is_absolute() else current_folder() / folder)
    whole = run_of_attempt(run.path)
    if whole is not None:
        raise ConfigError(f"{path}: is one attempt of a run, and a run folder is wanted: {shlex.quote(str(whole))}")
    attempts = run.attempts()
    if not attempts:
        raise ConfigError(f"{path}: no run lies there (no {run.attempt(1)})")
    return run, attempts[-1], read_record(run, attempts[-1])


def _job(record: Record) -> str:
    if record.kind == "local":
        return f"process {record.job_id} on {record.host}"
    return f"job {record.job_id}" + (f" of cluster {record.cluster}" if record.cluster else "")


def _words_of(rows: Sequence[JobRow]) -> str:
    """Of all components of a job as one."""
    if not rows:
        return "is not known to Slurm any more"
    state = fold_states([row.state for row in rows])
    return _words(next(row for row in rows if row.state == state))


def _component(record: Record, row: JobRow) -> str:
    return f"{('train', 'sample')[row.component]:<7}" if record.kind == "het" else ""


def _words(row: JobRow) -> str:
    words = row.state
    if row.reason:
        words += f" ({row.reason})"
    if row.nodes:
        words += f" on {row.nodes}"
    if row.start is not None:
        words += f", start estimated for {_time(row.start)}" if row.state in WAITING else f" since {_time(row.start)}"
    return words


def _time(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _end(run: RunFolder, attempt: int, rows: Sequence[JobRow] = ()) -> str:
    """How the attempt ended, where it says so itself; else what Slurm says of its job."""
    try:
        outcome = read_outcome(run.exit(attempt))
    except OutcomeError as error:
        return f"{console.printable(str(error))}; see {run.logs(attempt)}"
    if outcome is not None:
        return f"{outcome.outcome}: {console.printable(outcome.cause)} (exit code {outcome.code})"
    if rows:
        return f"it wrote no {run.exit(attempt).name}: {silent_end(rows)[1]}; see {run.logs(attempt)}"
    return f"it wrote no {run.exit(attempt).name}, so that its cause is not known; see {run.logs(attempt)}"
