"""The lanes: new weights from all trainer ranks to all sampler workers at once, each worker's own part to it alone.

There is one small process group for each trainer rank (its root) and lane: the root and worker `lane` of every sampler. Both
ends follow their part of the plan's one order of transfers, each in one thread, which casts and packs the next bucket (or
unpacks the last one) while another is on the wire; two buckets and the digest's workspace are all the memory that it takes
besides what a worker stages. A bucket whose tiles follow each other there, too, is received in its place, unless that memory is
in use. With deltas an end takes a third one (prl/weights/lane_deltas.py).

An end belongs to an epoch of the membership. Where one rank fails at anything, it has all the others leave, through the epoch's
store, and the end is of no use any more: the next epoch has others.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch

from prl.weights import digest
from prl.weights import group as groups
from prl.weights.crew import Board, Crew, Place
from prl.weights.delta import HEADER_BYTES, Message
from prl.weights.group import Left, Lost, Meeting, TransportError
from prl.weights.lane_deltas import Base, Sent, Teller, header_of, write
from prl.weights.legs import LaneReport, Tally
from prl.weights.plan import Tile
from prl.weights.shipments import Route, Shipment, Slot, View, run_of, shipments_of

SETTLE_S = 1.0  # until it is looked at who is behind: whoever lives comes further meanwhile, and who has died does not
Writing = Callable[[], AbstractContextManager[None]]  # in which memory that is in use may be written; raises where it may not


class _End:
    """A rank's place in the groups of an epoch."""

    def __init__(
        self,
        route: Route,
        crew: Crew,
        rank: int,
        address: str,
        port: int,
        *,
        group_s: float,
        device: torch.device | str,
        left: threading.Event | None,
    ) -> None:
        self._plan = route.plan
        self._deltas = route.deltas
        self._crew = crew
        self._device = torch.device(device)
        self._title = f"weight lanes, epoch {crew.epoch}, {crew.names[rank]}"
        self._transfers, self._own = shipments_of(route, crew, rank)
        self._buffer_bytes = max((shipment.bytes for shipment in self._own), default=0)
        self._work = digest.workspace(self._device)
        self._update = 0
        self._at = 0  # the transfer that it stands before
        self._broken = ""
        self._groups: dict[str, groups.Group] = {}
        end = time.monotonic() + group_s
        left = left or threading.Event()
        self._board = _board(self._title, end, lambda: Board(crew, rank, address, port, group_s, left), groups.told(left))
        try:
            self._board.stand(Place(0, 0))
            members = {_group(s): crew.members(s.root, s.lane) for s in self._own}
            host = groups.own_address(address, port)
            meeting = Meeting(self._title, self._board.store, crew.names, rank, route.terms, self._board.reason)
            self._groups = groups.assemble(meeting, members, host, self._device, max(end - time.monotonic(), 0.0))
        except TransportError as error:
            if not error.missing:  # else the others wait for those as well, and each should name them
                self._board.raise_alarm(str(error))
            self.close()
            raise

    def call_off(self, words: str) -> None:
        """From any thread: have all other ranks leave what they wait in. This one leaves by `left`."""
        self._board.raise_alarm(words)

    def close(self) -> None:
        """Leave the groups."""
        members, self._groups = list(self._groups.values()), {}
        self._broken = self._broken or "it was closed"
        self._board.close()
        groups.close(members)

    @contextmanager
    def _updating(self, update_s: float) -> Iterator[float]:
        """One update, until the monotonic time that this gives. Whatever fails in it, the others are told, and the groups are
        left: what a peer got is unknown then."""
        if self._broken:
            raise TransportError(f"{self._title}: it cannot be used again: {self._broken}")
        self._update += 1
        self._stand(0)
        try:
            yield time.monotonic() + update_s
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._board.raise_alarm(str(error) if isinstance(error, TransportError) else self._broken)
            self.close()
            raise
        self._stand(len(self._own))

    def _stand(self, own: int) -> None:
        """Before this one of its own transfers."""
        self._at = self._own[own].number if own < len(self._own) else self._transfers
        self._board.stand(Place(self._update, self._at))

    def _buffers(self) -> list[torch.Tensor]:
        return [torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._device) for _ in range(min(2, len(self._own)))]

    def _begin(self, shipment: Shipment, buffer: torch.Tensor, end: float) -> Any:
        try:
            return self._groups[_group(shipment)].begin(buffer, end)
        except RuntimeError as error:
            raise TransportError(f"{self._title}: {shipment.what} cannot begin: {groups.said(error)}") from error

    def _wait(self, shipment: Shipment, work: Any, end: float) -> None:
        began = time.monotonic()
        try:
            self._groups[_group(shipment)].finish(work, end, self._board.reason)
        except Left as error:
            halt = groups.halt(self._at, began, end)
            raise TransportError(f"{self._title}: left in {shipment.what}: {error}", halt=halt) from error
        except (Lost, RuntimeError) as error:
            halt = groups.halt(self._at, began, end)
            if not isinstance(error, Lost):
                time.sleep(max(0.0, min(SETTLE_S, end - time.monotonic())))
            members = self._crew.members(shipment.root, shipment.lane)
            how = groups.said(error)
            if isinstance(error, Lost):
                how = f"no connection to {', '.join(self._crew.names[members[rank]] for rank in error.ranks)}: {how}"
            who = self._board.behind(members)
            words = f"{self._title}: waited {halt.waited_s:.1f} s in {shipment.what} for {who}: {how}"
            raise TransportError(words, halt=halt) from error

    def _tile_digest(self, tile: Tile, elements: torch.Tensor) -> torch.Tensor:
        spec = self._plan.tensors[tile.tensor]
        return digest.rectangle(spec.name, elements, tile.row, tile.column, prod(spec.shape[1:]), self._work)


