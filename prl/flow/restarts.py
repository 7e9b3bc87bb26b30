"""Processes that died are started again: how often, and when. Pure: it is told what happened and at what time, and whoever runs
it does what it says."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

DOUBLINGS = 6

# starting    its first process has not joined yet
# working     it has joined
# fenced      its process lives and is not trusted any more; it has to end
# restarting  its process has ended; another one was granted
# lost        its process has ended, and no other one is granted
State = Literal["starting", "working", "fenced", "restarting", "lost"]


class RestartError(Exception):
    """An event that cannot follow from the state."""


@dataclass(frozen=True)
class RestartRule:
    limit: int  # restarts of each process
    pause_s: float  # before the first restart of a process; doubled with each further one, up to 64 times as long
    start_s: float  # that a process has to start and join


@dataclass
class Starts:
    """Of one process: how often it was started again, and the time at which the one that was granted last is to be there."""

    rule: RestartRule
    again: int = 0
    due_s: float = 0.0

    def grant(self, now_s: float) -> float | None:
        """Another start: the pause before it, in seconds; None: it has been started often enough."""
        if self.again >= self.rule.limit:
            return None
        pause_s = self.rule.pause_s * (1 << min(self.again, DOUBLINGS))
        self.again += 1
        self.due_s = now_s + pause_s + self.rule.start_s
        return pause_s


@dataclass
class _Process:
    starts: Starts
    state: State = "starting"


class Restarts:
    """Processes by name that may die at any time, each by itself, and are replaced."""

    def __init__(self, rule: RestartRule, names: Iterable[str]) -> None:
        self.granted = 0  # restarts so far
        self._processes = {name: _Process(Starts(rule)) for name in names}

    def __contains__(self, name: str) -> bool:
        return name in self._processes

    def state(self, name: str) -> State:
        return self._processes[name].state

    def again(self, name: str) -> int:
        """How often it was started again."""
        return self._processes[name].starts.again

    @property
    def to_end(self) -> list[tuple[str, int]]:
        """Name and number of the start (0, 1, ...) of processes that have to end."""
        return [(name, one.starts.again) for name, one in self._processes.items() if one.state == "fenced"]

    def join(self, name: str) -> None:
        one = self._processes[name]
        if one.state in ("starting", "restarting"):
            one.state = "working"

    def fence(self, name: str) -> bool:
        """A process is not trusted any more, and has to end. False: that is known, or it has ended."""
        one = self._processes[name]
        if one.state not in ("working", "restarting"):
            return False
        one.state = "fenced"
        return True

    def died(self, name: str, now_s: float) -> float | None:
        """A process has ended. The pause in seconds after which another one is to be started; None: it is not. What fails
        before it has joined for the first time is not started again: it would only fail again."""
        one = self._processes[name]
        if one.state == "lost":
            raise RestartError(f"{name} has no process that could end")
        pause_s = None if one.state == "starting" else one.starts.grant(now_s)
        one.state = "lost" if pause_s is None else "restarting"
        self.granted += pause_s is not None
        return pause_s

    def late(self, now_s: float) -> list[str]:
        """Processes that were started again and have not joined in time."""
        return [name for name, one in self._processes.items() if one.state == "restarting" and now_s > one.starts.due_s]
