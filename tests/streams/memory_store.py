"""A rollout stream within one process: a backend of nothing but what the contract asks, beside those that runs use."""

from collections.abc import Iterator

import pyarrow as pa

from prl.streams.contract import Cursor, Published, check_writer
from prl.streams.files import Encoded, Header, StreamError, check_bytes


class MemoryStore:
    """What all writers and readers of a stream share. Entries stay until they are released."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[int, tuple[Published, bytes]]] = {}
        self.set_aside: list[Published] = []


class MemoryAppender:
    def __init__(self, store: MemoryStore, writer: str) -> None:
        self._entries = store.entries.setdefault(check_writer(writer), {})
        self.next_sequence = max(self._entries, default=-1) + 1

    def put(self, header: Header, data: Encoded) -> Published:
        name = f"{header.writer}/{header.sequence}"
        published = Published(name, header.writer, header.attempt, header.sequence, data.size, data.checksum)
        self._entries[header.sequence] = published, data.whole()
        return published

    def close(self) -> None:
        """Nothing is held open."""


class MemorySource:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def fetch(self, entry: Published, wait_s: float) -> pa.Buffer:
        try:
            _, data = self._store.entries[entry.writer][entry.sequence]
        except KeyError:
            raise StreamError(f"{entry.name}: not there") from None
        return check_bytes(data, entry.bytes, entry.checksum, entry.name)

    def entries(self) -> Iterator[Published]:
        for _, entries in sorted(self._store.entries.items()):
            for _, (published, _) in sorted(entries.items()):
                yield published

    def set_aside(self, entry: Published) -> None:
        if self._store.entries.get(entry.writer, {}).pop(entry.sequence, None):
            self._store.set_aside.append(entry)

    def release(self, done: Cursor) -> None:
        for writer, last in done.items():
            entries = self._store.entries.get(writer, {})
            for sequence in [s for s in entries if s <= last]:
                del entries[sequence]

    def close(self) -> None:
        """Nothing is held open."""
