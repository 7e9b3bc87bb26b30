"""One attempt of a run at a time: who claims its number, what lies in its folder, and whether the one before it still runs."""

import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from prl.cluster.processes import attempt_of, first_processes, processes_of
from prl.cluster.record import read_record
from prl.cluster.run import ProgramError
from prl.cluster.script import submitit_folder, template_folder
from prl.cluster.slurm import job_state, jobs_in_queue
from prl.cluster.slurm_output import has_ended
from prl.config.load import ConfigError, dump
from prl.config.plain_files import read_plain
from prl.config.schema import Config
from prl.control.token import create_token
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish, publish_json, storage
from prl.runfolder.sharing import let_in
from prl.runfolder.snapshot import snapshot_code

OTHER_HOST_SILENT_S = 120.0  # a run on another machine whose metrics are younger than this goes on there


class SubmissionError(Exception):
    """The job could not be submitted, or Slurm has not answered for too long; the message carries what it said."""


def next_attempt(folder: RunFolder) -> int:
    """The number that a submission may claim. It is asked for before it is checked that nothing runs: an attempt that another
    command makes in between then has this number, and the claim fails."""
    return max(folder.attempts(), default=0) + 1


@contextmanager
def undone_on_error(config: Config, folder: RunFolder, attempt: int, *, resume: bool) -> Iterator[None]:
    """Make the folder of an attempt, which is the claim to its number, and that of a new run around it. Raises
    SubmissionError where another command has claimed it. Where the block raises, what was made here is removed again, so that
    all is as it was: a job that the block started must be gone then."""
    fresh = not resume and _make_run_folder(folder.path)
    try:
        folder.attempt(attempt).mkdir()
    except FileExistsError:
        raise SubmissionError(_taken(folder, attempt)) from None
    before = read_plain(folder.config) if resume else b""
    latest = folder.latest.readlink() if folder.latest.is_symlink() else None
    try:
        with storage(folder.path):
            publish_json(folder.submitting(attempt), _this_process())
            if not resume:
                folder.create()
                write_model_folder(config.model, folder.model)
            if not os.path.lexists(folder.token):
                create_token(folder.token)
            _fill_attempt(config, folder, attempt)
            if not resume:
                let_in(config.run.share, folder)
        yield
    except BaseException:
        if not resume:
            _empty(folder.path, remove=fresh)
            raise
        if read_plain(folder.config) != before:
            publish(folder.config, before)
        if latest is not None:
            point_latest(folder, latest)
        shutil.rmtree(folder.attempt(attempt), ignore_errors=True)  # last: with it ends the claim
        raise


