"""What every backend of the rollout stream gives: entries that are durable once `put` returns, named by writer and sequence.

A store moves bytes; what is in them, and everything that both sides check, is the same for all (`writer.py`, `reader.py`).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from prl.streams.files import Encoded, Header, StreamError

Cursor = Mapping[str, int]  # writer to the sequence number of its last entry that is done with
_WRITER = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group of an entry, for its announcement."""

    group: int
    issue: int
    rollouts: int


@dataclass(frozen=True, slots=True)
class Published:
    """A durable entry of the stream, as it is announced. Two are equal where they name the same bytes."""

    name: str  # of a file: its path in the run folder; of another backend's entry: whatever that finds it by
    writer: str
    attempt: int
    sequence: int  # rises with each entry of a writer, over all its restarts
    bytes: int
    checksum: str  # xxh3 of the bytes, 16 hexadecimal digits
    groups: tuple[GroupFacts, ...] = field(default=(), compare=False)  # unknown where it was found by looking

    def announcement(self) -> dict[str, Any]:
        """JSON for the control plane."""
        return {
            "path": self.name,
            "bytes": self.bytes,
            "checksum": self.checksum,
            "writer": self.writer,
            "sequence": self.sequence,
            "groups": [{"group": g.group, "issue": g.issue, "rollouts": g.rollouts} for g in self.groups],
        }


def announced(body: Mapping[str, Any], attempt: int) -> Published:
    """The entry that an announcement speaks of."""
    groups = tuple(GroupFacts(int(g["group"]), int(g["issue"]), int(g["rollouts"])) for g in body["groups"])
    sequence, size = int(body["sequence"]), int(body["bytes"])
    return Published(str(body["path"]), str(body["writer"]), attempt, sequence, size, str(body["checksum"]), groups)


class Appender(Protocol):
    """The writing side of a store, of one writer."""

    next_sequence: int  # the number after the highest that this writer has ever used

    def put(self, header: Header, data: Encoded) -> Published:
        """Make an entry durable. Putting the same again is right after any error. Raises OSError, and StreamError
        for what no waiting helps."""

    def close(self) -> None: ...


class Source(Protocol):
    """The reading side of a store, of all writers."""

    def fetch(self, entry: Published, wait_s: float) -> pa.Buffer:
        """The entry's bytes, size and checksum checked; a name that does not show yet is waited for. Raises StreamError."""

    def entries(self) -> Iterator[Published]:
        """All entries that there are, each writer's in rising order."""

    def set_aside(self, entry: Published) -> None:
        """Keep an unreadable entry out of everybody's way, for a person to look at."""

    def release(self, done: Cursor, held: Collection[Published] = ()) -> None:
        """Nobody will ask again for entries up to the cursor, but for those `held`."""

    def close(self) -> None: ...


def check_writer(name: str) -> str:
    """The name, where it is fit to be one of a folder or a key. Raises StreamError."""
    if not is_writer(name):
        raise StreamError(f"writer {name!r}: only letters, digits, '-' and '_' (at most 100)")
    return name


def is_writer(name: str) -> bool:
    return _WRITER.fullmatch(name) is not None


def behind(entries: Iterable[Published]) -> dict[str, int]:
    """The cursor behind these entries."""
    cursor: dict[str, int] = {}
    for entry in entries:
        cursor[entry.writer] = max(entry.sequence, cursor.get(entry.writer, -1))
    return cursor
