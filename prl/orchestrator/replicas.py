"""The samplers' replicas as the orchestrator knows them: it tells the membership what happens to their processes, and everyone
else who of them may be asked, updated, restarted or ended."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prl.control.server import Answer, Bell, Handler, Member
from prl.flow.membership import Membership, Reason

TELL_S = 2.0  # that a replica which is given up has to hand back its partial answers before its process is ended
SERVING_POLL_S = 30.0  # whoever waits for news of samplers asks again after so long
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica:
    """One process of a sampler."""

    index: int
    url: str
    workers: int  # ranks of it in the transfer group
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # it is out of the group

    @property
    def name(self) -> str:
        return f"sampler {self.index}"


class ReplicaDesk:
    """`changed`, a bell of its own, rings whenever the membership or an update moves; whoever rings it may ring others."""

    def __init__(
        self,
        membership: Membership,
        *,
        tell: Callable[[Replica, str], Awaitable[None]],
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` a replica, as far as it still answers, that it is fenced and why.
        `on_change` is given what happened, in words."""
        self.membership = membership
        self.changed = Bell()
        self.ended = False
        self._tell = tell
        self._on_change = on_change
        self._clock = clock
        self._replicas: dict[int, Replica] = {}  # those in the group
        self._being_told: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[str, Handler]:
        return {"samplers": self._samplers}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def group(self) -> tuple[Replica, ...]:
        return self.of(self.membership.group)

    def of(self, indices: Sequence[int]) -> tuple[Replica, ...]:
        """Those in the group that have these numbers."""
        return tuple(self._replicas[i] for i in indices)

    @property
    def to_seed(self) -> tuple[Replica, ...]:
        """Those that a serving one may give its weights to; one that is being told to serve nothing has to hear that first."""
        return self.of([i for i in self.membership.to_seed if i not in self._being_told])

    @property
    def to_end(self) -> list[tuple[str, int]]:
        """Name and number of the start of processes that have to end; one that is being told so has time to hear it."""
        return [(f"sampler {i}", start) for i, start in self.membership.to_end if i not in self._being_told]

    # What happens to them

    def joined(self, member: Member) -> None:
        if self.membership.join(member.index):
            replica = Replica(member.index, str(member.facts["url"]), int(member.facts.get("workers", 1)))
            self._replicas[member.index] = replica
            self.note(f"{replica.name} is ready for its first version")

    def admitted(self, replicas: Sequence[Replica]) -> None:
        new = [replica for replica in replicas if self.membership.state(replica.index) != "serving"]
        self.membership.admit([replica.index for replica in replicas])
        if new:
            self.note(f"{', '.join(replica.name for replica in new)} serves")

    def seeded(self, replica: Replica, words: str) -> None:
        """It has committed the present version, which another one gave it."""
        self.membership.seed(replica.index)
        self.note(f"{replica.name} serves: {words}")

    def not_seeded(self, replica: Replica, words: str) -> None:
        if not replica.gone.is_set():
            self.membership.not_seeded(replica.index, words)
            self.note(f"{replica.name} waits for the trainer's next version: {words}")

    def mismatched(self, replica: Replica, words: str) -> None:
        """It holds other weights than were sent."""
        self.membership.mismatch(replica.index, words, self._clock())
        self._left(replica.index, words)

    def held_up(self, replica: Replica, words: str) -> None:
        """The others waited for it in a transfer until the deadline."""
        if self.membership.held_up(replica.index, words, self._clock()):
            self._left(replica.index, words)
        else:
            self.note(words)

    def fence(self, index: int, reason: Reason, words: str) -> None:
        """It is not trusted any more: out of the group, asked by nobody, told to abort what it holds, and then its process is
        ended."""
        if self.membership.fence(index, reason, words, self._clock()):
            self._left(index, words)

    def died(self, index: int, words: str) -> float | None:
        """Its process has ended. The pause before the next one is started, in seconds; None: none is."""
        pause_s = self.membership.died(index, words, self._clock())
        again = "it is not started again" if pause_s is None else f"it is started again in {pause_s:g} s"
        self._left(index, f"{words}; {again}")
        return pause_s

    def fence_late(self) -> None:
        """Those whose restarted process has not joined in time."""
        for index in self.membership.late(self._clock()):
            self.fence(index, "late", f"sampler {index} was started again and did not join in time")

    def _left(self, index: int, words: str) -> None:
        replica = self._replicas.get(index)
        state = self.membership.state(index)
        if replica is not None and state != "joined":
            replica.gone.set()
            del self._replicas[index]
        if replica is not None and state in ("joined", "fenced"):  # its process lives
            self._being_told.add(index)
            task = asyncio.create_task(self._tell_fenced(replica, words), name=f"fence {replica.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.note(words)

    async def _tell_fenced(self, replica: Replica, words: str) -> None:
        try:
            await self._tell(replica, words)
        finally:
            self._being_told.discard(replica.index)
            self.changed.ring()  # now its process may be ended

    def note(self, words: str) -> None:
        log.warning("samplers: %s", words)
        self._on_change(words)
        self.changed.ring()

    # What others are told

    async def _samplers(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """{known: [[replica, url]...] or null}: those that may be asked, as soon as they are others than those."""
        await self.changed.until(lambda: self._serving() != body["known"] or self.ended, SERVING_POLL_S)
        return {"samplers": self._serving(), "stop": self.ended}

    def _serving(self) -> list[list[Any]]:
        return [[i, self._replicas[i].url] for i in self.membership.serving]
