"""The ends of logs, which explain what nothing else explains."""

import os
from pathlib import Path

from prl.config.plain_files import open_plain

BATCH_FAILED = "batch script: line "  # begins what the scripts in slurm/ say of the command that they ended with
_MOST_BYTES = 32768


def log_end(log: Path, lines: int) -> str:
    """The last lines of a log; empty where there are none."""
    try:
        with open_plain(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
            found = file.read().decode(errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    return "\n".join(found[-lines:])
