"""From numpy to Arrow and back without a Python list in between."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]


def offsets_of(lengths: Iterable[int], count: int) -> npt.NDArray[np.int32]:
    """[count + 1]: where each of `count` pieces begins, and the end."""
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, count), out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]} values in one column of one file: roll files earlier (streams.roll_mib)")
    return offsets.astype(np.int32)


def list_array(pieces: Sequence[Array], dtype: type[np.generic]) -> pa.ListArray:
    """One list a piece."""
    offsets = offsets_of(map(len, pieces), len(pieces))
    memory = pa.allocate_buffer(int(offsets[-1]) * np.dtype(dtype).itemsize)  # is used again, which costs less than new
    values = np.frombuffer(memory, dtype)
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


def list_views(column: pa.ListArray) -> list[Array]:
    """Each row of a list column, as a view."""
    values: Array = column.values.to_numpy(zero_copy_only=True)
    return [values[start:end] for start, end in itertools.pairwise(column.offsets.to_numpy().tolist())]


def strings(column: pa.DictionaryArray, rows: Array | None = None) -> list[str]:
    """The value of each row, or of some. Equal ones are one object: a long string costs its length once, however many rows
    have it."""
    values = column.dictionary.to_pylist()
    indices = column.indices.to_numpy()
    return [values[index] for index in (indices if rows is None else indices[rows]).tolist()]


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
