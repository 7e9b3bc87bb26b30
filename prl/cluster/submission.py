"""From a checked configuration to a job: the run folder, the attempt, the submission, and the grip on the job afterwards."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core import core
from submitit.core.utils import FailedJobError, FailedSubmissionError, pickle_load

from prl.cluster.executors import LocalExecutor, ScriptExecutor
from prl.cluster.processes import attempt_of, end_processes, first_processes, processes_of
from prl.cluster.run import ProgramError, run
from prl.cluster.script import render, submitit_folder, task_command, task_environment, template_folder
from prl.cluster.slurm import ended, job_state
from prl.cluster.split import Kind, Split
from prl.config.load import ConfigError, dump
from prl.config.schema import Config
from prl.control.token import create_token
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish, publish_json
from prl.runfolder.snapshot import snapshot_code

SLURM_POLL_S = 5.0  # between two questions about a job's state
SLURM_SILENCE_S = 600.0  # that Slurm may give no answer (a controller restarts, say) before nobody waits for it any more


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
                f"see squeue -j {self.job_id} and prl-report {self.run}, end it with scancel {self.job_id}"
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


def write_run_folder(config: Config, folder: RunFolder) -> None:
    """Make the folder of a new run. Raises OSError; nothing of a half-made folder is left then."""
    fresh = _claim(folder.path)
    try:
        folder.create()
        create_token(folder.token)
        write_model_folder(config.model, folder.model)
    except BaseException:
        _empty(folder.path, remove=fresh)
        raise


@contextmanager
def undone_on_error(config: Config, folder: RunFolder, *, resume: bool) -> Iterator[int]:
    """Make the folder of a new run, or go on with that of an old one, and the folder of the next attempt, whose number it
    gives. Where the block raises, what was made is removed again, so that the folder is as it was: a job that it started
    must be gone then."""
    fresh = not resume and not folder.path.exists()
    before = folder.config.read_bytes() if resume else b""
    attempts = folder.attempts()
    if not resume:
        write_run_folder(config, folder)
    try:
        yield start_attempt(config, folder)
    except BaseException:
        if resume:
            for attempt in set(folder.attempts()) - set(attempts):
                shutil.rmtree(folder.attempt(attempt), ignore_errors=True)
            if folder.config.read_bytes() != before:
                publish(folder.config, before)
            if attempts:
                _point_latest(folder, attempts[-1])
        else:
            _empty(folder.path, remove=fresh)
        raise


def start_attempt(config: Config, folder: RunFolder) -> int:
    """Make the folder of the next attempt, with the configuration and the code it runs; its number."""
    attempt = max(folder.attempts(), default=0) + 1
    folder.logs(attempt).mkdir(parents=True)
    submitit_folder(folder, attempt).mkdir()
    snapshot_code(folder.code, template_folder())
    text = dump(config).encode()
    publish(folder.config, text)
    publish(folder.attempt(attempt) / "config.yaml", text)
    folder.stop.unlink(missing_ok=True)  # meant for an attempt before this one
    _point_latest(folder, attempt)
    return attempt


def script_for(config: Config, split: Split, folder: RunFolder, attempt: int) -> str:
    """The batch script of an attempt under Slurm. Touches no disk but the templates."""
    environment = task_environment(folder, attempt)
    return render(
        config, split, environment, task_command(submitit_folder(folder, attempt)), folder.logs(attempt) / "batch.log"
    )


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


def check_not_running(folder: RunFolder) -> None:
    """Raises ConfigError where the run's latest attempt still goes on: two attempts at once would spoil each other."""
    first = first_processes(processes_of(folder))
    if first:
        pids = " ".join(str(process.pid) for process in first)
        raise ConfigError(f"{folder}: attempt {attempt_of(first[0])} still runs here; end it first: kill {pids}")
    attempts = folder.attempts()
    record = folder.attempt(attempts[-1]) / "submission.json" if attempts else None
    if record is None or not record.exists():
        return
    kind, job_id = _read_submission(record)
    if kind == "local":
        return
    try:
        state = job_state(job_id)
    except ProgramError as error:
        raise ConfigError(f"{folder}: cannot tell whether its job {job_id} still runs: {error}") from None
    if not ended(state):
        raise ConfigError(f"{folder}: job {job_id} of attempt {attempts[-1]} is {state}; end it first: scancel {job_id}")


def check_checkpoint(folder: RunFolder) -> None:
    """Raises ConfigError where the newest checkpoint's manifest cannot be gone on from."""
    *earlier, (step, path) = folder.manifests()
    try:
        manifest = json.loads(path.read_text())
        whole = [isinstance(manifest[key], int) for key in ("step", "lineage", "evaluations_reached")]
        whole += [isinstance(manifest[key], dict) for key in ("dispatcher", "forks")]
        wrong = "" if all(whole) and isinstance(manifest["dispatcher"]["events"], int) else "a value of another kind"
        if not wrong and manifest["step"] != step:
            wrong = f"it is of step {manifest['step']}"
    except KeyError as error:
        wrong = f"{error} is missing"
    except (OSError, ValueError, TypeError) as error:
        wrong = str(error)
    if wrong:
        rest = f"the one before it is step {earlier[-1][0]}" if earlier else "there is none before it: then submit the run anew"
        raise ConfigError(f"{path}: no checkpoint's manifest ({wrong}); remove the folder {path.parent}; {rest}")


def _read_submission(record: Path) -> tuple[str, str]:
    """(kind, job id) of an attempt."""
    try:
        facts = json.loads(record.read_text())
        return str(facts["kind"]), str(facts["job_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{record}: no record of a submission ({type(error).__name__}: {error}), so that nobody can tell whether that job "
            f"still runs; see that it has ended, then remove the file"
        ) from None


def _claim(folder: Path) -> bool:
    """Make the folder; whether it was not there before. Raises FileExistsError where it holds something."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir() or any(folder.iterdir()):
            raise
        return False
    return True


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


def _point_latest(folder: RunFolder, attempt: int) -> None:
    new = folder.path / ".latest"
    new.unlink(missing_ok=True)
    new.symlink_to(folder.attempt(attempt).name)
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
