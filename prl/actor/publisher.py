"""From finished groups to announced rollout files, one file at a time and in order."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.runfolder.paths import RunFolder
from prl.streams.options import StreamsOptions
from prl.streams.records import Group
from prl.streams.writer import RolloutWriter

Write = Callable[[Sequence[Group]], Sequence[Mapping[str, Any]]]
Announce = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class Publisher:
    """Collects groups and publishes them together: when there are `roll_groups` of them, or when the first of them has
    waited `roll_s` seconds."""

    def __init__(self, write: Write, announce: Announce, *, roll_groups: int, roll_s: float) -> None:
        """`write` makes groups durable and returns what to announce of each file; it may block, and runs in a thread.
        `announce` tells the orchestrator of one file."""
        self._write = write
        self._announce = announce
        self._roll_groups = roll_groups
        self._roll_s = roll_s
        self._queue: asyncio.Queue[Group | None] = asyncio.Queue()  # None: no more will come

    def put(self, group: Group) -> None:
        self._queue.put_nowait(group)

    def close(self) -> None:
        """Lets `run` end once everything put before is announced."""
        self._queue.put_nowait(None)

    async def run(self) -> None:
        more = True
        while more:
            groups, more = await self._collect()
            if not groups:
                continue
            for announcement in await asyncio.to_thread(self._write, groups):
                await self._announce(announcement)  # late groups have ended already: the ledger says how

    async def _collect(self) -> tuple[list[Group], bool]:
        """The groups of the next file, and whether more may follow."""
        first = await self._queue.get()
        if first is None:
            return [], False
        groups = [first]
        try:
            async with asyncio.timeout(self._roll_s):
                while len(groups) < self._roll_groups:
                    group = await self._queue.get()
                    if group is None:
                        return groups, False
                    groups.append(group)
        except TimeoutError:
            pass  # the first has waited long enough
        return groups, True


def rollout_publisher(
    run: RunFolder, run_name: str, attempt: int, control: ControlClient, options: StreamsOptions, deadlines: ControlOptions
) -> Publisher:
    """Publishes to the actor's own folder of the run's rollout stream."""
    name = f"actor-{control.index:03d}"
    writer = RolloutWriter(run.rollouts, name, run_name, attempt, options)

    def write(groups: Sequence[Group]) -> Sequence[Mapping[str, Any]]:
        files = [file for group in groups for file in writer.append(group)]
        files += writer.flush()
        return [{**file.announcement(run.path), "writer": name} for file in files]

    async def announce(file: Mapping[str, Any]) -> Mapping[str, Any]:
        deadline_s = deadlines.stop_s if control.stopping.is_set() else deadlines.wait_s
        return await control.call("rollouts", file, deadline_s=deadline_s, reason=f"announcing {file['path']}")

    return Publisher(write, announce, roll_groups=options.roll_groups, roll_s=options.roll_s)
