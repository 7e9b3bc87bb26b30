"""Writing of rollouts: groups are gathered and published as few large entries."""

from dataclasses import replace

from prl.streams.contract import Appender, GroupFacts, Published
from prl.streams.files import Encoded, Header
from prl.streams.options import StreamsOptions
from prl.streams.records import Group
from prl.streams.rollouts import KIND, check_group, to_arrow


class RolloutWriter:
    """The rollout stream of one writer (an actor). Entries are rolled by groups and bytes; who wants it by time calls `flush`.
    A restarted writer of the same name goes on with the next sequence number.

    Publishing blocks for as long as the storage takes to make an entry durable: call it in a thread, as long as nothing else
    is called on the writer meanwhile."""

    def __init__(self, store: Appender, writer: str, run: str, attempt: int, options: StreamsOptions) -> None:
        self.writer = writer
        self._store = store
        self._run = run
        self._attempt = attempt
        self._options = options
        self._sequence = store.next_sequence
        self._groups: list[Group] = []
        self._bytes = 0
        self._pending: tuple[Header, Encoded, tuple[GroupFacts, ...]] | None = None  # encoded, not known to be durable
        self._published: list[Published] = []  # not given out yet

    def append(self, group: Group) -> list[Published]:
        """Take a group in; the entries that became full with it, to be announced. Raises StreamError for a group that no reader
        would take, OSError where publishing fails (the groups stay and `flush` may be tried again)."""
        check_group(group)
        self._groups.append(group)
        self._bytes += group.payload_bytes()
        full = len(self._groups) >= self._options.roll_groups or self._bytes >= self._options.roll_mib * 2**20
        return self.flush() if full else []

    def flush(self) -> list[Published]:
        """Publish what is gathered. An entry whose publishing failed is published first, and as it was: whether the attempt
        before left it there or not, there is one of it."""
        while self._pending or self._groups:
            if self._pending is None:
                header = Header(KIND, self._run, self._attempt, self.writer, self._sequence)
                facts = tuple(GroupFacts(g.group, g.issue, len(g.rollouts)) for g in self._groups)
                self._pending = header, to_arrow(self._groups, header), facts
                self._sequence += 1
                self._groups = []
                self._bytes = 0
            header, data, facts = self._pending
            self._published.append(replace(self._store.put(header, data), groups=facts))
            self._pending = None
        published, self._published = self._published, []
        return published

    def close(self) -> None:
        """Let go of the store. What was not flushed is gone."""
        self._store.close()
