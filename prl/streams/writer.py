"""Writing of rollouts: groups are gathered and published as few large files."""

import time
from collections.abc import Callable
from pathlib import Path

from prl.streams.files import GroupFacts, Header, Published, next_sequence, publish_arrow
from prl.streams.options import StreamsOptions
from prl.streams.records import Group
from prl.streams.rollouts import KIND, check_group, to_arrow


class RolloutWriter:
    """The rollout stream of one writer (an actor), a folder of its own under `folder`. Files are rolled by groups, bytes or the
    age of their first group; a restarted writer of the same name goes on with the next sequence number.

    Publishing blocks for as long as the filesystem takes to make a file durable: `flush` may run in a thread, as long as
    nothing else is called on the writer meanwhile."""

    def __init__(
        self,
        folder: Path,
        writer: str,
        run: str,
        attempt: int,
        options: StreamsOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.writer = writer
        self._folder = folder / writer
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = run
        self._attempt = attempt
        self._options = options
        self._clock = clock
        self._sequence = next_sequence(self._folder)
        self._groups: list[Group] = []
        self._bytes = 0
        self._first_s = 0.0

    def append(self, group: Group) -> list[Published]:
        """Take a group in; the files that became full with it, to be announced. Raises StreamError for a group that no reader
        would take, OSError where publishing fails (the groups stay and `flush` may be tried again)."""
        check_group(group)
        if not self._groups:
            self._first_s = self._clock()
        self._groups.append(group)
        turns = [t for r in group.rollouts for t in r.turns]
        self._bytes += sum(4 * (len(t.prompt_ids) + 2 * len(t.output_ids)) for t in turns)
        full = len(self._groups) >= self._options.roll_groups or self._bytes >= self._options.roll_mib * 2**20
        return self.flush() if full else []

    def due_s(self) -> float | None:
        """When, on the writer's clock, the gathered groups are due for `flush`; None: there are none."""
        return self._first_s + self._options.roll_s if self._groups else None

    def due(self, now: float | None = None) -> bool:
        """Whether the gathered groups have waited long enough."""
        due_s = self.due_s()
        return due_s is not None and (self._clock() if now is None else now) >= due_s

    def flush(self) -> list[Published]:
        """Publish what is gathered."""
        if not self._groups:
            return []
        header = Header(KIND, self._run, self._attempt, self.writer, self._sequence)
        facts = tuple(GroupFacts(g.group, g.issue, len(g.rollouts)) for g in self._groups)
        published = publish_arrow(self._folder, KIND, header, to_arrow(self._groups, header), facts)
        self._sequence += 1
        self._groups = []
        self._bytes = 0
        return [published]
