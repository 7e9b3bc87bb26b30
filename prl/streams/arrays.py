"""From numpy to Arrow and back without a Python list in between."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]


def offsets_of(lengths: Sequence[int] | Array) -> npt.NDArray[np.int32]:
    """[lengths + 1]: where each of the pieces begins, and the end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.asarray(lengths, np.int64), out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]} values in one column of one file: roll files earlier (streams.roll_mib)")
    return offsets.astype(np.int32)


def list_array(pieces: Sequence[Array], dtype: type[np.generic], offsets: npt.NDArray[np.int32] | None = None) -> pa.ListArray:
    """One list a piece. `offsets`: where they begin, where that is known."""
    if offsets is None:
        offsets = offsets_of(list(map(len, pieces)))
    values = np.empty(int(offsets[-1]), dtype)  # numpy's memory is used again, file after file; Arrow's is given back
    if pieces:
        np.concatenate(pieces, out=values, casting="same_kind")
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def one_list(values: Array) -> pa.ListArray:
    """A column of a single row that holds all of `values`; nothing is copied."""
    return pa.ListArray.from_arrays(pa.array(np.array([0, len(values)], np.int32)), pa.array(values))


def dictionary_array(values: Sequence[str]) -> pa.DictionaryArray:
    """Strings that repeat."""
    codes: dict[str, int] = {}
    indices = np.fromiter((codes.setdefault(v, len(codes)) for v in values), np.int32, len(values))
    return pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(list(codes), pa.string()))


def flat(column: pa.ListArray) -> tuple[Array, Array]:
    """(values, offsets) of a list column: the values of all rows in one piece, a view, and where in it each row begins, and the
    end."""
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]]
    return values, offsets - offsets[0]


def pieces(values: Array, offsets: Array) -> list[Array]:
    """Each row of `flat`, as a view."""
    return [values[start:end] for start, end in itertools.pairwise(offsets.tolist())]


def strings(column: pa.DictionaryArray, rows: Array | None = None) -> list[str]:
    """The value of each row, or of some. Equal ones are one object: a long string costs its length once, however many rows
    have it."""
    values = column.dictionary.to_pylist()
    indices = column.indices.to_numpy()
    return [values[index] for index in (indices if rows is None else indices[rows]).tolist()]


def all_finite(values: Array) -> bool:
    """The sum of the squares tells, in less than half the time, unless it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(values.dot(values)) or bool(np.isfinite(values).all())


def has_nulls(array: pa.Array) -> bool:
    """Whether a value is missing in a column, or in what it is made of."""
    if array.null_count:
        return True
    kind = array.type
    if pa.types.is_dictionary(kind):
        return has_nulls(array.dictionary)
    if pa.types.is_map(kind):
        return has_nulls(array.keys) or has_nulls(array.items)
    if pa.types.is_list(kind):
        return has_nulls(array.values)
    if pa.types.is_struct(kind):
        return any(has_nulls(array.field(i)) for i in range(kind.num_fields))
    return False


DICTIONARY = pa.dictionary(pa.int32(), pa.string())
