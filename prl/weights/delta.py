"""The difference between two states of a bucket of weights, in the smallest of four forms.

Few values change in a step of a small learning rate, so a bucket goes as those that did and where they lie. Values are
absolute: a message that is applied twice does no harm. Bits are compared, not numbers, so that NaN and -0.0 count as what they
are.

A message is a header and a body. Of n items of w bytes, c of which differ, the body has

    empty    0                            c = 0
    sparse   c * w + 2 * ceil(n / 256) + c     the values; how many lie in each block of 256 items; where in their block
    bitmap   c * w + ceil(n / 8)               the values; a bit an item (item k: bit k % 8 of byte k // 8)
    dense    n * w                             all items

bytes, and the smallest is taken: of bfloat16 sparse until 11.7 per cent of the items differ, bitmap until 93.7, dense above. At
2 per cent that is 3.4 per cent of the dense bytes. No body is larger than the dense one; the header has `HEADER_BYTES`.

What a message says of positions and counts is checked before anything is written, so that a damaged one changes nothing and
reaches no memory outside of the bucket. That the values are right is shown by the version's digest.

All of it is torch on the tensors' own device, and little-endian. Besides the body encoding takes about 2 bytes an item and 8 an
item that differs; applying 3 an item of a bitmap (11 on a GPU) and 17 an item that a sparse body names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

BLOCK = 256  # items whose positions fit a byte
_FIELDS = 5
HEADER_BYTES = 8 * _FIELDS
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: their bits in the highest byte, the first one lowest
_SPREAD = 0x0101010101010101  # times a byte: that byte eight times
_EACH = 0x8040201008040201 - 2**64  # of byte k of those bit k; as a signed number
_PAIRS = 0x00FF00FF00FF00FF
_QUARTERS = 0x0001000100010001


class DeltaError(ValueError):
    """A message that does not fit what it is to be applied to, or is damaged; nothing was changed."""


class Form(IntEnum):
    EMPTY = 0
    SPARSE = 1
    BITMAP = 2
    DENSE = 3


def body_bytes(form: Form, item_bytes: int, length: int, count: int) -> int:
    """The formulas above."""
    match form:
        case Form.EMPTY:
            return 0
        case Form.SPARSE:
            return count * item_bytes + 2 * _ceil(length, BLOCK) + count
        case Form.BITMAP:
            return count * item_bytes + _ceil(length, 8)
        case Form.DENSE:
            return length * item_bytes


@dataclass(frozen=True, slots=True)
class Header:
    form: Form
    item_bytes: int
    length: int  # items of the bucket
    count: int  # items that differ from the base; where there is no base, all
    base: int  # what the state before is known by, in [0, 2**64): the digest of its version or leg. Of a dense one 0

    @property
    def body_bytes(self) -> int:
        return body_bytes(self.form, self.item_bytes, self.length, self.count)

    def to_tensor(self, device: torch.device) -> Tensor:
        """The form on the wire: HEADER_BYTES of uint8."""
        base = self.base - 2**64 if self.base >= 2**63 else self.base
        fields = torch.tensor([self.form, self.item_bytes, self.length, self.count, base], dtype=torch.int64)
        return fields.view(torch.uint8).to(device)


@dataclass(frozen=True, slots=True)
class Message:
    header: Header
    body: Tensor  # uint8, 1-D

    def parts(self) -> list[Tensor]:
        """What goes over the wire, one after the other."""
        return [self.header.to_tensor(self.body.device), *([self.body] if self.header.body_bytes else [])]


class Outgoing:
    """A version that a sender tells a bucket after the other, in the same order each time, and keeps."""

    def __init__(self, before: Sequence[Tensor] | None, base: int = 0) -> None:
        """`before`: the buckets of the version that is known by `base`, as its own Outgoing kept them; they are used up. None:
        all is sent."""
        self.buckets: list[Tensor] = []  # copies of what has been told
        self._before = before
        self._base = base
        self._changed = self._items = 0

    @property
    def changed_share(self) -> float | None:
        """Of all items so far; None where all was sent."""
        return self._changed / self._items if self._before is not None and self._items else None

    def message(self, packed: Tensor, item_bytes: int) -> Message:
        """Of the next bucket: its bytes, which may change again only when the message is sent."""
        items = items_of(packed, item_bytes)
        if self._before is None:
            message, copy = dense(items), packed.clone()
        else:
            previous = self._before[len(self.buckets)]
            message = encode(items_of(previous, item_bytes), items, self._base)
            copy = previous.copy_(packed)
        self.buckets.append(copy)
        self._changed += message.header.count
        self._items += message.header.length
        return message


def encode(previous: Tensor, current: Tensor, base: int = 0) -> Message:
    """How to make `current` of `previous`, which is known by `base`: both 1-D, of one dtype with items of 1, 2, 4 or 8 bytes.
    The body of a dense message is `current` itself, not a copy."""
    before, now = _items(previous), _items(current)
    if before.shape != now.shape or before.dtype != now.dtype:
        raise ValueError(f"no delta of {tuple(now.shape)} {now.dtype} to {tuple(before.shape)} {before.dtype}")
    length, item_bytes = now.numel(), now.element_size()
    changed = torch.zeros(_ceil(length, BLOCK) * BLOCK, dtype=torch.bool, device=now.device)
    torch.ne(before, now, out=changed[:length])
    counts = _block_counts(changed)
    count = int(counts.sum())
    forms = (Form.DENSE, Form.SPARSE, Form.BITMAP) if count else (Form.EMPTY,)
    form = min(forms, key=lambda one: body_bytes(one, item_bytes, length, count))
    header = Header(form, item_bytes, length, count, 0 if form is Form.DENSE else base)
    if form is Form.EMPTY:
        return Message(header, torch.empty(0, dtype=torch.uint8, device=now.device))
    if form is Form.DENSE:
        return Message(header, now.view(torch.uint8))
    positions = changed.nonzero().view(-1)
    values = now.index_select(0, positions).view(torch.uint8)
    if form is Form.SPARSE:
        where = [counts.to(torch.int16).view(torch.uint8), positions.to(torch.uint8)]  # the lowest byte: position % 256
    else:
        packed = (changed.view(torch.int64) * _GATHER) >> 56
        where = [packed.to(torch.uint8)[: _ceil(length, 8)]]
    return Message(header, torch.cat([values, *where]))


def dense(current: Tensor) -> Message:
    """All of it, for whoever holds nothing. The body is `current` itself, not a copy."""
    items = _items(current)
    header = Header(Form.DENSE, items.element_size(), items.numel(), items.numel(), 0)
    return Message(header, items.view(torch.uint8))


def read_header(fields: Tensor, item_bytes: int, length: int, base: int | None) -> Header:
    """The header of a message for a bucket of `length` items of `item_bytes` bytes whose state is known by `base` (None: there
    is none). Its body is at most as large as the bucket. Raises DeltaError where it is damaged or meant for something else."""
    if fields.dtype != torch.uint8 or fields.numel() != HEADER_BYTES:
        raise DeltaError(f"a delta's header has {HEADER_BYTES} bytes, not {fields.numel()} of {fields.dtype}")
    form, said_bytes, said_length, count, said_base = fields.cpu().view(torch.int64).tolist()
    said_base %= 2**64
    if (said_bytes, said_length) != (item_bytes, length):
        raise DeltaError(f"a delta of {said_length} items of {said_bytes} bytes, for a bucket of {length} of {item_bytes}")
    if form not in tuple(Form) or not 0 <= count <= length or (form == Form.EMPTY and count):
        raise DeltaError(f"a damaged delta: form {form} with {count} of {length} items")
    header = Header(Form(form), item_bytes, length, count, said_base)
    if header.body_bytes > length * item_bytes:
        raise DeltaError(f"a damaged delta: {header.body_bytes} bytes for a bucket of {length * item_bytes}")
    if header.form is not Form.DENSE and header.base != base:
        held = "nothing to apply it to is held" if base is None else f"those with digest {base} are held"
        raise DeltaError(f"a delta to the weights with digest {header.base}, but {held}: a dense version has to come first")
    return header


def apply(base: Tensor, message: Message) -> None:
    """Turn `base` into what was encoded, in place: 1-D, with the header's items. Raises DeltaError where the message does not
    fit or is damaged; `base` is then as it was."""
    header, body = message.header, message.body
    items = _items(base)
    if (items.numel(), items.element_size()) != (header.length, header.item_bytes):
        raise DeltaError(
            f"a delta of {header.length} items of {header.item_bytes} bytes, for {items.numel()} of {items.element_size()}"
        )
    if body.dtype != torch.uint8 or body.numel() != header.body_bytes:
        raise DeltaError(
            f"a {header.form.name.lower()} delta has {header.body_bytes} bytes, not {body.numel()} of {body.dtype}"
        )
    values_end = header.count * header.item_bytes
    match header.form:
        case Form.EMPTY:
            pass
        case Form.DENSE:
            items.copy_(body.view(items.dtype))
        case Form.SPARSE:
            positions = _positions(header, body[values_end:])
            items.scatter_(0, positions, body[:values_end].view(items.dtype))
        case Form.BITMAP:
            mask = _mask(header, body[values_end:])
            items.masked_scatter_(mask, body[:values_end].view(items.dtype))


def _positions(header: Header, where: Tensor) -> Tensor:
    blocks = _ceil(header.length, BLOCK)
    counts = where[: 2 * blocks].clone().view(torch.int16).to(torch.int64)  # a copy, for they may lie at an odd address
    if bool(((counts < 0) | (counts > BLOCK)).any()) or int(counts.sum()) != header.count:
        raise DeltaError(f"a damaged delta: its blocks do not have {header.count} items together")
    starts = torch.arange(0, blocks * BLOCK, BLOCK, device=where.device)
    positions = torch.repeat_interleave(starts, counts, output_size=header.count) + where[2 * blocks :]
    if bool((positions[1:] <= positions[:-1]).any()) or (header.count and int(positions[-1]) >= header.length):
        raise DeltaError(f"a damaged delta: its positions do not rise, or leave the {header.length} items of the bucket")
    return positions


def _mask(header: Header, bits: Tensor) -> Tensor:
    mask = ((bits.to(torch.int64) * _SPREAD) & _EACH).view(torch.uint8).ne(0)
    if int(mask.count_nonzero()) != header.count or bool(mask[header.length :].any()):
        raise DeltaError(f"a damaged delta: its bitmap does not mark {header.count} of {header.length} items")
    return mask[: header.length]


def _block_counts(changed: Tensor) -> Tensor:
    """Of each block of 256 bools how many are true, as int64: eight sums at a time, one in each byte of a number, and these
    added up in lanes of two bytes, which hold 256."""
    sums = changed.view(torch.int64).view(changed.numel() // BLOCK, BLOCK // 8).sum(1)
    lanes = (sums & _PAIRS) + ((sums >> 8) & _PAIRS)
    return ((lanes * _QUARTERS) >> 48) & 0xFFFF


def items_of(packed: Tensor, item_bytes: int) -> Tensor:
    """Bytes as items; they must begin at a multiple of these."""
    return packed.view(_BITS[item_bytes])


def _items(tensor: Tensor) -> Tensor:
    """Its bits as whole numbers."""
    if tensor.dim() != 1 or tensor.element_size() not in _BITS:
        raise ValueError(f"a bucket is 1-D with items of 1, 2, 4 or 8 bytes, not {tuple(tensor.shape)} of {tensor.dtype}")
    return tensor.detach().view(_BITS[tensor.element_size()])


def _ceil(one: int, other: int) -> int:
    return -(-one // other)
