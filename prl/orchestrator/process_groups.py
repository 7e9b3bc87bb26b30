"""Process groups of a node agent's children, known by more than their numbers: once a group has ended, the system gives its
number to another process, which may be anybody's."""

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

# Places behind the process's name in /proc/PID/stat (proc(5): fields 3 and 22, the name being the second).
_STATE, _STARTED = 0, 19


@dataclass(frozen=True)
class Group:
    """A process that was started as the first of a group of its own, with all that it starts there."""

    number: int  # of the group: the first process's id
    started_ticks: int | None  # since the system's start; None: it had ended before it could be looked at
    log: str  # its standard output and error, which those that it starts inherit; resolved


def group_of(pid: int, log: Path) -> Group:
    """Of a process that was just started, and not yet waited for."""
    return Group(pid, started_ticks(pid), os.path.realpath(log))


def started_ticks(pid: int) -> int | None:
    """When a process started; None where there is none, or only what is left of it until somebody has asked how it ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[_STARTED]) if fields[_STATE] not in "ZX" else None


def is_there(group: Group) -> bool:
    """Whether some process of the group lives. While one does, the number is nobody else's; the first one is told by its start,
    and where that has ended, the others by the log that they write to, or the log's run, which their environment names."""
    ticks = started_ticks(group.number)
    if ticks is not None:
        return ticks == group.started_ticks
    return any(_writes_to(pid, group.log) or _is_of_run(pid, group.log) for pid in members(group))


def members(group: Group) -> list[int]:
    """Ids of the processes in the group of that number."""
    return [pid for pid in psutil.pids() if _number(pid) == group.number]


def signal_group(group: Group, number: signal.Signals) -> None:
    """To all of its processes; nothing happens where it has ended."""
    if is_there(group):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.killpg(group.number, number)


def _number(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _writes_to(pid: int, log: str) -> bool:
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # has closed it, has ended, or is another user's
            if os.readlink(f"/proc/{pid}/fd/{descriptor}") == log:
                return True
    return False


def _is_of_run(pid: int, log: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # has ended, or is another user's
        return False
    runs = [os.fsdecode(entry.removeprefix(b"PRL_RUN=")) for entry in environment if entry.startswith(b"PRL_RUN=/")]
    return any(log.startswith(f"{os.path.realpath(run)}/") for run in runs)
