"""The experts that tokens went to, as rollout and step files hold them: in a column that only files have which know of some."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from prl.streams.arrays import Array, list_array

ROUTINGS = pa.field("routings", pa.list_(pa.int16()))  # flat; a row without any has none
SHAPE = "prl.routings"  # in the header: [layers, experts a token]


def shape_of(routings: Sequence[Array | None]) -> list[int] | None:
    """[layers, experts a token] of those that there are; None where there is none. Raises ValueError where they differ."""
    shapes = {found.shape[1:] for found in routings if found is not None}
    if len(shapes) > 1 or any(len(shape) != 2 or 0 in shape for shape in shapes):
        raise ValueError(f"routings of shapes {sorted(shapes)}: expected one of [layers, experts a token]")
    return list(shapes.pop()) if shapes else None


def to_column(routings: Sequence[Array | None]) -> pa.ListArray:
    nothing = np.empty(0, np.int16)
    return list_array([nothing if found is None else found.reshape(-1) for found in routings], np.int16)


def shape_in(metadata: Mapping[bytes, bytes], columns: Sequence[str]) -> tuple[int, int] | None:
    """Of a file's header; None where it has no such column. Raises ValueError."""
    if ROUTINGS.name not in columns:
        return None
    match json.loads(metadata.get(SHAPE.encode(), b"null")):
        case [int(layers), int(experts)] if layers > 0 and experts > 0:
            return layers, experts
        case other:
            raise ValueError(f"routings of shape {other}, expected [layers, experts a token]")


def from_values(values: Array, shape: tuple[int, int], tokens: int) -> Array | None:
    """[tokens, layers, experts a token], a view; None where nothing is known. Raises ValueError."""
    if not len(values):
        return None
    if len(values) != tokens * shape[0] * shape[1] or values.min() < -1:
        raise ValueError(f"{len(values)} routings from {values.min()} on for {tokens} tokens of {shape[0]} layers x {shape[1]}")
    return values.reshape(tokens, *shape)
