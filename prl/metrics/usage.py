"""What processes cost: processor seconds and memory of a process and everything it started."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import psutil

from prl.metrics import names

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_s: float  # processor seconds since the start, user and system
    rss_bytes: int

    def values(self) -> dict[str, float]:
        """As the values of a usage event."""
        return {names.CPU_S: self.cpu_s, names.MAX_RSS_BYTES: self.rss_bytes}


def own_usage() -> Usage:
    """Of this process alone, without its children."""
    process = psutil.Process()
    times = process.cpu_times()
    return Usage(times.user + times.system, process.memory_info().rss)


def usage_of(children: Mapping[Key, int]) -> dict[Key, Usage]:
    """Of the process of each pid and all its descendants, ended ones included. `children` are processes below this one;
    those that have ended are left out. Takes one look at the process table, a few milliseconds."""
    processes = {process.pid: process for process in psutil.Process().children(recursive=True)}
    below: dict[int, list[int]] = {}
    for pid, process in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            below.setdefault(process.ppid(), []).append(pid)
    usages = {key: _sum(_tree(pid, processes, below)) for key, pid in children.items()}
    return {key: usage for key, usage in usages.items() if usage is not None}


def _tree(pid: int, processes: Mapping[int, psutil.Process], below: Mapping[int, list[int]]) -> Iterator[psutil.Process]:
    if pid in processes:
        yield processes[pid]
    for child in below.get(pid, ()):
        yield from _tree(child, processes, below)


def _sum(processes: Iterator[psutil.Process]) -> Usage | None:
    cpu_s, rss_bytes, found = 0.0, 0, False
    for process in processes:
        try:
            with process.oneshot():
                times = process.cpu_times()
                # children_* are of those that ended and were waited for; the living ones are in the sum themselves.
                cpu_s += times.user + times.system + times.children_user + times.children_system
                rss_bytes += process.memory_info().rss
                found = True
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return Usage(cpu_s, rss_bytes) if found else None
