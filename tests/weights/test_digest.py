"""The digest against a second implementation in plain integers, written from its definition."""

from hashlib import blake2b
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.weights import digest as d

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.float64, torch.bool]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def splitmix64(value: int) -> int:
    value %= 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def stream(key: int, number: int) -> int:
    return splitmix64(key + (number + 1) * 0x9E3779B97F4A7C15) | 1


def by_definition(name: str, tensor: torch.Tensor) -> int:
    key = int.from_bytes(blake2b(f"{name}:{tensor.dtype}".encode(), digest_size=8).digest(), "little")
    elements = tensor.reshape(-1).view(BITS[tensor.element_size()]).tolist()
    coefficients = (stream(0, i % d.BLOCK) * stream(key, i // d.BLOCK) for i in range(len(elements)))
    return sum(c * (bits + 1) for c, bits in zip(coefficients, elements, strict=True)) % 2**64


def tensor_of(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    return torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 63, d.BLOCK, 3 * d.BLOCK + 5])
def test_equals_its_definition(dtype, count):
    tensor = tensor_of(dtype, count, 1)
    assert d.digest({"layer.weight": tensor}) == by_definition("layer.weight", tensor)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(DTYPES), st.integers(0, 40 * 2**10), st.data())
def test_parts_of_a_split_add_up(dtype, count, data):
    tensor = tensor_of(dtype, count, count)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    parts = [d.part("w", tensor[a:b], a) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    assert d.total(parts) == d.digest({"w": tensor})


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 15), st.sampled_from([1, 2, 24, 64]), st.data())
def test_rectangles_of_a_split_add_up(rows, units, unit, data):
    """Cut where `unit` divides every column, as heads and shards do, and elsewhere (1)."""
    matrix = tensor_of(torch.bfloat16, rows * units * unit, rows).view(rows, units * unit)
    across = [0, *sorted(data.draw(st.lists(st.integers(0, units), max_size=3))), units]
    down = [0, *sorted(data.draw(st.lists(st.integers(0, rows), max_size=3))), rows]
    parts = [
        d.rectangle("w", matrix[top:bottom, left * unit : right * unit], top, left * unit, units * unit)
        for top, bottom in pairwise(down)
        for left, right in pairwise(across)
    ]
    assert d.total(parts) == d.digest({"w": matrix})


@pytest.mark.parametrize(("rows", "width", "left", "right"), [(900, 896, 448, 896), (70, 4864, 0, 2432), (3, 20001, 7, 19999)])
def test_a_rectangle_that_crosses_blocks_equals_its_definition(rows, width, left, right):
    matrix = tensor_of(torch.bfloat16, rows * width, 5).view(rows, width)
    rest = [d.rectangle("w", matrix[:, :left], 0, 0, width), d.rectangle("w", matrix[:, right:], 0, right, width)]
    assert d.total([d.rectangle("w", matrix[:, left:right], 0, left, width), *rest]) == by_definition("w", matrix)


def test_what_a_workspace_was_used_for_before_does_not_matter():
    """Also where it is smaller than a row."""
    work = d.workspace("cpu").fill_(-1)
    for rows, width, left, right in [(900, 896, 448, 896), (2, 300_000, 0, 290_000), (70, 4864, 0, 2432), (20, 9000, 0, 9000)]:
        matrix = tensor_of(torch.bfloat16, rows * width, 5).view(rows, width)
        inner = d.rectangle("w", matrix[:, left:right], 0, left, width, work)
        assert inner == d.rectangle("w", matrix[:, left:right], 0, left, width)
        rest = [d.rectangle("w", matrix[:, :left], 0, 0, width, work), d.rectangle("w", matrix[:, right:], 0, right, width)]
        assert d.total([inner, *rest]) == d.digest({"w": matrix})


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), min_size=2, max_size=50), st.data())
def test_a_swap_of_elements_is_seen(values, data):
    tensor = torch.tensor(values, dtype=torch.float32)
    i, j = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j].item(), tensor[i].item()
    same = torch.equal(tensor.view(torch.int32), swapped.view(torch.int32))
    assert (d.digest({"w": tensor}) == d.digest({"w": swapped})) is same


def test_a_swap_of_tensors_is_seen():
    one, other = torch.randn(100), torch.randn(100)
    assert d.digest({"a": one, "b": other}) != d.digest({"a": other, "b": one})
    assert d.digest({"a": one, "b": other}) == d.digest({"b": other, "a": one})


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_every_bit_counts(dtype):
    tensor = tensor_of(dtype, 10, 3)
    expected = d.digest({"w": tensor})
    for bit in range(8 * tensor.element_size()):
        flipped = tensor.clone()
        raw = flipped.view(torch.uint8)
        raw[3 * tensor.element_size() + bit // 8] ^= 1 << bit % 8
        assert d.digest({"w": flipped}) != expected


def test_dtype_shape_and_absence_count():
    zeros = torch.zeros(8)
    assert d.digest({"w": zeros}) != d.digest({})
    assert d.digest({"w": zeros}) != d.digest({"w": torch.zeros(9)})
    assert d.digest({"w": zeros}) != d.digest({"w": zeros.to(torch.bfloat16)})
    assert d.digest({"w": torch.zeros(1)}) != d.digest({"w": -torch.zeros(1)})


def test_a_dtype_without_bits_is_refused():
    with pytest.raises(ValueError, match=r"tensor w: no digest of torch.complex128"):
        d.digest({"w": torch.zeros(2, dtype=torch.complex128)})
