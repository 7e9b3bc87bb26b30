"""What a version of the weights consists of, and how its tensors are packed into transfers. Free of torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
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
