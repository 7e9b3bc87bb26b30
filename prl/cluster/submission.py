"""From a checked configuration to a job, and the grip on the job afterwards, also from its run folder alone."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from submitit.core import core

from prl.cluster.claims import SubmissionError
from prl.cluster.executors import LocalExecutor, ScriptExecutor, SlurmJob, first_error
from prl.cluster.processes import end_processes
from prl.cluster.record import Record, read_record
from prl.cluster.run import ProgramError, run
from prl.cluster.script import render, submitit_folder, task_environment
from prl.cluster.slurm import advice, cluster_name, job_state
from prl.cluster.slurm_output import SlurmOutputError, has_ended
from prl.cluster.split import Kind, Split
from prl.config.schema import Config
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish

SLURM_POLL_S = 30.0  # between two questions about a job's state
ENDING_POLL_S = 5.0  # the same once its exit.json is there: it is about to end
SLURM_SILENCE_S = 600.0  # that Slurm may give no answer (a controller restarts, say) before nobody waits for it any more


@dataclass
class Submission:
    """One attempt's job. `job` is submitit's: results, tracebacks and output of every node's task."""

    run: RunFolder
    attempt: int
    kind: Kind
    job: core.Job[Any]
    submitted: float  # seconds since the epoch
    followers: tuple[str, ...] = ()  # ids of the jobs behind it in its chain
    ask: Callable[[str], str | None] = job_state  # Slurm, for a job's state
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _asked: float = float("-inf")  # when Slurm was asked last, on the clock
    _silent_since: float | None = None

    @property
    def job_id(self) -> str:
        """Slurm's job id (of component 0), or the process id of a local job."""
        return str(self.job.job_id)

    def ended(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds for the job's end; whether it has ended. Slurm is asked seldom until the attempt
        says itself that it ends. Raises SubmissionError once Slurm was silent for SLURM_SILENCE_S; the job goes on then."""
        if self.kind == "local":
            return _wait_process(self._process, wait_s)
        self.sleep(wait_s)
        now = self.clock()
        if now - self._asked < (ENDING_POLL_S if self.run.exit(self.attempt).exists() else SLURM_POLL_S):
            return False
        self._asked = now
        try:
            state = self.ask(self.job_id)
        except SlurmOutputError as error:
            raise SubmissionError(f"{error}; job {self.job_id} is left as it is: {self._how_to_see()}") from None
        except ProgramError as error:
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since < SLURM_SILENCE_S:
                return False
            raise SubmissionError(
                f"Slurm has not answered for {SLURM_SILENCE_S / 60:g} minutes ({error}); job {self.job_id} is left as it is: "
                f"{self._how_to_see()}"
            ) from None
        self._silent_since = None
        return state is None or has_ended(state)

    def _how_to_see(self) -> str:
        return f"see squeue -j {self.job_id} and prl-report {shlex.quote(str(self.run))}, end it with scancel {self.job_id}"

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

    def behind(self) -> "list[Submission]":
        """The jobs behind it in its chain, each of which may be the one that goes on with the run."""
        return [
            replace(self, job=SlurmJob(folder=self.job.paths.folder, job_id=job_id, tasks=range(self.job.num_tasks)))
            for job_id in self.followers
        ]

    def traceback(self) -> str | None:
        """What the first failed task raised; None where none did, or where the tasks were killed before they could say."""
        return first_error(self.job)

    def cancel(self, grace_s: float) -> None:
        """End the job: ask its tasks to stop (SIGTERM), and after `grace_s` seconds kill what is left. Returns when the
        local job is gone; a Slurm job is cancelled and left to Slurm."""
        if self.kind != "local":
            # With all that is behind it, that first: it would begin once this one is gone.
            run(["scancel", *reversed(self.followers), self.job_id], timeout_s=30.0)
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


def submit(
    config: Config, split: Split, folder: RunFolder, attempt: int, function: Callable[..., Any], *arguments: Any
) -> Submission:
    """Submit `function(*arguments)`, which every node runs once, for an attempt whose folder is there, and the jobs that are to
    follow in its chain. Records the job in the attempt's submission.json. Raises SubmissionError."""
    sent: list[core.Job[Any]] = []
    submitted, host, tasks_folder = time.time(), os.uname().nodename, submitit_folder(folder, attempt)
    nodes = tuple(component.nodes for component in split.components)
    cluster = None if split.kind == "local" else cluster_name()
    try:
        for place in range(1, config.cluster.chain + 1):
            after = str(sent[-1].job_id) if sent else None
            sent.append(_executor(config, split, folder, attempt, place, after).submit(function, *arguments))
            first, *_ = ids = tuple(str(job.job_id) for job in sent)
            chain = ids if config.cluster.chain > 1 else ()
            record = Record(split.kind, first, nodes, host, submitted, tasks_folder, cluster, chain)
            record.write(folder.submission(attempt))
    except BaseException as error:  # the job may have begun
        if split.kind == "local":
            end_processes(folder, attempt, grace_s=0)
        elif sent:
            _take_back([str(job.job_id) for job in reversed(sent)], error)
        if isinstance(error, ProgramError | OSError):
            raise SubmissionError(f"the job was not accepted: {error}{advice(str(error))}") from error
        raise
    return Submission(folder, attempt, split.kind, sent[0], submitted, record.followers)


def _executor(
    config: Config, split: Split, folder: RunFolder, attempt: int, place: int, after: str | None
) -> LocalExecutor | ScriptExecutor:
    """What sends the job in that place (1, 2, ...) of a chain, whose script it writes; `after`: the id of the one before it."""
    tasks_folder = submitit_folder(folder, attempt)
    if split.kind == "local":
        return LocalExecutor(tasks_folder, task_environment(config, folder, attempt))
    script = folder.script(attempt) if place == 1 else folder.follower_script(attempt, place)
    publish(script, render(config, split, folder, attempt, after=after).encode())
    return ScriptExecutor(tasks_folder, script, split.nodes)


def _take_back(job_ids: list[str], why: BaseException) -> None:
    """Cancel jobs that were sent, and whose record cannot be kept. Raises SubmissionError where they are left."""
    jobs = " ".join(job_ids)
    try:
        run(["scancel", *job_ids], timeout_s=30.0)
    except ProgramError as error:
        raise SubmissionError(f"{why}; job {jobs} was sent and is left ({error}): end it with scancel {jobs}") from why


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


def reopen(folder: RunFolder, attempt: int) -> Submission:
    """The job of an attempt that another command submitted under Slurm. Raises ConfigError where it has no record."""
    record = read_record(folder, attempt)
    job = SlurmJob(folder=record.folder, job_id=record.job_id, tasks=range(record.tasks))
    return Submission(folder, attempt, record.kind, job, record.submitted, record.followers)
