"""submitit's executors, fitted to runs: Slurm jobs from our own scripts (heterogeneous ones, too), and this machine.

submitit itself knows no heterogeneous jobs. Ours run one step over all components, so that every task has its own
SLURM_PROCID under one SLURM_JOB_ID and submitit's files and jobs work unchanged; only sacct's rows need folding.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.local import local
from submitit.slurm import slurm

# A job's state from its components': what still goes on, else the worst end. Unknown words count as the worst.
GOING_ON = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "REQUEUED", "PENDING")
_WORST_FIRST = (
    "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "FAILED", "PREEMPTED", "CANCELLED", "REVOKED", "COMPLETED"
)  # fmt: skip

SUBMITTER = "PRL_SUBMITTER"  # process id of the command that submitted a local job


def fold_states(states: Sequence[str]) -> str:
    """One state for all components of a job. Words behind the state (`CANCELLED by 0`) are dropped."""
    words = [state.split()[0].rstrip("+") if state.split() else "UNKNOWN" for state in states]
    for going_on in GOING_ON:
        if going_on in words:
            return going_on
    return min(words, key=lambda word: _WORST_FIRST.index(word) if word in _WORST_FIRST else -1)


class SlurmWatcher(slurm.SlurmInfoWatcher):  # type: ignore[misc]
    """Folds sacct's rows `J+0`, `J+1`, ... of a heterogeneous job into one for J."""

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        text = string if isinstance(string, str) else string.decode(errors="replace")
        lines = text.splitlines()
        if len(lines) < 2:
            return {}
        names = lines[0].split("|")
        components: dict[str, list[dict[str, str]]] = {}
        for line in lines[1:]:
            row = dict(zip(names, (cell.strip() for cell in line.split("|")), strict=False))
            job, _, step = row.get("JobID", "").partition(".")
            if job and not step:
                components.setdefault(job.partition("+")[0], []).append(row)
        return {
            job: {
                "JobID": job,
                "State": fold_states([row["State"] for row in rows]),
                "NodeList": ",".join(row["NodeList"] for row in rows),
            }
            for job, rows in components.items()
        }


class SlurmJob(slurm.SlurmJob[Any]):  # type: ignore[misc]
    watcher = SlurmWatcher(delay_s=30)


class ScriptExecutor(slurm.SlurmExecutor):  # type: ignore[misc]
    """Submits a finished batch script of `tasks` tasks, which has to run `task_command(folder)` in each of them."""

    job_class = SlurmJob

    def __init__(self, folder: Path, script: str, tasks: int) -> None:
        super().__init__(folder)
        self._script = script
        self._tasks = tasks

    @classmethod
    def name(cls) -> str:
        return "slurm"  # the environment in which submitit's side of the tasks finds itself

    def _num_tasks(self) -> int:
        return self._tasks

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        if len(delayed_submissions) != 1:
            raise ValueError("one function a job: Slurm refuses arrays of heterogeneous jobs")
        return core.PicklingExecutor._internal_process_submissions(self, delayed_submissions)  # type: ignore[no-any-return]


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
