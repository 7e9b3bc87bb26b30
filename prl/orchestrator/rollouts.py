"""The rollouts' side of the control plane: leases for actors, announcements for the preprocessor, evaluations."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prl.control.server import Answer, Bell, Handler, Member
from prl.control.tasks import to_its_end
from prl.flow.dispatcher import Dispatcher
from prl.flow.evaluations import Evaluation
from prl.flow.events import LedgerEvent, from_discard_rows
from prl.streams.contract import Cursor

LONG_POLL_S = 5.0
log = logging.getLogger(__name__)

Record = Callable[[Sequence[LedgerEvent]], Awaitable[None]]


class RolloutDesk:
    """Everything that issues, accepts or discards rollouts. `record` makes ledger events durable; no answer leaves before."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        record: Record,
        bell: Bell,
        *,
        on_evaluation: Callable[[Evaluation, Mapping[str, Any]], None],
        on_announced: Callable[[Mapping[str, Any]], None] = lambda announcement: None,
        cursors: Cursor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cursors`: of announcements before, to another desk of this attempt: none of their groups waits any more."""
        self.open = False  # leases are handed out once the samplers serve a version
        self.ended = False
        self.announced = 0  # so far
        # By number, those of which a group still waits to be trained, with the time at which they came.
        self._announcements: dict[int, tuple[float, dict[str, Any]]] = {}
        self._cursors = dict(cursors or {})
        self._dispatcher = dispatcher
        self._record = record
        self._bell = bell
        self._on_announced = on_announced
        self._on_evaluation = on_evaluation
        self._clock = clock

    def handlers(self) -> dict[str, Handler]:
        return {
            "lease": self._lease,
            "rollouts": self._rollouts,
            "group_failed": self._group_failed,
            "evaluation": self._evaluation,
            "discard": self._discard,
        }

    def cursors(self) -> dict[str, int]:
        """The highest sequence number that each writer of this attempt has announced."""
        return dict(self._cursors)

    def announcements(self, after: int) -> list[dict[str, Any]]:
        """What was announced behind the first `after` announcements and still waits to be trained; `age_s`: how long ago."""
        now_s = self._clock()
        return [{**a, "age_s": now_s - came_s} for number, (came_s, a) in self._announcements.items() if number >= after]

    def forget(self) -> None:
        """Announcements of which no group waits any more are of no use to anyone."""
        self._announcements = {
            number: (came_s, announcement)
            for number, (came_s, announcement) in self._announcements.items()
            if any(self._dispatcher.waits(int(g["group"]), int(g["issue"])) for g in announcement["groups"])
        }

    def set_problems(self, actors: Sequence[Member]) -> None:
        """Those that the actors have loaded. Raises ValueError where one has others."""
        problems, held_out = actors[0].facts["problems"], actors[0].facts["evaluation"]
        for actor in actors[1:]:
            if (actor.facts["problems"], actor.facts["evaluation"]) != (problems, held_out):
                raise ValueError(
                    f"{actor.name} has other problems than {actors[0].name}: load_problems must not depend on the process"
                )
        self._dispatcher.problems(problems, held_out)

    async def lost(self, actor: int) -> None:
        """An actor is gone: what it held is issued again."""
        events = self._dispatcher.lost(actor)
        if events:
            log.warning("sampled again: %d groups of actor %d", len({event.rollout.group for event in events}), actor)
        await self._record(events)
        self._bell.ring()

    async def expire(self) -> None:
        """Groups that were handed out too long ago are sampled again."""
        events = self._dispatcher.overdue(self._clock())
        if events:
            log.warning("sampled again: %d groups were out for too long", len({event.rollout.group for event in events}))
        await self._record(events)
        self._bell.ring()

    async def _lease(self, member: Member, body: Mapping[str, Any]) -> Answer:
        wanted = int(body["groups"])
        leases = []
        events: list[LedgerEvent] = []

        def take() -> bool:
            if self.open and not self.ended and not member.gone:
                leased = self._dispatcher.lease(member.index, wanted, self._clock())
                leases.extend(leased.leases)
                events.extend(leased.events)
            return bool(leases) or self.ended or member.gone

        await self._bell.until(take, LONG_POLL_S)
        await self._record(events)
        return {"leases": [asdict(lease) for lease in leases], "stop": self.ended}

    async def _rollouts(self, member: Member, body: Mapping[str, Any]) -> Answer:
        late = []
        rollouts = sum(int(group["rollouts"]) for group in body["groups"])
        for group in body["groups"]:
            size_bytes = int(body["bytes"]) * int(group["rollouts"]) // rollouts
            accepted = self._dispatcher.result(int(group["group"]), int(group["issue"]), size_bytes)
            if not accepted:
                late.append(group["group"])
        announcement = {key: body[key] for key in ("path", "bytes", "checksum", "writer", "sequence")}
        announcement["groups"] = body["groups"]
        writer = str(body["writer"])
        self._cursors[writer] = max(int(body["sequence"]), self._cursors.get(writer, -1))
        self._announcements[self.announced] = self._clock(), announcement
        self.announced += 1
        self._on_announced(announcement)
        self._bell.ring()
        return {"late": late}

    async def _group_failed(self, member: Member, body: Mapping[str, Any]) -> Answer:
        given_up = self._dispatcher.evaluations_lost
        await self._record(self._dispatcher.failed(int(body["group"]), int(body["issue"]), str(body["reason"])))
        if self._dispatcher.evaluations_lost > given_up:
            log.warning("an evaluation is given up after several failures, the last: %s", body["reason"])
        self._bell.ring()
        return {}

    async def _evaluation(self, member: Member, body: Mapping[str, Any]) -> Answer:
        evaluation = self._dispatcher.evaluated(int(body["group"]), int(body["issue"]))
        if evaluation is not None:
            self._on_evaluation(evaluation, body)
            self._bell.ring()
        return {}

    async def _discard(self, member: Member, body: Mapping[str, Any]) -> Answer:
        await self.discard(body["discarded"])
        return {}

    async def discard(self, rows: Iterable[Sequence[Any]]) -> None:
        """Rollouts that an actor gave up or the preprocessor refused, as rows of `prl.flow.events.to_discard_rows`."""
        events: list[LedgerEvent] = []
        for reason, ids in from_discard_rows(rows).items():
            events.extend(self._dispatcher.discarded(ids, reason))
        self.forget()
        await self._record(events)
        self._bell.ring()


class LedgerDesk:
    """Appends events in order, off the event loop, one batch at a time."""

    def __init__(self, append: Callable[[Sequence[LedgerEvent]], None]) -> None:
        self._append = append
        self._broken: BaseException | None = None
        self._lock = asyncio.Lock()

    async def record(self, events: Sequence[LedgerEvent]) -> None:
        if events:
            await to_its_end(self._record(events))  # they have come about, whoever is gone meanwhile

    async def _record(self, events: Sequence[LedgerEvent]) -> None:
        async with self._lock:
            try:
                await asyncio.to_thread(self._append, events)
            except BaseException as error:
                self._broken = error
                raise

    async def settled(self) -> None:
        """Everything recorded before this call is durable; raises where that failed."""
        await to_its_end(self._settled())  # a task of its own, as each record is: they take the lock in their order

    async def _settled(self) -> None:
        async with self._lock:
            if self._broken is not None:
                raise RuntimeError(f"the ledger lacks rows that could not be written: {self._broken!r}") from self._broken
