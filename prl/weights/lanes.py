"""The lanes: new weights from all trainer ranks to all sampler workers at once, each worker's own part to it alone.

There is one small process group for each trainer rank (its root) and lane: the root and worker `lane` of every sampler. Both
ends follow their part of the plan's one order of transfers, each in one thread, which casts and packs the next bucket (or
unpacks the last one) while another is on the wire; two buckets are all the memory that it takes besides what a worker stages,
and a bucket whose tiles follow each other there, too, is received in its place, unless that memory is in use.

An end belongs to an epoch of the membership. Where one rank fails at anything, it has all the others leave, through the epoch's
store, and the end is of no use any more: the next epoch has others.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from prl.weights import digest
from prl.weights import group as groups
from prl.weights.crew import Board, Crew, Place
from prl.weights.group import Left, Lost, Meeting, TransportError
from prl.weights.plan import ITEM_BYTES, LanePlan, Tile, lane_buckets, schedule
from prl.weights.shards import Shard

View = Callable[[Tile], torch.Tensor]  # where a tile's elements are: a view that `.view(rows, columns)` accepts
Writing = Callable[[], AbstractContextManager[None]]  # in which memory that is in use may be written; raises where it may not


@dataclass(frozen=True)
class Route:
    """What both ends have to agree on."""

    plan: LanePlan
    shards: Sequence[Sequence[Shard]]  # of each lane, as the plan was compiled for
    bucket_bytes: int

    @property
    def terms(self) -> str:
        return f"plan {self.plan.digest()} in buckets of {self.bucket_bytes} bytes"


@dataclass(frozen=True)
class LegReport:
    """What one root sent to one lane, as one end knows it."""

    root: int
    lane: int
    bytes: int
    leg_s: float  # from the update's begin to the end of the leg
    digest: int  # of all its tiles
    counted: int  # of those that count for the version's digest


@dataclass(frozen=True)
class LaneReport:
    legs: tuple[LegReport, ...]
    transfer_s: float
    buffer_bytes: int  # that it took besides what was sent or staged

    @property
    def bytes(self) -> int:
        return sum(leg.bytes for leg in self.legs)


def lane_digests(legs: Iterable[LegReport]) -> dict[int, int]:
    """By lane: what its worker holds. Those of all roots' legs together equal what each worker reports of its own."""
    sums: dict[int, int] = {}
    for leg in legs:
        sums[leg.lane] = (sums.get(leg.lane, 0) + leg.digest) % digest.MODULUS
    return sums


def version_digest(legs: Iterable[LegReport]) -> int:
    """Of the version, from the legs of all roots, or of all workers of one sampler: each element once, as the digest of the
    whole tensors."""
    return sum(leg.counted for leg in legs) % digest.MODULUS