class LaneSender(_End):
    """The end of a trainer rank."""

    def __init__(
        self,
        route: Route,
        crew: Crew,
        rank: int,
        address: str,
        port: int,
        *,
        group_s: float,
        device: torch.device | str = "cpu",
        left: threading.Event | None = None,
    ) -> None:
        """Trainer rank `rank` joins the groups of the crew's epoch by the store at `address` and `port`; blocks until all are
        there or `group_s` is over (TransportError names who is missing). Once `left` is set, by any thread, whatever waits
        here ends with a TransportError."""
        super().__init__(route, crew, crew.trainer(rank), address, port, group_s=group_s, device=device, left=left)
        self._sent: Sent | None = None  # with deltas, what the workers may hold

    def send(self, source: View, update_s: float, *, held: bool = False) -> LaneReport:
        """The rank's part of a version, from where `source` says that its tiles are, in any dtype. Blocks until the workers
        have it; raises TransportError once `update_s` is over, with the words who was waited for. `held`: all workers hold the
        version that was sent before, so that with deltas only what differs from that has to go."""
        began = time.monotonic()
        tally = Tally()
        before, self._sent = self._sent if held else None, None  # until all is sent, nobody knows what the workers hold
        teller = Teller(before) if self._deltas else None
        with self._updating(update_s) as end:
            buffers = self._buffers()
            flying: deque[tuple[int, list[torch.Tensor], list[Any]]] = deque()

            def land() -> None:
                own, parts, works = flying.popleft()
                shipment = self._own[own]
                for work in works:
                    self._wait(shipment, work, end)
                self._stand(own + 1)
                tally.landed(shipment, sum(part.numel() for part in parts), time.monotonic() - began)

            for own, shipment in enumerate(self._own):
                if len(flying) == len(buffers):
                    land()  # and its buffer is free
                packed = buffers[own % len(buffers)][: shipment.bytes]
                for slot, piece in shipment.pieces(packed):
                    piece.copy_(source(slot.tile).detach().view(piece.shape))
                parts = [packed]
                if teller is not None:
                    message = teller.message(shipment, packed)
                    parts = message.parts()
                    if teller.differs:
                        tally.changed(shipment, message.header.count)
                flying.append((own, parts, [self._begin(shipment, part, end) for part in parts]))
                for slot, piece in shipment.pieces(packed):
                    tally.add(shipment, slot, self._tile_digest(slot.tile, piece))
            while flying:
                land()
        report = tally.report(time.monotonic() - began, sum(buffer.numel() for buffer in buffers))
        self._sent = None if teller is None else teller.sent(report.legs)
        return report