def _make_run_folder(folder: Path) -> bool:
    """Make the folder; whether it was not there before. Raises SubmissionError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.is_dir():
            return False
        raise SubmissionError(
            f"run.folder = {folder}: cannot be made ({error.strerror}); choose another run.folder or run.name"
        ) from error
    return True


def _taken(folder: RunFolder, attempt: int) -> str:
    look = f"prl-report {shlex.quote(str(folder))}"
    if attempt == 1:
        return (
            f"{folder}: another prl-submit has just begun a run there; choose another run.folder or run.name, or look at that "
            f"run: {look}"
        )
    return f"{folder}: another prl-submit has just begun attempt {attempt}; look at it: {look}"


def _fill_attempt(config: Config, folder: RunFolder, attempt: int) -> None:
    """The configuration and the code that the attempt runs, and places for what it says."""
    folder.logs(attempt).mkdir()
    submitit_folder(folder, attempt).mkdir()
    snapshot_code(folder.code, template_folder())
    text = dump(config).encode()
    publish(folder.config, text)
    publish(folder.attempt_config(attempt), text)
    write_canary(folder, attempt)
    for request in (folder.stop, folder.save):
        request.unlink(missing_ok=True)  # meant for an attempt before this one
    point_latest(folder, Path(folder.attempt(attempt).name))


def write_canary(folder: RunFolder, attempt: int) -> None:
    """What the preflight looks for on every node; never the same twice, so that no older one is taken for it."""
    publish(folder.canary(attempt), secrets.token_hex(16).encode())


def check_not_running(folder: RunFolder, *, host_is_gone: bool = False) -> None:
    """Raises ConfigError where the run's latest attempt still goes on, or nobody can tell: two attempts at once would spoil
    each other. `host_is_gone`: somebody says that a local run on another machine has ended."""
    attempts = folder.attempts()
    attempt = attempts[-1] if attempts else 0
    is_submitted = os.path.lexists(folder.submission(attempt))
    if attempts and not is_submitted:
        _check_not_submitting(folder, attempt)
    # Looked for after the record: whoever has written that has started the job before.
    first = first_processes(processes_of(folder))
    if first:
        pids = " ".join(str(process.pid) for process in first)
        raise ConfigError(f"{folder}: attempt {attempt_of(first[0])} still runs here; end it first: kill {pids}")
    if not is_submitted:
        return
    job = read_record(folder, attempt)
    if job.kind == "local":
        if job.host != os.uname().nodename and not folder.exit(attempt).exists():
            _check_other_host(folder, attempt, job.host, host_is_gone)
        return
    try:
        state, behind = job_state(job.job_id), jobs_in_queue(job.followers)
    except ProgramError as error:
        raise ConfigError(f"{folder}: cannot tell whether its job {job.job_id} still runs: {error}") from None
    end_it = f"end it first: prl-submit --cancel {shlex.quote(str(folder))}"
    if state is not None and not has_ended(state):
        raise ConfigError(f"{folder}: job {job.job_id} of attempt {attempt} is {state}; {end_it}")
    if behind:
        raise ConfigError(
            f"{folder}: job {behind[0]} of the chain behind attempt {attempt} is still in the queue, to go on with the run by "
            f"itself, or to leave where that has ended; wait for it, or {end_it}"
        )


def _check_not_submitting(folder: RunFolder, attempt: int) -> None:
    """An attempt without a record of its job: is it being submitted, or was that command killed?"""
    if folder.exit(attempt).exists() or folder.plan(attempt).exists():
        return
    if folder.script(attempt).exists():
        raise ConfigError(
            f"{folder}: attempt {attempt} is being sent to Slurm, or that command was killed meanwhile; see with squeue --me "
            f"that it has no job, then remove {folder.attempt(attempt)}"
        )
    try:
        by = json.loads(read_plain(folder.submitting(attempt)))
        host, pid, created = str(by["host"]), int(by["pid"]), float(by["created"])
    except (OSError, ValueError, KeyError, TypeError):
        host, pid, created = "an unknown host", 0, 0.0
    if host == os.uname().nodename and not _lives(pid, created):
        return
    raise ConfigError(
        f"{folder}: attempt {attempt} is being submitted by another prl-submit (process {pid} on {host}); wait for it, or "
        f"where that was killed remove {folder.attempt(attempt)}"
    )


def _check_other_host(folder: RunFolder, attempt: int, host: str, host_is_gone: bool) -> None:
    silent_s = time.time() - max((path.stat().st_mtime for path in folder.metrics.glob("*.jsonl")), default=0.0)
    where = f"{folder}: attempt {attempt} was started on {host} without Slurm and has no exit.json"
    if silent_s < OTHER_HOST_SILENT_S:
        raise ConfigError(
            f"{where}; it wrote metrics {max(silent_s, 0):.0f} s ago, so that it still runs there: end it there first, or wait "
            f"until it has been silent for {OTHER_HOST_SILENT_S:.0f} s"
        )
    if not host_is_gone:
        raise ConfigError(
            f"{where}; from here ({os.uname().nodename}) nobody can see whether it still runs there: look on {host}, and if "
            f"nothing of it runs, add --host-is-gone"
        )


def _this_process() -> dict[str, Any]:
    return {"host": os.uname().nodename, "pid": os.getpid(), "created": psutil.Process().create_time()}


def _lives(pid: int, created: float) -> bool:
    try:
        return bool(abs(psutil.Process(pid).create_time() - created) < 1.0)
    except psutil.Error:
        return False


def _empty(folder: Path, *, remove: bool) -> None:
    """Remove what a submission made in a folder that was empty, or not there."""
    if remove:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def point_latest(folder: RunFolder, target: Path) -> None:
    """Have `latest` name an attempt's folder."""
    new = folder.path / ".latest"
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.rename(folder.latest)
