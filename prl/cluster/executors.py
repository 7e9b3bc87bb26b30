"""submitit's executors, fitted to runs: Slurm jobs from our own scripts (heterogeneous ones, too), and this machine.

submitit itself knows no heterogeneous jobs. Ours run one step over all components, so that every task has its own
SLURM_PROCID under one SLURM_JOB_ID and submitit's files and jobs work unchanged; only sacct's rows need folding.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.local import local
from submitit.slurm import slurm

from prl.cluster.run import ProgramError, run
from prl.cluster.slurm_output import ACCOUNTING_FIELDS, JobRow, fold_states, has_ended, parse_accounting, parse_submitted

SBATCH_S = 120.0  # a controller that is busy may answer late
SUBMITTER = "PRL_SUBMITTER"  # process id of the command that submitted a local job


class SlurmWatcher(slurm.SlurmInfoWatcher):  # type: ignore[misc]
    """Folds sacct's rows `J+0`, `J+1`, ... of a heterogeneous job into one for J."""

    def _make_command(self) -> list[str] | None:
        jobs = sorted(self._registered - self._finished)
        return ["sacct", "-X", "-P", "-o", ACCOUNTING_FIELDS, "-j", ",".join(jobs)] if jobs else None

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        components: dict[str, list[JobRow]] = {}
        for row in parse_accounting(string if isinstance(string, str) else string.decode(errors="replace")):
            components.setdefault(row.job_id, []).append(row)
        return {
            job: {
                "JobID": job,
                "State": fold_states([row.state for row in rows]),
                "NodeList": ",".join(row.nodes for row in rows if row.nodes),
            }
            for job, rows in components.items()
        }

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """submitit itself takes a suspended or a starting job for one that has ended."""
        info = self.get_info(job_id, mode=mode)
        return bool(info) and has_ended(info["State"])


class SlurmJob(slurm.SlurmJob[Any]):  # type: ignore[misc]
    """A job of one step over all its components. Its id is the leader's, which is the one to cancel."""

    watcher = SlurmWatcher(delay_s=30)

    def exception(self) -> utils.UncompletedJobError | utils.FailedJobError | None:
        """What the first failed task raised. submitit itself waits for rank 0's result first, for 15 s, which an error of
        another rank kept from being written, and reports that it is missing."""
        self.wait()
        error = first_error(self)
        return super().exception() if error is None else utils.FailedJobError(f"job {self.job_id} failed in {error}")

    def results(self) -> list[Any]:
        failure = self.exception()
        if failure is not None:
            raise failure
        found: list[Any] = super().results()
        return found


def first_error(job: core.Job[Any]) -> str | None:
    """What the first failed task of a job raised, with its number; None where none did, or where they could not say."""
    for task in range(job.num_tasks):
        path = job.task(task).paths.result_pickle
        if path.exists():
            outcome, value = utils.pickle_load(path)
            if outcome == "error":
                return f"task {task}:\n{value}"
    return None


class ScriptExecutor(slurm.SlurmExecutor):  # type: ignore[misc]
    """Submits a finished batch script of `tasks` tasks, which has to run `task_command(folder)` in each of them."""

    job_class = SlurmJob

    def __init__(self, folder: Path, script: Path, tasks: int) -> None:
        super().__init__(folder)
        self._script = script
        self._tasks = tasks

    @classmethod
    def name(cls) -> str:
        return "slurm"  # the environment in which submitit's side of the tasks finds itself

    def _num_tasks(self) -> int:
        return self._tasks

    def _submit_command(self, command: str) -> SlurmJob:
        """Raises ProgramError; submitit itself would wait for sbatch without end, and take any error for no job."""
        try:
            # sbatch hands its variables on to the job, which is to have the user's, and this process's umask, unless it finds
            # that of a job around it.
            environment = {name: value for name, value in os.environ.items() if name != "SLURM_UMASK"}
            sent = run(["sbatch", str(self._script)], timeout_s=SBATCH_S, environment=environment)
            job_id = parse_submitted(sent.out)
        except ProgramError as error:
            raise ProgramError(f"{error}{_cancel_jobs_of(self._script)}") from error
        return SlurmJob(folder=self.folder, job_id=job_id, tasks=range(self._tasks))

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        if len(delayed_submissions) != 1:
            raise ValueError("one function a job: Slurm refuses arrays of heterogeneous jobs")
        return core.PicklingExecutor._internal_process_submissions(self, delayed_submissions)  # type: ignore[no-any-return]


def _cancel_jobs_of(script: Path) -> str:
    """End what a failed sbatch has sent nonetheless, found by its script; what was done, in words."""
    try:
        queue = run(["squeue", "--me", "-h", "-o", "%i|%o"], timeout_s=30.0).out
        jobs = {line.partition("|")[0].partition("+")[0] for line in queue.splitlines() if line.endswith(f"|{script}")}
        if not jobs:
            return ""
        run(["scancel", *sorted(jobs)], timeout_s=30.0)
    except ProgramError as error:
        return f"; whether there is a job nonetheless is not known ({error}): see squeue --me"
    return f"; it had sent job {', '.join(sorted(jobs))} nonetheless, which was cancelled"


class LocalExecutor(local.LocalExecutor):  # type: ignore[misc]
    """This machine. Unlike submitit's own, the job has a session of its own, so that Ctrl-C on the terminal reaches
    prl-submit alone, which then ends the job in order; it does not outlive prl-submit; it has no time limit; it sees the
    accelerators its user sees."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._environment = dict(environment)

    def _submit_command(self, command: str) -> local.LocalJob[Any]:
        path = os.pathsep.join(filter(None, (self._environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))))
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PRL_NODES_")},  # of a job around it
            **self._environment,
            "PYTHONPATH": path,
            SUBMITTER: str(os.getpid()),
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(10 * 365 * 24 * 3600),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        arguments = [sys.executable, "-m", "prl.cluster.controller", str(self.folder), str(os.getpid())]
        process = subprocess.Popen(arguments, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)
        return local.LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join((sys.executable, "-u", "-m", "submitit.core._submit", str(self.folder)))
