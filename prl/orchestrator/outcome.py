"""Why an attempt ended: the first cause wins, but a process that was killed explains those that missed it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prl.flow.ending import Decision, Reason
from prl.runfolder.outcome import CANCELLED, DONE, EXIT_CODES, FAILED, LEFT, Outcome
from prl.runfolder.publish import says_full

_OUTCOMES: Mapping[Reason, str] = {
    "done": DONE,
    "stopped": DONE,
    "cancelled": CANCELLED,
    "time limit": LEFT,
    "preempted": LEFT,
    "requeued": LEFT,
}  # of all others: failed
MEMORY_KILL = "the kernel killed it, out of memory"  # words of a child's end
_MEMORY = ("OutOfMemoryError", "MemoryError", MEMORY_KILL)  # torch's and Python's, as the causes name them, and the kernel's


@dataclass(frozen=True)
class Cause:
    """Something that ends a run. `rank` orders causes that arrive together: the lowest explains the others."""

    words: str
    role: str | None
    rank: int
    detail: str = ""  # a traceback
    reason: Reason = "error"
    log_end: str = ""  # of a process that ended without a word
    host: str | None = None  # the nodes at fault, with commas between them


AGENT = 0  # a node agent reports its own fault, after which the batch system ends everything
CANCEL = 1  # somebody asked for the end; children that get the signal too die of it
LOST = 2  # a node's agent fell silent, and with it all that ran there
KILLED = 3  # a child was ended by a signal
REPORTED = 4  # a process reports an error of its own, which may be the death of another
ENDED = 5  # a child ended without a word, a process fell silent, a wait ran out


class RunFailed(Exception):
    """Ends rank 0's task, so that the job counts as failed; carries the cause."""


def child_cause(body: Mapping[str, Any]) -> Cause:
    """Of a child that ended, as its agent tells it. The end of its log comes beside it, but not of one that was ended by a
    signal: its log knows nothing of that."""
    words, role = str(body["words"]), str(body["child"]).split()[0]
    if int(body["code"]) < 0:
        return Cause(words, role, KILLED)
    log_end = f"the end of {body['log']}:\n{body['log_end']}" if body["log_end"] else ""
    return Cause(words, role, ENDED, log_end=log_end)


@dataclass(frozen=True)
class Ending:
    """How an attempt ends with which nothing went wrong."""

    words: str
    reason: Reason = "done"


def conclude(
    causes: Sequence[Cause], ending: Ending, steps: int, started: float, then: Callable[[Reason], Decision]
) -> Outcome:
    """The outcome of an attempt from what went wrong, or its ending where nothing did. `then` decides what follows."""
    first = min(causes, key=lambda cause: cause.rank) if causes else Cause(ending.words, None, ENDED, reason=ending.reason)
    reason = _reason(first)
    outcome, decision = _OUTCOMES.get(reason, FAILED), then(reason)
    return Outcome(
        outcome,
        first.words,
        reason,
        decision.next,
        decision.words,
        first.role,
        first.host,
        EXIT_CODES[outcome],
        detail=first.detail,
        log_end=first.log_end,
        steps=steps,
        started=started,
        ended=time.time(),
    )


def _reason(cause: Cause) -> Reason:
    if says_full(cause.words):
        return "quota"
    if any(word in cause.words for word in _MEMORY):
        return "out of memory"
    return cause.reason
