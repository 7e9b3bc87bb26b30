"""What a version of the weights consists of, and how its tensors are packed into transfers: one after another for a broadcast
of whole tensors, or as the parts that each sampler worker holds (lanes). Free of torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import gcd, prod
from typing import Any

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One full tensor under its Hugging Face name; `dtype` as torch calls it, without "torch."."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name}: shape {self.shape} has a negative size")

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of tensor number `tensor`, which lie in a bucket from byte `at` on."""

    tensor: int
    start: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One transfer: pieces that lie one behind the other."""

    pieces: tuple[Piece, ...]
    bytes: int


def pack(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Deal the tensors, in their order, into buckets of at most `bucket_bytes`. Every bucket but the last is full, so
    tensors are split where a bucket ends. Both ends of a transfer get the same buckets from the same specs."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}")
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0
    for number, spec in enumerate(specs):
        start = 0
        while start < spec.bytes:
            end = min(spec.bytes, start + bucket_bytes - used)
            pieces.append(Piece(number, start, end, used))
            used += end - start
            start = end
            if used == bucket_bytes:
                buckets.append(Bucket(tuple(pieces), used))
                pieces, used = [], 0
    if pieces:
        buckets.append(Bucket(tuple(pieces), used))
    return buckets


def item_bytes(specs: Sequence[TensorSpec], bucket: Bucket) -> int:
    """The largest items, of 1, 2, 4 or 8 bytes, that a bucket is made of throughout: those of its tensors, where all have the
    same ones and lie and end on multiples of them."""
    sizes = [ITEM_BYTES[specs[piece.tensor].dtype] for piece in bucket.pieces]
    return gcd(bucket.bytes, *sizes, *(piece.at for piece in bucket.pieces))


def to_json(specs: Iterable[TensorSpec]) -> list[list[Any]]:
    """The form on the wire: [[name, dtype, shape], ...]."""
    return [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]


def from_json(rows: Any) -> list[TensorSpec]:
    """From the wire's form. Raises ValueError that names the first row that is wrong, and refuses a name given twice."""
    if not isinstance(rows, list):
        raise ValueError(  # noqa: TRY004  # it comes from outside: a wrong value
            f"tensors: expected a list of [name, dtype, shape], not {type(rows).__name__}"
        )
    specs = []
    for row in rows:
        match row:
            case [str(name), str(dtype), [*shape]] if all(type(size) is int for size in shape):
                specs.append(TensorSpec(name, dtype, tuple(shape)))
            case _:
                raise ValueError(f"tensors: expected [name, dtype, shape], not {row!r}")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"tensors: {spec.name} is given twice")
        seen.add(spec.name)
    return specs


# --- lanes ---


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [row, row + rows), columns [column, column + columns) of a plan's tensor number `tensor`, seen as a matrix: its rows
    are its first dimension, its columns all others. A vector has one column."""

    tensor: int
    row: int
    rows: int
    column: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def within(self, other: "Tile") -> "Tile | None":
        """What both cover, if there is anything."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Tile(self.tensor, row, rows, column, columns) if self.tensor == other.tensor and rows > 0 < columns else None

    def band(self, first: int, last: int) -> "Tile":
        """Rows [first, last), counted from this tile's own first row."""
        return Tile(self.tensor, self.row + first, last - first, self.column, self.columns)


@dataclass(frozen=True)
class Leg:
    """What trainer rank `root` sends to worker `lane` of every sampler; tiles in the order in which they are sent."""

    root: int
    lane: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class LanePlan:
    """Lane k is worker k of every sampler. Each element of what it holds is in exactly one tile of its legs."""

    tensors: tuple[TensorSpec, ...]  # in the samplers' dtype
    trainer_ranks: int
    lanes: int
    legs: tuple[Leg, ...]  # by root, then lane

    def tile_bytes(self, tile: Tile) -> int:
        return tile.elements * ITEM_BYTES[self.tensors[tile.tensor].dtype]

    def leg_bytes(self, leg: Leg) -> int:
        return sum(map(self.tile_bytes, leg.tiles))

    def digest(self) -> str:
        """Of all that both ends have to agree on."""
        whole = blake2b(json.dumps([to_json(self.tensors), self.trainer_ranks, self.lanes]).encode(), digest_size=16)
        for leg in self.legs:
            tiles = [(tile.tensor, tile.row, tile.rows, tile.column, tile.columns) for tile in leg.tiles]
            whole.update(json.dumps([leg.root, leg.lane, tiles]).encode())
        return whole.hexdigest()


def lane_buckets(plan: LanePlan, leg: Leg, bucket_bytes: int) -> list[tuple[Tile, ...]]:
    """The leg's tiles, cut between rows, in transfers of at most `bucket_bytes`. In a bucket each tile is flattened row by row,
    one behind the other.

    Raises ValueError where a row of a tile is larger than a bucket.
    """
    buckets: list[tuple[Tile, ...]] = []
    tiles: list[Tile] = []
    room = bucket_bytes
    for tile in leg.tiles:
        row_bytes = plan.tile_bytes(tile) // tile.rows
        if row_bytes > bucket_bytes:
            name = plan.tensors[tile.tensor].name
            raise ValueError(
                f"{name} has rows of {row_bytes} bytes, which a bucket of {bucket_bytes} bytes cannot hold: raise it"
            )
        first = 0
        while first < tile.rows:
            last = min(tile.rows, first + room // row_bytes)
            if last > first:
                tiles.append(tile.band(first, last))
                room -= (last - first) * row_bytes
                first = last
            if first < tile.rows:
                buckets.append(tuple(tiles))
                tiles, room = [], bucket_bytes
    return [*buckets, tuple(tiles)] if tiles else buckets


def schedule(plan: LanePlan, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """All transfers as (root, lane, number of the bucket in its leg), in the one order of which every participant follows its
    own part, so that none can wait for another in a circle. In round r root t serves lane (t + r) modulo the lanes: all roots
    and all lanes are busy at once. Roots that meet at a lane take turns, so that each packs while another sends."""
    turns = [
        ((leg.lane - leg.root) % plan.lanes, number, leg.root, leg.lane)
        for leg in plan.legs
        for number in range(len(lane_buckets(plan, leg, bucket_bytes)))
    ]
    return [(root, lane, number) for _, number, root, lane in sorted(turns)]
