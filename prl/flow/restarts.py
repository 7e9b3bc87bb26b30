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
    excused: int = 0  # of these: it had to end because of another one
    due_s: float = 0.0

    def grant(self, now_s: float, *, excused: bool = False) -> float | None:
        """Another start: the pause before it, in seconds; None: it has been started often enough, where one that is `excused`
        does not count."""
        counted = self.again - self.excused
        if counted >= self.rule.limit and not excused:
            return None
        pause_s = self.rule.pause_s * (1 << min(counted, DOUBLINGS))
        self.again += 1
        self.excused += excused
        self.due_s = now_s + pause_s + self.rule.start_s
        return pause_s


@dataclass
class _Process:
    starts: Starts
    state: State = "starting"
    excused: bool = False  # while it is fenced


class Restarts:
    """Processes by name that may die at any time, each by itself, and are replaced."""

    def __init__(self, rule: RestartRule, names: Iterable[str]) -> None:
        self.granted = 0  # restarts so far, but for those that were excused
        self._processes = {name: _Process(Starts(rule)) for name in names}

    def __contains__(self, name: str) -> bool:
        return name in self._processes

    def state(self, name: str) -> State:
        return self._processes[name].state

    def again(self, name: str) -> int:
        """How often it was started again by its own fault."""
        starts = self._processes[name].starts
        return starts.again - starts.excused

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

    def renew(self, name: str) -> None:
        """A process that works has to begin anew, by no fault of its own."""
        one = self._processes[name]
        if one.state == "working":
            one.state, one.excused = "fenced", True

    def died(self, name: str, now_s: float) -> float | None:
        """A process has ended. The pause in seconds after which another one is to be started; None: it is not. What fails
        before it has joined for the first time is not started again: it would only fail again."""
        one = self._processes[name]
        if one.state == "lost":
            raise RestartError(f"{name} has no process that could end")
        pause_s = None if one.state == "starting" else one.starts.grant(now_s, excused=one.excused)
        one.state = "lost" if pause_s is None else "restarting"
        self.granted += pause_s is not None and not one.excused
        one.excused = False
        return pause_s

    def late(self, now_s: float) -> list[str]:
        """Processes that were started again and have not joined in time."""
        return [name for name, one in self._processes.items() if one.state == "restarting" and now_s > one.starts.due_s]


class Together:
    """Processes that are of no use without one another: where one fails, all end, and all are started again. The limit and the
    pauses of the rule are of all together."""

    def __init__(self, rule: RestartRule, names: Iterable[str]) -> None:
        self._starts = Starts(rule)
        self._pause_s = 0.0  # before the start that was granted last
        self._numbers = dict.fromkeys(names, 0)  # of the present start of each: 0, 1, ...
        self._joined: set[str] = set()
        self._begun = False  # all of them had joined once
        self._lost = False  # nobody is started again any more
        self._to_end: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    @property
    def again(self) -> int:
        """How often they were started again."""
        return self._starts.again

    @property
    def may_restart(self) -> bool:
        """Whether another failure would not be the end: what fails before all have joined would only fail again."""
        return self._begun and not self._lost and self._starts.again < self._starts.rule.limit

    @property
    def complete(self) -> bool:
        """Whether all of them have joined."""
        return len(self._joined) == len(self._numbers)

    @property
    def to_end(self) -> list[tuple[str, int]]:
        """Name and number of the start of processes that have to end, before any of their successors may begin."""
        return [(name, self._numbers[name]) for name in sorted(self._to_end)]

    def join(self, name: str) -> None:
        if name not in self._to_end:
            self._joined.add(name)
            self._begun = self._begun or self.complete

    def renew(self, now_s: float) -> bool:
        """They are not trusted any more: all of them have to end and begin anew. False: that is known, or too often."""
        if self._to_end or not self._grant(now_s):
            return False
        self._to_end = set(self._numbers)
        self._joined.clear()
        return True

    def died(self, name: str, now_s: float) -> float | None:
        """A process has ended. The pause in seconds after which another one is to be started; None: it is not."""
        if self._lost or (name not in self._to_end and not self._grant(now_s)):
            return None
        if name not in self._to_end:
            self._to_end = set(self._numbers)
            self._joined.clear()
        self._to_end.discard(name)
        self._numbers[name] += 1
        return self._pause_s

    def late(self, now_s: float) -> bool:
        """Whether those that were started again have not all joined in time."""
        return self._starts.again > 0 and not self.complete and not self._lost and now_s > self._starts.due_s

    def _grant(self, now_s: float) -> bool:
        pause_s = self._starts.grant(now_s) if self._begun and not self._lost else None
        self._lost = pause_s is None
        self._pause_s = pause_s or 0.0
        return pause_s is not None