class LaneReceiver(_End):
    """The end of a sampler's worker."""

    def __init__(
        self,
        route: Route,
        crew: Crew,
        sampler: int,
        worker: int,
        address: str,
        port: int,
        *,
        group_s: float,
        device: torch.device | str = "cpu",
        left: threading.Event | None = None,
    ) -> None:
        """Worker `worker` of replica `sampler`, otherwise as the sender."""
        rank = crew.worker(sampler, worker)
        super().__init__(route, crew, rank, address, port, group_s=group_s, device=device, left=left)

    def receive(self, target: View, update_s: float, writing: Writing | None = None, base: Base | None = None) -> LaneReport:
        """The worker's part of the next version, into where `target` says that its tiles are, in the plan's dtype. The digests
        are of what lies there. `update_s` covers all of it, with the wait for the senders to begin.

        With `writing` each bucket is copied there within that context, and none received in its place: into that, what a peer
        sends late would arrive until the deadline, though this has failed long since and another version lies there.

        `base`: the version before, where it is held; with deltas a version may come as its difference to that. It may lie where
        the new one goes. Raises DeltaError where a difference to something else comes."""
        began = time.monotonic()
        tally = Tally()
        with self._updating(update_s) as end:
            buffers: list[torch.Tensor] = []
            if self._deltas:
                arriving = self._differences(target, writing, base, buffers, end)
            else:
                arriving = self._wholes(target, writing, buffers, end)
            for shipment, sent_bytes in arriving:
                tally.landed(shipment, sent_bytes, time.monotonic() - began)
                for slot in shipment.slots:
                    tally.add(shipment, slot, self._tile_digest(slot.tile, self._place(slot, target)))
        return tally.report(time.monotonic() - began, sum(buffer.numel() for buffer in buffers))

    def _wholes(
        self, target: View, writing: Writing | None, buffers: list[torch.Tensor], end: float
    ) -> Iterator[tuple[Shipment, int]]:
        """Each transfer that is over and lies in its place, with its bytes. Fills `buffers`, of those that cannot be received
        in their places."""
        flying: deque[tuple[Any, list[torch.Tensor], torch.Tensor | None]] = deque()

        def begin(own: int) -> None:
            shipment = self._own[own]
            places = [self._place(slot, target) for slot in shipment.slots]
            run, buffer = None if writing else run_of(shipment, places), None
            if run is None:
                buffers.extend([] if buffers else self._buffers())
                run = buffer = buffers[own % len(buffers)][: shipment.bytes]
            flying.append((self._begin(shipment, run, end), places, buffer))

        for own in range(min(2, len(self._own))):
            begin(own)
        for own, shipment in enumerate(self._own):
            work, places, buffer = flying.popleft()
            self._wait(shipment, work, end)
            self._stand(own + 1)
            if buffer is not None:
                with writing() if writing else nullcontext():
                    for (_, piece), place in zip(shipment.pieces(buffer), places, strict=True):
                        place.copy_(piece)
            if own + 2 < len(self._own):
                begin(own + 2)
            yield shipment, shipment.bytes

    def _differences(
        self, target: View, writing: Writing | None, base: Base | None, buffers: list[torch.Tensor], end: float
    ) -> Iterator[tuple[Shipment, int]]:
        """The same of what says first in which form it comes: the header of the next transfer is waited for, and its body
        begun, before the last one is written."""
        bodies = self._buffers()
        state = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._device)
        buffers += [*bodies, state]
        fields = [torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device) for _ in bodies]
        coming: deque[tuple[Message, Any]] = deque()

        def announce(own: int) -> Any:
            return self._begin(self._own[own], fields[own % 2], end)

        def begin(own: int, announced: Any) -> Any:
            """The body that was announced, and behind it the next header, which is returned."""
            shipment = self._own[own]
            self._wait(shipment, announced, end)
            header = header_of(shipment, fields[own % 2], base)
            body = bodies[own % 2][: header.body_bytes]
            work = self._begin(shipment, body, end) if header.body_bytes else None
            coming.append((Message(header, body), work))
            return announce(own + 1) if own + 1 < len(self._own) else None

        announced = begin(0, announce(0)) if self._own else None
        for own, shipment in enumerate(self._own):
            message, work = coming.popleft()
            if work is not None:
                self._wait(shipment, work, end)
            self._stand(own + 1)
            if announced is not None:
                announced = begin(own + 1, announced)
            with writing() if writing else nullcontext():
                write(shipment, message, base, state, [self._place(slot, target) for slot in shipment.slots])
            yield shipment, HEADER_BYTES + message.header.body_bytes

    def _place(self, slot: Slot, target: View) -> torch.Tensor:
        place = target(slot.tile)
        if place.dtype != slot.dtype:
            name = self._plan.tensors[slot.tile.tensor].name
            raise ValueError(f"{name} arrives as {slot.dtype} and would be staged as {place.dtype}: its digest needs the same")
        return place.view(slot.tile.rows, slot.tile.columns)


def _group(shipment: Shipment) -> str:
    return f"{shipment.root}-{shipment.lane}"


def _board(title: str, end: float, connect: Callable[[], Board], reason: groups.Reason) -> Board:
    try:
        return groups.within(connect, "weight store", end, reason)
    except Left as error:
        raise TransportError(f"{title}: it was left while it was built: {error}") from error
    except TimeoutError as error:
        raise TransportError(f"{title}: the trainer's store does not answer") from error
