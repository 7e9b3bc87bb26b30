"""How an attempt ended, and why: the first cause wins, but a process that was killed explains those that missed it."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from prl.runfolder.publish import publish_json

DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
EXIT_CODES = {DONE: 0, FAILED: 1, CANCELLED: 130}


@dataclass(frozen=True)
class Cause:
    """Something that ends a run. `weight` orders causes that arrive together: a killed process before an error that a
    process reports of itself, that before a process that only ended."""

    words: str
    role: str | None
    weight: int = 1
    detail: str = ""


class RunFailed(Exception):
    """Ends rank 0's task, so that the job counts as failed; carries the cause."""


@dataclass(frozen=True)
class Outcome:
    outcome: str
    cause: str
    role: str | None
    code: int
    steps: int
    started: float
    ended: float

    def write(self, path: Path) -> None:
        publish_json(path, asdict(self))


def conclude(causes: list[Cause], done: str, steps: int, started: float) -> Outcome:
    """The outcome of an attempt from what went wrong, or `done` where nothing did."""
    if not causes:
        return Outcome(DONE, done, None, 0, steps, started, time.time())
    first = min(causes, key=lambda cause: cause.weight)
    outcome = CANCELLED if first.weight == 0 else FAILED
    return Outcome(outcome, first.words, first.role, EXIT_CODES[outcome], steps, started, time.time())
