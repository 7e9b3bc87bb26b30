"""Ctrl-C, SIGTERM and a closed terminal as an exception that is raised once, and not while a job is being started."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Cancelled(Exception):
    """The user, or whoever ends the user's session, wants the run to end."""


class Interrupts:
    """While entered, the first of the signals raises Cancelled; those after it count for nothing: the run is ending already,
    and its grace has a limit. A hang-up that is ignored (nohup) stays so."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._held = False
        self._pending: int | None = None
        self._raised = False

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals wait until `check`: a job that is half started could not be found any more."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def check(self) -> None:
        """Raises Cancelled where a signal came while they were held."""
        if self._pending is not None:
            self._raise(self._pending)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self._held:
            self._pending = number
        else:
            self._raise(number)

    def _raise(self, number: int) -> None:
        if not self._raised:
            self._raised = True
            raise Cancelled("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