class Staging:
    """A worker's shard of a version: a matrix for each tensor of which it holds something, by the tensor's number."""

    def __init__(
        self,
        plan: LanePlan,
        shards: Sequence[Shard],
        device: torch.device | str = "cpu",
        tensors: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """In the `tensors` given, or one behind the other in one piece of memory, as a leg's tiles mostly follow each other."""
        self._shards = {shard.tile.tensor: shard for shard in shards}
        if tensors is not None:
            self.tensors = dict(tensors)
            return
        slots = _slots(plan, [self._shards[tensor].tile for tensor in sorted(self._shards)])
        memory = torch.empty(slots[-1].end if slots else 0, dtype=torch.uint8, device=device)
        self.tensors = {slot.tile.tensor: slot.piece(memory) for slot in slots}

    def __call__(self, tile: Tile) -> torch.Tensor:
        return self.tensors[tile.tensor][self._shards[tile.tensor].index(tile)]


@dataclass(frozen=True)
class _Slot:
    tile: Tile
    start: int  # bytes of the bucket
    end: int
    dtype: torch.dtype
    counted: bool = False  # in the version's digest

    def piece(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tile as a matrix in the buffer."""
        return buffer[self.start : self.end].view(self.dtype).view(self.tile.rows, self.tile.columns)


@dataclass(frozen=True)
class _Shipment:
    """A bucket on its way."""

    number: int  # in the order of all
    root: int
    lane: int
    what: str
    slots: tuple[_Slot, ...]

    @property
    def bytes(self) -> int:
        return self.slots[-1].end

    def pieces(self, buffer: torch.Tensor) -> Iterator[tuple[_Slot, torch.Tensor]]:
        for slot in self.slots:
            yield slot, slot.piece(buffer)


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
        self._crew = crew
        self._device = torch.device(device)
        self._title = f"weight lanes, epoch {crew.epoch}, {crew.names[rank]}"
        self._transfers, self._own = _shipments(route, crew, rank)
        self._buffer_bytes = max((shipment.bytes for shipment in self._own), default=0)
        self._update = 0
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
        transfer = self._own[own].number if own < len(self._own) else self._transfers
        self._board.stand(Place(self._update, transfer))

    def _buffers(self) -> list[torch.Tensor]:
        return [torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._device) for _ in range(min(2, len(self._own)))]

    def _begin(self, shipment: _Shipment, buffer: torch.Tensor, end: float) -> Any:
        try:
            return self._groups[_group(shipment)].begin(buffer[: shipment.bytes], end)
        except RuntimeError as error:
            raise TransportError(f"{self._title}: {shipment.what} cannot begin: {groups.said(error)}") from error

    def _finish(self, own: int, work: Any, end: float) -> None:
        shipment = self._own[own]
        began = time.monotonic()
        try:
            self._groups[_group(shipment)].finish(work, end, self._board.reason)
        except Left as error:
            raise TransportError(f"{self._title}: left in {shipment.what}: {error}") from error
        except (Lost, RuntimeError) as error:
            waited_s = time.monotonic() - began
            members = self._crew.members(shipment.root, shipment.lane)
            how = groups.said(error)
            if isinstance(error, Lost):
                how = f"no connection to {', '.join(self._crew.names[members[rank]] for rank in error.ranks)}: {how}"
            words = f"{self._title}: waited {waited_s:.1f} s in {shipment.what} for {self._board.behind(members)}: {how}"
            raise TransportError(words) from error
        self._stand(own + 1)

    def _tile_digest(self, tile: Tile, elements: torch.Tensor) -> torch.Tensor:
        spec = self._plan.tensors[tile.tensor]
        return digest.rectangle(spec.name, elements, tile.row, tile.column, prod(spec.shape[1:]))


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

    def send(self, source: View, update_s: float) -> LaneReport:
        """The rank's part of a version, from where `source` says that its tiles are, in any dtype. Blocks until the workers
        have it; raises TransportError once `update_s` is over, with the words who was waited for."""
        began = time.monotonic()
        tally = _Tally()
        with self._updating(update_s) as end:
            buffers = self._buffers()
            flying: deque[tuple[int, Any]] = deque()

            def land() -> None:
                own, work = flying.popleft()
                self._finish(own, work, end)
                tally.landed(self._own[own], time.monotonic() - began)

            for own, shipment in enumerate(self._own):
                if len(flying) == len(buffers):
                    land()  # and its buffer is free
                buffer = buffers[own % len(buffers)]
                for slot, piece in shipment.pieces(buffer):
                    piece.copy_(source(slot.tile).detach().view(piece.shape))
                flying.append((own, self._begin(shipment, buffer, end)))
                for slot, piece in shipment.pieces(buffer):
                    tally.add(shipment, slot, self._tile_digest(slot.tile, piece))
            while flying:
                land()
        return tally.report(time.monotonic() - began, sum(buffer.numel() for buffer in buffers))


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

    def receive(self, target: View, update_s: float, writing: Writing | None = None) -> LaneReport:
        """The worker's part of the next version, into where `target` says that its tiles are, in the plan's dtype. The digests
        are of what lies there. `update_s` covers all of it, with the wait for the senders to begin.

        With `writing` each bucket is copied there within that context, and none received in its place: into that, what a peer
        sends late would arrive until the deadline, though this has failed long since and another version lies there."""
        began = time.monotonic()
        tally = _Tally()
        with self._updating(update_s) as end:
            buffers: list[torch.Tensor] = []  # of those that cannot be received in their places
            flying: deque[tuple[Any, list[torch.Tensor], torch.Tensor | None]] = deque()

            def begin(own: int) -> None:
                shipment = self._own[own]
                places = [self._place(slot, target) for slot in shipment.slots]
                run, buffer = None if writing else _run(shipment, places), None
                if run is None:
                    buffers.extend([] if buffers else self._buffers())
                    run = buffer = buffers[own % len(buffers)]
                flying.append((self._begin(shipment, run, end), places, buffer))

            for own in range(min(2, len(self._own))):
                begin(own)
            for own, shipment in enumerate(self._own):
                work, places, buffer = flying.popleft()
                self._finish(own, work, end)
                tally.landed(shipment, time.monotonic() - began)
                if buffer is not None:
                    with writing() if writing else nullcontext():
                        for (_, piece), place in zip(shipment.pieces(buffer), places, strict=True):
                            place.copy_(piece)
                if own + 2 < len(self._own):
                    begin(own + 2)
                for slot in shipment.slots:
                    tally.add(shipment, slot, self._tile_digest(slot.tile, self._place(slot, target)))
        return tally.report(time.monotonic() - began, sum(buffer.numel() for buffer in buffers))

    def _place(self, slot: _Slot, target: View) -> torch.Tensor:
        place = target(slot.tile)
        if place.dtype != slot.dtype:
            name = self._plan.tensors[slot.tile.tensor].name
            raise ValueError(f"{name} arrives as {slot.dtype} and would be staged as {place.dtype}: its digest needs the same")
        return place.view(slot.tile.rows, slot.tile.columns)


class _Tally:
    """Adds up an update's legs."""

    def __init__(self) -> None:
        self._legs: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._ends_s: dict[tuple[int, int], float] = {}

    def landed(self, shipment: _Shipment, after_s: float) -> None:
        leg = shipment.root, shipment.lane
        self._bytes[leg] = self._bytes.get(leg, 0) + shipment.bytes
        self._ends_s[leg] = after_s

    def add(self, shipment: _Shipment, slot: _Slot, tile_digest: torch.Tensor) -> None:
        counted, uncounted = self._legs.setdefault((shipment.root, shipment.lane), ([], []))
        (counted if slot.counted else uncounted).append(tile_digest)

    def report(self, transfer_s: float, buffer_bytes: int) -> LaneReport:
        legs = []
        for (root, lane), (counted, uncounted) in sorted(self._legs.items()):
            share, rest = digest.total(counted), digest.total(uncounted)
            leg = root, lane
            both = (share + rest) % digest.MODULUS
            legs.append(LegReport(root, lane, self._bytes[leg], self._ends_s[leg], both, share))
        return LaneReport(tuple(legs), transfer_s, buffer_bytes)


def _shipments(route: Route, crew: Crew, rank: int) -> tuple[int, list[_Shipment]]:
    """How many transfers there are, and those that this rank takes part in, in their order."""
    counted = [{shard.tile.tensor for shard in shards if shard.counted} for shards in route.shards]
    order = schedule(route.plan, route.bucket_bytes)
    buckets = {
        (leg.root, leg.lane): lane_buckets(route.plan, leg, route.bucket_bytes)
        for leg in route.plan.legs
        if rank in crew.members(leg.root, leg.lane)
    }
    own = []
    for number, (root, lane, bucket) in enumerate(order):
        if (root, lane) in buckets:
            of = len(buckets[root, lane])
            what = f"bucket {bucket + 1} of {of} from trainer rank {root} to lane {lane}"
            own.append(_Shipment(number, root, lane, what, _slots(route.plan, buckets[root, lane][bucket], counted[lane])))
    return len(order), own


def _slots(plan: LanePlan, tiles: Sequence[Tile], counted: Collection[int] = ()) -> tuple[_Slot, ...]:
    """One behind the other; with several dtypes each where its elements can lie. `counted`: tensors."""
    slots: list[_Slot] = []
    for tile in tiles:
        item_bytes = ITEM_BYTES[plan.tensors[tile.tensor].dtype]
        start = -(-(slots[-1].end if slots else 0) // item_bytes) * item_bytes
        end = start + plan.tile_bytes(tile)
        slots.append(_Slot(tile, start, end, _dtype(plan, tile.tensor), tile.tensor in counted))
    return tuple(slots)


def _run(shipment: _Shipment, places: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The bytes where the shipment's tiles lie, if they lie there as in a bucket."""
    memory, start = places[0].untyped_storage(), places[0].data_ptr()
    for slot, place in zip(shipment.slots, places, strict=True):
        same = place.untyped_storage().data_ptr() == memory.data_ptr() and place.data_ptr() == start + slot.start
        if not (same and place.is_contiguous()):
            return None
    run = torch.empty(0, dtype=torch.uint8, device=places[0].device)
    run.set_(memory, start - memory.data_ptr(), (shipment.bytes,))  # type: ignore[call-overload]
    return run


def _dtype(plan: LanePlan, tensor: int) -> torch.dtype:
    dtype = getattr(torch, plan.tensors[tensor].dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _group(shipment: _Shipment) -> str:
    return f"{shipment.root}-{shipment.lane}"


def _board(title: str, end: float, connect: Callable[[], Board], reason: groups.Reason) -> Board:
    try:
        return groups.within(connect, "weight store", end, reason)
    except Left as error:
        raise TransportError(f"{title}: it was left while it was built: {error}") from error
    except TimeoutError as error:
        raise TransportError(f"{title}: the trainer's store does not answer") from error
