"""From finished groups to announced entries of the rollout stream, one at a time and in order."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.server import Bell
from prl.runfolder.paths import RunFolder
from prl.streams.opening import open_writer
from prl.streams.options import StreamsOptions
from prl.streams.records import Group

Write = Callable[[Sequence[Group]], Iterable[Mapping[str, Any]]]
Announce = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]

_LOOK_S = 60.0  # between two looks at a queue that stays empty


class Publisher:
    """Collects groups and publishes them together: when there are as many as a step that waits wants, `roll_groups` of them or
    `roll_mib` MiB, when there is room for no more, or when the first of them has waited `roll_s` seconds."""

    def __init__(self, write: Write, announce: Announce, options: StreamsOptions, *, wait_s: float) -> None:
        """`write` makes groups durable, entry by entry, and yields what to announce; it may block, and runs in threads. Each is
        announced before the next is written, which may have to wait until others are read. `announce` tells the
        orchestrator of one entry. `wait_s`: how long `put` waits for room, in seconds."""
        self._write = write
        self._announce = announce
        self._options = options
        self._wait_s = wait_s
        self._groups: list[Group] = []
        self._gathered_bytes = 0  # of `_groups`
        self._waiting_bytes = 0  # of these and of what is being written or announced
        self._since_s = 0.0  # when the first of `_groups` came
        self._wanted: int | None = None
        self._closed = False
        self._gathered = asyncio.Event()
        self._bell = Bell()

    async def put(self, group: Group) -> None:
        """Returns at once, except where so much waits already that the storage, or who reads from it, has to catch up first.
        Raises TimeoutError where it does not."""
        if not await self._bell.until(self._has_room, self._wait_s):
            raise TimeoutError(
                f"{self._waiting_bytes / 2**20:.0f} MiB of finished groups wait to be written, more than streams.queue_mib, "
                f"and that for {self._wait_s:g} s: the storage of the rollouts does not keep up, or nobody reads them"
            )
        size = group.payload_bytes()
        if not self._groups:
            self._since_s = time.monotonic()
        self._groups.append(group)
        self._gathered_bytes += size
        self._waiting_bytes += size
        self._gathered.set()
        self._bell.ring()

    async def gathered(self) -> None:
        """Returns once groups wait to be published, or to be written, or did since this was called before."""
        if not self._waiting_bytes:
            await self._gathered.wait()
        self._gathered.clear()

    def _has_room(self) -> bool:
        return self._waiting_bytes < self._options.queue_mib * 2**20

    def want(self, groups: int | None) -> None:
        """A step waits: from now on so many groups wait for no others. None: no step does."""
        self._wanted = groups
        self._bell.ring()

    @property
    def wanted(self) -> bool:
        """Whether a step waits for groups, as far as is known here."""
        return self._wanted is not None

    def close(self) -> None:
        """Lets `run` end once everything put before is announced."""
        self._closed = True
        self._bell.ring()

    async def run(self) -> None:
        while not (self._closed and not self._groups):
            await self._bell.until(self._has_work, _LOOK_S)
            if not self._groups:
                continue
            await self._bell.until(self._is_due, self._since_s + self._options.roll_s - time.monotonic())
            groups, size = self._groups, self._gathered_bytes
            self._groups, self._gathered_bytes = [], 0
            entries = iter(self._write(groups))
            while (entry := await asyncio.to_thread(next, entries, None)) is not None:
                await self._announce(entry)  # late groups have ended already: the ledger says how
            self._waiting_bytes -= size
            self._bell.ring()

    def _has_work(self) -> bool:
        return bool(self._groups) or self._closed

    def _is_due(self) -> bool:
        options = self._options
        enough = min(options.roll_groups, self._wanted or options.roll_groups)
        full = self._gathered_bytes >= options.roll_mib * 2**20 or not self._has_room()
        return full or len(self._groups) >= enough or self._closed


def rollout_publisher(
    run: RunFolder, run_name: str, attempt: int, control: ControlClient, options: StreamsOptions, deadlines: ControlOptions
) -> Publisher:
    """Publishes to the actor's own part of the run's rollout stream."""
    name = f"actor-{control.index:03d}"
    writer = open_writer(run, name, run_name, attempt, options, awaited=lambda: publisher.wanted)

    def write(groups: Sequence[Group]) -> Iterator[Mapping[str, Any]]:
        for group in groups:
            yield from (entry.announcement() for entry in writer.append(group))
        yield from (entry.announcement() for entry in writer.flush())

    async def announce(entry: Mapping[str, Any]) -> Mapping[str, Any]:
        deadline_s = deadlines.stop_s if control.stopping.is_set() else deadlines.trainers_s
        return await control.call("rollouts", entry, deadline_s=deadline_s, reason=f"announcing {entry['path']}")

    publisher = Publisher(write, announce, options, wait_s=deadlines.trainers_s)
    return publisher
