"""How an attempt ended, in its exit.json: written once, by whoever knows it, and read by everyone."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prl.config.plain_files import read_plain
from prl.runfolder.paths import listed
from prl.runfolder.publish import publish, publish_json

DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
LEFT = "left"  # saved what it had and ended before its time, since its nodes were to be taken away
EXIT_CODES = {DONE: 0, FAILED: 1, LEFT: 75, CANCELLED: 130}  # 75: EX_TEMPFAIL of sysexits.h, "try again later"
RESERVE_BYTES = 128 * 1024
_RESTORE = "restore it, or remove it: the attempt then counts as one that was killed"


class OutcomeError(Exception):
    """An exit.json does not say how the attempt ended; the message names it and says why."""


@dataclass(frozen=True)
class Outcome:
    """What an older or damaged file does not say is empty or None."""

    outcome: str
    cause: str = ""
    reason: str = ""  # a word for the cause, of prl.flow.ending
    next: str = ""  # what is to be done then: requeue, chain or stop; and
    next_words: str = ""  # why
    role: str | None = None  # whose failure it was
    host: str | None = None  # the node whose failure it was, or several with commas between them, where it was a node's
    code: int | None = None
    detail: str = ""  # a traceback
    log_end: str = ""  # of a process that ended without a word
    steps: int | None = None
    started: float | None = None  # seconds since the epoch
    ended: float | None = None

    def write(self, path: Path) -> None:
        _reserve_of(path).unlink(missing_ok=True)
        publish_json(path, asdict(self))


def reserve(path: Path) -> None:
    """Keep room for the outcome at `path`: it has to be told above all when the filesystem is full."""
    publish(_reserve_of(path), bytes(RESERVE_BYTES))


def is_reserved(path: Path) -> bool:
    """Whether an orchestrator has begun the attempt whose outcome belongs to `path`, and has not written it."""
    reserve = _reserve_of(path)
    return reserve in listed(reserve.parent, reserve.name)


def _reserve_of(path: Path) -> Path:
    return path.with_name(".reserve")


def read_outcome(path: Path) -> Outcome | None:
    """None where there is no such file. Raises OutcomeError."""
    try:
        facts = json.loads(read_plain(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise OutcomeError(f"{path}: cannot be read, and does not say how the attempt ended: {error}; {_RESTORE}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("outcome"), str):
        raise OutcomeError(f"{path}: is no object with an outcome, and does not say how the attempt ended; {_RESTORE}")

    def of(kind: type | tuple[type, ...], name: str, default: Any = None) -> Any:
        return facts[name] if isinstance(facts.get(name), kind) else default

    return Outcome(
        outcome=facts["outcome"],
        cause=of(str, "cause", ""),
        reason=of(str, "reason", ""),
        next=of(str, "next", ""),
        next_words=of(str, "next_words", ""),
        role=of(str, "role"),
        host=of(str, "host"),
        code=of(int, "code"),
        detail=of(str, "detail", ""),
        log_end=of(str, "log_end", ""),
        steps=of(int, "steps"),
        started=of((int, float), "started"),
        ended=of((int, float), "ended"),
    )
