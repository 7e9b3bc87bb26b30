"""What may end a run: causes are collected as they come, and every wait of the orchestrator gives way to them."""

import asyncio
import logging
import traceback
from collections.abc import Callable

from prl.control.server import Bell
from prl.orchestrator.outcome import ENDED, REPORTED, Cause
from prl.runfolder.publish import in_words

log = logging.getLogger(__name__)


class Causes:
    def __init__(self, bell: Bell) -> None:
        self.found: list[Cause] = []
        self.closed = False  # once the run stops, processes end because they are told to
        self._bell = bell

    def __bool__(self) -> bool:
        return bool(self.found)

    def add(self, cause: Cause) -> None:
        """Something ends the run, unless it is stopping already."""
        if not self.closed:
            self.found.append(cause)
            self._bell.ring()

    def fault(self, error: BaseException, part: str = "") -> None:
        """An error of the orchestrator itself ends the run, also while it stops."""
        log.error("orchestrator%s", part, exc_info=error)
        words = f"orchestrator{part}: {in_words(error)}"
        self.found.append(Cause(words, "orchestrator", REPORTED, "".join(traceback.format_exception(error))))
        self._bell.ring()

    def part_ended(self, task: "asyncio.Task[None]") -> None:
        """Called back when a task of this process has ended."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fault(error, f", {task.get_name()}")

    async def wait(self, condition: Callable[[], bool], timeout_s: float, waited_for: Callable[[], str]) -> bool:
        """Until the condition holds (True) or the run has a cause to end (False); a wait that runs out is such a cause."""
        if not await self._bell.until(lambda: bool(self) or condition(), timeout_s):
            self.add(Cause(f"waited {timeout_s:.0f} s for {waited_for()}", None, ENDED))
        return not self
