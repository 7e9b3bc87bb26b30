"""How an attempt ended, and why: the first cause wins, but a process that was killed explains those that missed it."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from prl.runfolder.publish import publish, publish_json

DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
RESERVE_BYTES = 128 * 1024
EXIT_CODES = {DONE: 0, FAILED: 1, CANCELLED: 130}


@dataclass(frozen=True)
class Cause:
    """Something that ends a run. `rank` orders causes that arrive together: the lowest explains the others."""

    words: str
    role: str | None
    rank: int
    detail: str = ""  # a traceback


AGENT = 0  # a node agent reports its own fault, after which the batch system ends everything
CANCEL = 1  # somebody asked for the end; children that get the signal too die of it
KILLED = 2  # a child was ended by a signal
REPORTED = 3  # a process reports an error of its own, which may be the death of another
ENDED = 4  # a child ended without a word, a process fell silent, a wait ran out


class RunFailed(Exception):
    """Ends rank 0's task, so that the job counts as failed; carries the cause."""


@dataclass(frozen=True)
class Outcome:
    outcome: str
    cause: str
    role: str | None
    code: int
    detail: str
    steps: int
    started: float
    ended: float

    def write(self, path: Path) -> None:
        _reserve_of(path).unlink(missing_ok=True)
        publish_json(path, asdict(self))


def reserve(path: Path) -> None:
    """Keep room for the outcome at `path`: it has to be told above all when the filesystem is full."""
    publish(_reserve_of(path), bytes(RESERVE_BYTES))


def _reserve_of(path: Path) -> Path:
    return path.with_name(".reserve")


def conclude(causes: list[Cause], done: str, steps: int, started: float) -> Outcome:
    """The outcome of an attempt from what went wrong, or `done` where nothing did."""
    if not causes:
        return Outcome(DONE, done, None, 0, "", steps, started, time.time())
    first = min(causes, key=lambda cause: cause.rank)
    outcome = CANCELLED if first.rank == CANCEL else FAILED
    return Outcome(outcome, first.words, first.role, EXIT_CODES[outcome], first.detail, steps, started, time.time())
