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
    and its grace has a limit. A hang-up that is ignored (nohup) stays so.

    Python raises it in whatever the program is at, which may be a finaliser or a callback of an import, where exceptions are
    lost; so who goes on for long has to `check`, too, and who ends the run says so (`heed`)."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._held = False
        self._asked: int | None = None  # the first of the signals
        self._heeded = False

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
        """Raises Cancelled where a signal came that nobody has heeded."""
        if self._asked is not None and not self._heeded:
            raise Cancelled("Ctrl-C" if self._asked == signal.SIGINT else signal.Signals(self._asked).name)

    def heed(self) -> None:
        """What was asked for is being done."""
        self._heeded = True

    def _take(self, number: int, _: FrameType | None) -> None:
        first, self._asked = self._asked is None, self._asked or number
        if first and not self._held:
            self.check()
