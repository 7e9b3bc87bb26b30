"""What goes wrong with rollouts and groups: counted by reason, and told without flooding the log."""

import logging
import time
from collections import Counter
from collections.abc import Callable

log = logging.getLogger(__name__)

_EVERY_S = 1.0  # between two lines of one reason


class Troubles:
    """`counts` counts every one since the start, by its reason. Of each reason one is logged a second, with the number of
    those that were not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._told_s: dict[str, float] = {}
        self._untold: Counter[str] = Counter()

    def add(self, reason: str, words: str, *, trace: BaseException | None = None) -> None:
        """`trace`: an exception whose traceback is logged too."""
        self.counts[reason] += 1
        now = self._clock()
        if now - self._told_s.get(reason, -_EVERY_S) < _EVERY_S:
            self._untold[reason] += 1
            return
        self._told_s[reason] = now
        untold = self._untold.pop(reason, 0)
        log.warning("%s%s", words, f" ({untold} more of {reason} since the last line)" if untold else "", exc_info=trace)
