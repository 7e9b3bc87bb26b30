"""The codec of deltas against a reader in plain Python that is written from the definition of the forms."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.weights import delta
from prl.weights.delta import DeltaError, Form, Header, Message

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.float64, torch.float8_e4m3fn, torch.bool]
PLAIN = settings(deadline=None, max_examples=100)


def random_items(dtype: torch.dtype, length: int, seed: int) -> torch.Tensor:
    """Any bits: NaN, infinities and both zeros are among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (length * size,), generator=generator, dtype=torch.uint8).view(dtype)


def flipped(tensor: torch.Tensor, which: list[int] | torch.Tensor) -> torch.Tensor:
    """A copy in which the lowest bit of these items is another."""
    raw = tensor.clone().view(torch.uint8).view(len(tensor), tensor.element_size())
    raw[which, 0] ^= 1
    return raw.view(-1).view(tensor.dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def sizes(item: int, length: int, count: int) -> dict[Form, int]:
    """Bytes of the bodies that could say it."""
    if count == 0:
        return {Form.EMPTY: 0}
    blocks, bytes_of_bits = (length + 255) // 256, (length + 7) // 8
    return {
        Form.SPARSE: item * count + count + 2 * blocks,
        Form.BITMAP: item * count + bytes_of_bits,
        Form.DENSE: item * length,
    }


def by_definition(previous: torch.Tensor, message: Message) -> bytes:
    """What the message says, byte for byte."""
    form, item, length, count = (getattr(message.header, name) for name in ("form", "item_bytes", "length", "count"))
    body, result = raw(message.body), bytearray(raw(previous))
    values, where = body[: count * item], body[count * item :]
    if form is Form.DENSE:
        return body
    positions: list[int] = []
    if form is Form.SPARSE:
        blocks = (length + 255) // 256
        lowest = iter(where[2 * blocks :])
        for block in range(blocks):
            named = int.from_bytes(where[2 * block : 2 * block + 2], "little")
            positions += [256 * block + next(lowest) for _ in range(named)]
        assert next(lowest, None) is None
    elif form is Form.BITMAP:
        positions = [k for k in range(8 * len(where)) if where[k // 8] >> k % 8 & 1]
    assert len(positions) == count
    for number, position in enumerate(positions):
        result[position * item : (position + 1) * item] = values[number * item : (number + 1) * item]
    return bytes(result)


@st.composite
def pairs(draw) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Two states and the number of items that differ; runs, single items and shares from none to all of them."""
    dtype = draw(st.sampled_from(DTYPES))
    length = draw(st.one_of(st.integers(0, 40), st.integers(200, 1500)))
    previous = random_items(dtype, length, draw(st.integers(0, 2**20)))
    kind = draw(st.sampled_from(["some", "share", "run"]))
    if kind == "share":
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
        which = (torch.rand(length, generator=generator) < draw(st.floats(0, 1))).nonzero().view(-1).tolist()
    elif kind == "run":
        start, end = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
        which = list(range(start, end))
    else:
        which = draw(st.lists(st.integers(0, length - 1), unique=True, max_size=20)) if length else []
    return previous, flipped(previous, which), len(which)


@PLAIN
@given(pairs())
def test_what_is_applied_is_what_was_encoded_in_the_smallest_form_and_twice_is_as_good_as_once(pair):
    previous, current, count = pair
    message = delta.encode(previous, current)
    item, length = previous.element_size(), len(previous)
    possible = sizes(item, length, count)
    assert (message.header.item_bytes, message.header.length, message.header.count) == (item, length, count)
    assert message.body.numel() == message.header.body_bytes == possible[message.header.form] == min(possible.values())
    assert message.body.numel() <= length * item
    assert by_definition(previous, message) == raw(current)
    base = previous.clone()
    for _ in range(2):
        delta.apply(base, message)
        assert raw(base) == raw(current)


@PLAIN
@given(pairs(), st.integers(0, 2**64 - 1))
def test_a_header_is_read_as_it_was_written(pair, digest):
    previous, current, _ = pair
    header = delta.encode(previous, current, digest).header
    fields = header.to_tensor(torch.device("cpu"))
    assert fields.numel() == delta.HEADER_BYTES
    assert delta.read_header(fields, previous.element_size(), len(previous), digest) == header


@PLAIN
@given(st.sampled_from(DTYPES), st.integers(1, 800), st.data())
def test_steps_that_are_skipped_need_a_delta_to_the_state_that_is_held(dtype, length, data):
    """Of a row of states the receiver is sent some; each delta is to the one that it was sent before."""
    states = [random_items(dtype, length, 1)]
    for _ in range(6):
        which = data.draw(st.lists(st.integers(0, length - 1), unique=True, max_size=30))
        states.append(flipped(states[-1], which))
    held = states[0].clone()
    sent = [0, *data.draw(st.lists(st.integers(1, 6), unique=True).map(sorted))]
    for before, now in itertools.pairwise(sent):
        delta.apply(held, delta.encode(states[before], states[now]))
        assert raw(held) == raw(states[now])


@pytest.mark.parametrize(("changed", "share"), [(0.0, 0.0), (0.02, 0.0342), (0.11, 0.169), (0.25, 0.3125), (1.0, 1.0)])
def test_share_of_the_bytes_of_bfloat16(changed, share):
    length = 2**20
    previous = torch.randn(length, generator=torch.Generator().manual_seed(0)).bfloat16()
    which = torch.randperm(length, generator=torch.Generator().manual_seed(1))[: int(length * changed)]
    message = delta.encode(previous, flipped(previous, which))
    assert message.body.numel() / (2 * length) == pytest.approx(share, abs=0.0005)
    base = previous.clone()
    delta.apply(base, message)
    assert raw(base) == raw(flipped(previous, which))


def test_bits_are_compared_not_numbers():
    zero = torch.tensor([float("nan"), 0.0, -0.0, 1.0] * 100)
    assert delta.encode(zero, zero.clone()).header.form is Form.EMPTY
    signs = zero.clone()
    signs[1] = -0.0
    message = delta.encode(zero, signs)
    assert (message.header.form, message.header.count) == (Form.SPARSE, 1)
    base = zero.clone()
    delta.apply(base, message)
    assert raw(base) == raw(signs)


def test_a_full_block_among_unchanged_ones():
    previous = random_items(torch.bfloat16, 40 * 256, 3)
    current = flipped(previous, list(range(512, 768)))
    message = delta.encode(previous, current)
    assert message.header.form is Form.SPARSE
    assert by_definition(previous, message) == raw(current)


def test_a_first_state_is_dense_and_needs_no_base():
    current = random_items(torch.bfloat16, 1000, 4)
    message = delta.dense(current)
    assert delta.read_header(message.header.to_tensor(torch.device("cpu")), 2, 1000, None) == message.header
    base = random_items(torch.bfloat16, 1000, 5)
    delta.apply(base, message)
    assert raw(base) == raw(current)


@settings(deadline=None, max_examples=200)
@given(pairs(), st.data())
def test_a_damaged_message_is_refused_or_changes_nothing_outside_of_the_bucket(pair, data):
    """Between two others, the bucket is all that may change, and all that is refused leaves it as it was."""
    previous, current, _ = pair
    message = delta.encode(previous, current, 7)
    fields, body = message.header.to_tensor(torch.device("cpu")), message.body.clone()
    damaged = data.draw(st.sampled_from([one for one in (fields, body) if one.numel()]))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    item, length = previous.element_size(), len(previous)
    around = torch.cat([previous, previous, previous])
    base = around[length : 2 * length]
    try:
        header = delta.read_header(fields, item, length, 7)
        assert header.body_bytes <= length * item
        delta.apply(base, Message(header, body))
    except DeltaError:
        assert raw(base) == raw(previous)
    assert raw(around[:length]) == raw(previous) == raw(around[2 * length :])


def sparse_message() -> Message:
    """Items 1, 255 and 256 of 600 are another."""
    previous = random_items(torch.bfloat16, 600, 6)
    message = delta.encode(previous, flipped(previous, [1, 255, 256]), 7)
    assert message.body[6:].tolist() == [2, 0, 1, 0, 0, 0, 1, 255, 0]
    return message


@pytest.mark.parametrize(
    ("at", "values", "words"),
    [
        (6, [1], "do not have 3 items"),
        (6, [255, 255], "do not have 3 items"),  # -1
        (6, [3, 0, 0], "do not rise"),  # 1, 255, 0 of the same block
        (6, [0, 0, 0, 0, 3], "leave the 600 items"),  # 513, 767, 512
        (12, [255, 255], "do not rise"),  # one item twice
        (12, [9, 3], "do not rise"),
    ],
)
def test_damaged_positions_are_refused(at, values, words):
    message = sparse_message()
    message.body[at : at + len(values)] = torch.tensor(values, dtype=torch.uint8)
    base = random_items(torch.bfloat16, 600, 6)
    with pytest.raises(DeltaError, match=words):
        delta.apply(base, message)
    assert raw(base) == raw(random_items(torch.bfloat16, 600, 6))


@pytest.mark.parametrize(("byte", "bit"), [(0, 0), (12, 1), (12, 7)])  # an item more, and two behind the last one of 97
def test_a_damaged_bitmap_is_refused(byte, bit):
    previous = random_items(torch.float32, 97, 8)
    message = delta.encode(previous, flipped(previous, list(range(1, 80))))
    assert message.header.form is Form.BITMAP
    message.body[79 * 4 + byte] ^= 1 << bit
    base = previous.clone()
    with pytest.raises(DeltaError, match="does not mark 79 of 97 items"):
        delta.apply(base, message)
    assert raw(base) == raw(previous)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ((4, 600, 7), "600 items of 2 bytes, for a bucket of 600 of 4"),
        ((2, 601, 7), "600 items of 2 bytes, for a bucket of 601 of 2"),
        ((2, 600, None), "digest 7, but nothing to apply it to is held: a dense version has to come first"),
        ((2, 600, 8), "digest 7, but those with digest 8 are held"),
    ],
)
def test_a_delta_of_something_else_is_refused(expected, words):
    with pytest.raises(DeltaError, match=words):
        delta.read_header(sparse_message().header.to_tensor(torch.device("cpu")), *expected)


@pytest.mark.parametrize(
    ("form", "count", "words"),
    [
        (4, 3, "form 4"),
        (-1, 3, "form -1"),
        (1, 601, "601 of 600"),
        (1, -1, "-1 of 600"),
        (0, 1, "form 0 with 1"),
        (2, 590, "1255"),
    ],
)
def test_a_damaged_header_is_refused(form, count, words):
    fields = torch.tensor([form, 2, 600, count, 7]).view(torch.uint8)
    with pytest.raises(DeltaError, match=f"a damaged delta: .*{words}"):
        delta.read_header(fields, 2, 600, 7)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    message = sparse_message()
    with pytest.raises(DeltaError, match="600 items of 2 bytes, for 599 of 2"):
        delta.apply(random_items(torch.bfloat16, 599, 6), message)
    with pytest.raises(DeltaError, match="a sparse delta has 15 bytes, not 14"):
        delta.apply(random_items(torch.bfloat16, 600, 6), Message(message.header, message.body[:-1]))
    with pytest.raises(DeltaError, match="a delta's header has 40 bytes, not 39"):
        delta.read_header(message.header.to_tensor(torch.device("cpu"))[:-1], 2, 600, 7)
    with pytest.raises(ValueError, match="no delta of"):
        delta.encode(random_items(torch.bfloat16, 8, 1), random_items(torch.bfloat16, 9, 1))
    with pytest.raises(ValueError, match="a bucket is 1-D"):
        delta.encode(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="a bucket is 1-D"):
        delta.dense(torch.zeros(2, dtype=torch.complex128))


def test_a_dense_header_of_an_item_count_that_is_zero():
    message = delta.dense(torch.empty(0))
    assert message.header == Header(Form.DENSE, 4, 0, 0, 0)
    delta.apply(torch.empty(0), message)
