"""The rollout stream in the memory of one process: a domain, the preprocessor or a benchmark runs on it without a run folder.

It keeps the contract of the other backends but for durability: it ends with its process. So no configuration offers it, since a
run is several processes; who wants it hands a `MemoryAppender` to a `RolloutWriter` and a `MemorySource` to a `RolloutReader`.
Writers and readers may be of several threads.
"""

from collections.abc import Collection, Iterator

import pyarrow as pa

from prl.streams.contract import Cursor, Published, check_writer
from prl.streams.files import Encoded, Header, StreamError, check_bytes


class MemoryStore:
    """What all writers and readers of a stream share. Entries take memory until they are released or set aside."""

    def __init__(self) -> None:
        # By writer and sequence. Threads add and remove single entries and look at copies of the keys, each in one operation.
        self.entries: dict[tuple[str, int], tuple[Published, bytes]] = {}
        self.next_sequences: dict[str, int] = {}  # of writers; a number is never used again, whatever was released
        self.set_aside: list[Published] = []


class MemoryAppender:
    """The writing side, of one writer."""

    def __init__(self, store: MemoryStore, writer: str) -> None:
        self._store = store
        self.next_sequence = store.next_sequences.get(check_writer(writer), 0)

    def put(self, header: Header, data: Encoded) -> Published:
        name = f"{header.writer}/{header.sequence}"
        published = Published(name, header.writer, header.attempt, header.sequence, data.size, data.checksum)
        self._store.next_sequences[header.writer] = header.sequence + 1
        self._store.entries[header.writer, header.sequence] = published, data.whole()
        return published

    def close(self) -> None:
        """Nothing is held open."""


class MemorySource:
    """The reading side, of all writers."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def fetch(self, entry: Published, wait_s: float) -> pa.Buffer:
        """Nothing is waited for: what was put is there at once."""
        found = self._store.entries.get((entry.writer, entry.sequence))
        if found is None:
            raise StreamError(f"{entry.name}: not there")
        return check_bytes(found[1], entry.bytes, entry.checksum, entry.name)

    def entries(self) -> Iterator[Published]:
        for key in sorted(self._store.entries):
            found = self._store.entries.get(key)
            if found is not None:
                yield found[0]

    def set_aside(self, entry: Published) -> None:
        if self._store.entries.pop((entry.writer, entry.sequence), None):
            self._store.set_aside.append(entry)

    def release(self, done: Cursor, held: Collection[Published] = ()) -> None:
        kept = {(entry.writer, entry.sequence) for entry in held}
        for writer, sequence in list(self._store.entries):
            if sequence <= done.get(writer, -1) and (writer, sequence) not in kept:
                self._store.entries.pop((writer, sequence), None)

    def close(self) -> None:
        """Nothing is held open."""
