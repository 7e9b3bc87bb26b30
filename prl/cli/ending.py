"""What is written for a local run that ended without a word: how, and whether the filesystem was full."""

import errno
import os
import time
from pathlib import Path

from prl.cli import console
from prl.cluster.submission import Submission
from prl.metrics.progress import last_step
from prl.runfolder.outcome import CANCELLED, EXIT_CODES, FAILED, Outcome

FULL_BYTES = 64 * 1024  # less than this is no room for anything


def explain(job: Submission, code: int, cause: str) -> None:
    """Write the attempt's exit.json where its job did not, so that nobody takes the run for one that goes on."""
    path = job.run.exit(job.attempt)
    if path.exists():
        return
    outcome, reason = (CANCELLED, "cancelled") if code == EXIT_CODES[CANCELLED] else (FAILED, "error")
    steps = last_step(job.run, job.attempt)
    said = Outcome(outcome, cause, reason, "stop", reason, code=code, steps=steps, started=job.submitted, ended=time.time())
    try:
        said.write(path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        console.tell(_full(job.run.path) if full else f"{path} cannot be written: {error}")


def full_filesystem(folder: Path) -> str:
    """That the folder's filesystem is full, in words; empty where it is not."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""  # is gone altogether
    out_of_names = found.f_files > 0 and found.f_favail == 0
    return _full(folder) if out_of_names or found.f_bavail * found.f_frsize < FULL_BYTES else ""


def _full(folder: Path) -> str:
    return f"the filesystem of {folder} is full"
