"""From a checked configuration to a job: the run folder, the attempt, the submission, and the grip on the job afterwards."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from submitit.core import core
from submitit.core.utils import FailedJobError, FailedSubmissionError, pickle_load

from prl.cluster.executors import LocalExecutor, ScriptExecutor
from prl.cluster.processes import attempt_of, end_processes, first_processes, processes_of
from prl.cluster.run import ProgramError, run
from prl.cluster.script import render, submitit_folder, task_command, task_environment, template_folder
from prl.cluster.slurm import ended, job_state
from prl.cluster.split import Kind, Split
from prl.cluster.warning import measured_lead_s
from prl.config.load import ConfigError, dump
from prl.config.plain_files import read_plain
from prl.config.schema import Config
from prl.control.token import create_token
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish, publish_json
from prl.runfolder.snapshot import snapshot_code

SLURM_POLL_S = 5.0  # between two questions about a job's state
SLURM_SILENCE_S = 600.0  # that Slurm may give no answer (a controller restarts, say) before nobody waits for it any more

OTHER_HOST_SILENT_S = 120.0  # a run on another machine whose metrics are younger than this goes on there


class SubmissionError(Exception):
    """The job could not be submitted, or Slurm has not answered for too long; the message carries what it said."""


@dataclass
class Submission:
    """One attempt's job. `job` is submitit's: results, tracebacks and output of every node's task."""

    run: RunFolder
    attempt: int
    kind: Kind
    job: core.Job[Any]
    submitted: float  # seconds since the epoch
    ask: Callable[[str], str | None] = job_state  # Slurm, for a job's state
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _next_question: float = 0.0  # to Slurm, on the clock
    _silent_since: float | None = None

    @property
    def job_id(self) -> str:
        """Slurm's job id (of component 0), or the process id of a local job."""
        return str(self.job.job_id)

    def ended(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds for the job's end; whether it has ended. Asks Slurm every few seconds at most. Raises
        SubmissionError once Slurm has given no answer for SLURM_SILENCE_S; the job goes on then."""
        if self.kind == "local":
            return _wait_process(self._process, wait_s)
        self.sleep(wait_s)
        now = self.clock()
        if now < self._next_question:
            return False
        self._next_question = now + SLURM_POLL_S
        try:
            state = self.ask(self.job_id)
        except ProgramError as error:
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since < SLURM_SILENCE_S:
                return False
            raise SubmissionError(
                f"Slurm has not answered for {SLURM_SILENCE_S / 60:g} minutes ({error}); job {self.job_id} is left as it is: "
                f"see squeue -j {self.job_id} and prl-report {shlex.quote(str(self.run))}, end it with "
                f"scancel {self.job_id}"
            ) from None
        self._silent_since = None
        return ended(state)

    def state(self) -> str:
        """The job's state in Slurm's words."""
        if self.kind != "local":
            try:
                return self.ask(self.job_id) or "UNKNOWN"
            except ProgramError as error:
                return f"UNKNOWN ({error})"
        if self._process.poll() is None:
            return "RUNNING"
        if self.traceback() is not None:
            return "FAILED"
        tasks = [self.job.task(number) for number in range(self.job.num_tasks)]
        return "COMPLETED" if all(task.paths.result_pickle.exists() for task in tasks) else "KILLED"

    def traceback(self) -> str | None:
        """What the first failed task raised; None where none did, or where the tasks were killed before they could say."""
        for task in range(self.job.num_tasks):
            path = self.job.task(task).paths.result_pickle
            if path.exists():
                outcome, value = pickle_load(path)
                if outcome == "error":
                    return f"task {task}:\n{value}"
        return None

    def cancel(self, grace_s: float) -> None:
        """End the job: ask its tasks to stop (SIGTERM), and after `grace_s` seconds kill what is left. Returns when the
        local job is gone; a Slurm job is cancelled and left to Slurm."""
        if self.kind != "local":
            run(["scancel", self.job_id], timeout_s=30.0)
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # submitit's controller hands it on to the task
            _wait_process(self._process, grace_s)
        _kill_group(self._process.pid)
        end_processes(self.run, self.attempt, grace_s=0)  # children have groups of their own
        _wait_process(self._process, 10.0)

    def end_rest(self, grace_s: float) -> int:
        """End what a local job left running here when it was killed itself, and say how many processes that were; a Slurm
        job's rest is Slurm's to end."""
        return end_processes(self.run, self.attempt, grace_s) if self.kind == "local" else 0

    @property
    def _process(self) -> "subprocess.Popen[bytes]":
        process: subprocess.Popen[bytes] | None = getattr(self.job, "_process", None)
        if process is None:
            raise RuntimeError(f"{self.job_id} is no job of this process on this machine")
        return process


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
        publish_json(folder.submitting(attempt), _this_process())
        if not resume:
            folder.create()
            create_token(folder.token)
            write_model_folder(config.model, folder.model)
        _fill_attempt(config, folder, attempt)
        yield
    except BaseException:
        if not resume:
            _empty(folder.path, remove=fresh)
            raise
        if read_plain(folder.config) != before:
            publish(folder.config, before)
        if latest is not None:
            _point_latest(folder, latest)
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
    for request in (folder.stop, folder.save):
        request.unlink(missing_ok=True)  # meant for an attempt before this one
    _point_latest(folder, Path(folder.attempt(attempt).name))


def script_for(config: Config, split: Split, folder: RunFolder, attempt: int) -> str:
    """The batch script of an attempt under Slurm. Writes nothing."""
    environment = task_environment(folder, attempt)
    command, lead_s = task_command(submitit_folder(folder, attempt)), measured_lead_s(config.cluster, folder)
    return render(config, split, environment, command, folder.batch_log(attempt), lead_s)


def submit(
    config: Config, split: Split, folder: RunFolder, attempt: int, function: Callable[..., Any], *arguments: Any
) -> Submission:
    """Submit `function(*arguments)`, which every node runs once, for an attempt whose folder is there. Records the job in
    the attempt's submission.json. Raises SubmissionError."""
    executor: core.Executor
    if split.kind == "local":
        executor = LocalExecutor(submitit_folder(folder, attempt), task_environment(folder, attempt))
    else:
        script = script_for(config, split, folder, attempt)
        publish(folder.attempt(attempt) / "submission.sh", script.encode())
        executor = ScriptExecutor(submitit_folder(folder, attempt), script, split.nodes)
    job: core.Job[Any] | None = None
    submitted = time.time()
    try:
        job = executor.submit(function, *arguments)
        first = str(job.job_id)
        publish_json(
            folder.attempt(attempt) / "submission.json",
            {
                "kind": split.kind,
                "job_id": first,
                # Slurm numbers the components of one job one after another.
                "component_job_ids": [str(int(first) + k) for k in range(len(split.components))],
                "nodes": [component.nodes for component in split.components],
                "submitted": submitted,
                "host": os.uname().nodename,
                "folder": str(submitit_folder(folder, attempt)),
            },
        )
    except BaseException as error:  # the job may have begun
        if split.kind == "local":
            end_processes(folder, attempt, grace_s=0)
        elif job is not None:
            run(["scancel", str(job.job_id)], timeout_s=30.0)
        if isinstance(error, FailedJobError | FailedSubmissionError | OSError):
            raise SubmissionError(f"the job was not accepted: {error}") from error
        raise
    return Submission(folder, attempt, split.kind, job, submitted)


def begin_requeued(folder: RunFolder, attempt: int, restarts: int) -> None:
    """A job that Slurm has put into the queue again, for the `restarts`-th time, begins this attempt by itself: write what a
    submission writes of one."""
    own, first = folder.attempt(attempt), folder.attempt(attempt - restarts)
    own.mkdir(exist_ok=True)
    publish(folder.attempt_config(attempt), read_plain(folder.attempt_config(attempt - restarts)))
    publish(own / "submission.json", read_plain(first / "submission.json"))
    _point_latest(folder, Path(own.name))


def check_not_running(folder: RunFolder, *, host_is_gone: bool = False) -> None:
    """Raises ConfigError where the run's latest attempt still goes on, or nobody can tell: two attempts at once would spoil
    each other. `host_is_gone`: somebody says that a local run on another machine has ended."""
    attempts = folder.attempts()
    attempt = attempts[-1] if attempts else 0
    record = folder.attempt(attempt) / "submission.json"
    is_submitted = os.path.lexists(record)
    if attempts and not is_submitted:
        _check_not_submitting(folder, attempt)
    # Looked for after the record: whoever has written that has started the job before.
    first = first_processes(processes_of(folder))
    if first:
        pids = " ".join(str(process.pid) for process in first)
        raise ConfigError(f"{folder}: attempt {attempt_of(first[0])} still runs here; end it first: kill {pids}")
    if not is_submitted:
        return
    kind, job_id, host = _read_submission(record)
    if kind == "local":
        if host != os.uname().nodename and not folder.exit(attempt).exists():
            _check_other_host(folder, attempt, host, host_is_gone)
        return
    try:
        state = job_state(job_id)
    except ProgramError as error:
        raise ConfigError(f"{folder}: cannot tell whether its job {job_id} still runs: {error}") from None
    if not ended(state):
        raise ConfigError(f"{folder}: job {job_id} of attempt {attempt} is {state}; end it first: scancel {job_id}")


def _check_not_submitting(folder: RunFolder, attempt: int) -> None:
    """An attempt without a record of its job: is it being submitted, or was that command killed?"""
    if folder.exit(attempt).exists() or folder.plan(attempt).exists():
        return
    if (folder.attempt(attempt) / "submission.sh").exists():
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


def _read_submission(record: Path) -> tuple[str, str, str]:
    """(kind, job id, host) of an attempt."""
    try:
        facts = json.loads(read_plain(record))
        return str(facts["kind"]), str(facts["job_id"]), str(facts["host"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{record}: no record of a submission ({type(error).__name__}: {error}), so that nobody can tell whether that job "
            f"still runs; see that it has ended, then remove the file"
        ) from None


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


def _point_latest(folder: RunFolder, target: Path) -> None:
    new = folder.path / ".latest"
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.rename(folder.latest)


def _wait_process(process: "subprocess.Popen[bytes]", wait_s: float) -> bool:
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the whole group has ended
