"""What goes over the lanes, in which order, and where it lies at both ends."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import torch

from prl.weights.crew import Crew
from prl.weights.plan import ITEM_BYTES, LanePlan, Tile, lane_buckets, schedule
from prl.weights.shards import Shard

View = Callable[[Tile], torch.Tensor]  # where a tile's elements are: a view that `.view(rows, columns)` accepts


@dataclass(frozen=True)
class Route:
    """What both ends have to agree on."""

    plan: LanePlan
    shards: Sequence[Sequence[Shard]]  # of each lane, as the plan was compiled for
    bucket_bytes: int
    deltas: bool = False  # each bucket says first in which form it comes

    @property
    def terms(self) -> str:
        how = ", as deltas" if self.deltas else ""
        return f"plan {self.plan.digest()} in buckets of {self.bucket_bytes} bytes{how}"


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
class Slot:
    tile: Tile
    start: int  # bytes of the bucket
    end: int
    dtype: torch.dtype
    counted: bool = False  # in the version's digest

    def piece(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tile as a matrix in the buffer."""
        return buffer[self.start : self.end].view(self.dtype).view(self.tile.rows, self.tile.columns)


@dataclass(frozen=True)
class Shipment:
    """A bucket on its way."""

    number: int  # in the order of all
    root: int
    lane: int
    what: str
    slots: tuple[Slot, ...]

    @property
    def bytes(self) -> int:
        return self.slots[-1].end

    @property
    def item_bytes(self) -> int:
        """The largest items, of 1, 2, 4 or 8 bytes, that it is made of throughout."""
        return gcd(self.bytes, *(slot.dtype.itemsize for slot in self.slots))

    def pieces(self, buffer: torch.Tensor) -> Iterator[tuple[Slot, torch.Tensor]]:
        for slot in self.slots:
            yield slot, slot.piece(buffer)


def shipments_of(route: Route, crew: Crew, rank: int) -> tuple[int, list[Shipment]]:
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
            own.append(Shipment(number, root, lane, what, _slots(route.plan, buckets[root, lane][bucket], counted[lane])))
    return len(order), own


def _slots(plan: LanePlan, tiles: Sequence[Tile], counted: Collection[int] = ()) -> tuple[Slot, ...]:
    """One behind the other; with several dtypes each where its elements can lie. `counted`: tensors."""
    slots: list[Slot] = []
    for tile in tiles:
        item_bytes = ITEM_BYTES[plan.tensors[tile.tensor].dtype]
        start = -(-(slots[-1].end if slots else 0) // item_bytes) * item_bytes
        end = start + plan.tile_bytes(tile)
        slots.append(Slot(tile, start, end, _dtype(plan, tile.tensor), tile.tensor in counted))
    return tuple(slots)


def run_of(shipment: Shipment, places: Sequence[torch.Tensor]) -> torch.Tensor | None:
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
