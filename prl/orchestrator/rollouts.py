"""The rollouts' side of the control plane: leases for actors, announcements for the preprocessor, evaluations."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prl.control.server import Answer, Bell, Handler, Member
from prl.flow.dispatcher import Dispatcher
from prl.flow.evaluations import Evaluation
from prl.flow.events import LedgerEvent, from_discard_rows

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
        facts: Callable[[], Mapping[str, Any]],
        on_evaluation: Callable[[Evaluation, Mapping[str, Any]], None],
    ) -> None:
        self.open = False  # leases are handed out once the samplers serve a version
        self.ended = False
        self.announcements: list[dict[str, Any]] = []
        self._dispatcher = dispatcher
        self._record = record
        self._bell = bell
        self._facts = facts  # samplers and verifier, for actors
        self._on_evaluation = on_evaluation

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
        cursors: dict[str, int] = {}
        for announcement in self.announcements:
            writer = str(announcement["writer"])
            cursors[writer] = max(int(announcement["sequence"]), cursors.get(writer, -1))
        return cursors

    async def _lease(self, member: Member, body: Mapping[str, Any]) -> Answer:
        wanted = int(body["groups"])
        leases = []
        events: list[LedgerEvent] = []

        def take() -> bool:
            if self.open and not self.ended:
                leased = self._dispatcher.lease(member.index, wanted, time.monotonic())
                leases.extend(leased.leases)
                events.extend(leased.events)
            return bool(leases) or self.ended

        await self._bell.until(take, LONG_POLL_S)
        await self._record(events)
        return {"leases": [asdict(lease) for lease in leases], "stop": self.ended, **self._facts()}

    async def _rollouts(self, member: Member, body: Mapping[str, Any]) -> Answer:
        groups, late = [], []
        for group in body["groups"]:
            accepted = self._dispatcher.result(int(group["group"]), int(group["issue"]))
            groups.append({**group, "late": not accepted})
            if not accepted:
                late.append(group["group"])
        announcement = {key: body[key] for key in ("path", "bytes", "checksum", "writer", "sequence")}
        self.announcements.append({**announcement, "groups": groups})
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
        """Rollouts that the preprocessor refused, as rows of `prl.flow.events.to_discard_rows`."""
        events: list[LedgerEvent] = []
        for reason, ids in from_discard_rows(rows).items():
            events.extend(self._dispatcher.discarded(ids, reason))
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
            async with self._lock:
                try:
                    await asyncio.to_thread(self._append, events)
                except BaseException as error:
                    self._broken = error
                    raise

    async def settled(self) -> None:
        """Everything recorded before this call is durable; raises where that failed."""
        async with self._lock:
            if self._broken is not None:
                raise RuntimeError(f"the ledger lacks rows that could not be written: {self._broken!r}") from self._broken
