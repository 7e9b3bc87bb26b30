"""The ends of logs, which explain what nothing else explains."""

from pathlib import Path

BATCH_FAILED = "batch script: line "  # begins what the scripts in slurm/ say of the command that they ended with
_MOST_BYTES = 32768


def log_end(log: Path, lines: int) -> str:
    """The last lines of a log; empty where there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _MOST_BYTES))
            found = file.read().decode(errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    return "\n".join(found[-lines:])
