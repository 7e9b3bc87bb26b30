"""Logs of processes: their ends, which explain what nothing else explains, and how large they get."""

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


def bound_log(log: Path, most_bytes: int) -> None:
    """Where a log is larger, cut it down to its last quarter of that, behind a line that says so. Those who append to it go on;
    what they write meanwhile may be lost, or come before that line. Raises OSError."""
    with open_plain(log) as file:
        size = file.seek(0, os.SEEK_END)
        if size <= most_bytes:
            return
        file.seek(size - most_bytes // 4)
        kept = file.read().partition(b"\n")[2]  # whole lines
    os.truncate(log, 0)
    with log.open("ab") as file:
        file.write(f"prl: {size - len(kept)} bytes of this log were dropped here (control.log_mib)\n".encode() + kept)
