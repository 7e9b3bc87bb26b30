"""A look at the frame of Arrow data before Arrow reads it, which bounds what reading can take.

Three things in valid Arrow make a reader take more memory than the data is long: compressed buffers, whose size after
decompression is whatever a header says, dictionaries that are sent in pieces or again and again, and footers that name one
batch many times. prl writes none of them, so all are refused, by the few fields of Arrow's flatbuffers that say so. All else in
the data is checked by Arrow itself.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

_MAGIC = b"ARROW1"
_CONTINUES = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages
_MAX_DICTIONARIES = 32  # more than any schema of prl has columns
_FRAME_BYTES = 10  # behind the footer: its length, and the name of the format
_MARK_BYTES = 8  # before it: no more messages


class GuardError(ValueError):
    """What prl does not write."""


class Block(NamedTuple):
    """Where a message lies in a file, as its footer says."""

    at: int  # its first byte
    bytes: int


def check_file(data: pa.Buffer) -> None:
    """Raises GuardError (a ValueError) for an Arrow file with such messages, or one whose frame makes no sense."""
    view = memoryview(data)
    if len(view) < 24 or bytes(view[:6]) != _MAGIC:
        raise GuardError("no Arrow file")
    try:
        dictionaries, batches = _blocks(view)
        if len(dictionaries) > _MAX_DICTIONARIES:
            raise GuardError(f"{len(dictionaries)} dictionaries")
        _check_messages(view, dictionaries, _DICTIONARY)
        _check_messages(view, batches, _BATCH)
    except struct.error as error:
        raise GuardError(f"an offset leads out of the data ({error})") from error


def tail_bytes(data: pa.Buffer | bytes) -> int:
    """How long the end of an Arrow file is: the mark that ends its messages, the footer and what frames it. Nothing is looked
    at but the last bytes of `data`, which ends where the file does. Raises GuardError."""
    view = memoryview(data)
    if len(view) < _FRAME_BYTES or bytes(view[-6:]) != _MAGIC:
        raise GuardError("no Arrow file")
    (footer_bytes,) = struct.unpack_from("<i", view, len(view) - _FRAME_BYTES)
    if footer_bytes <= 0:
        raise GuardError(f"a footer of {footer_bytes} bytes")
    return int(_MARK_BYTES + footer_bytes + _FRAME_BYTES)


def batches_in(tail: pa.Buffer | bytes) -> list[Block]:
    """Where the record batches lie, from the end (see `tail_bytes`) of a file without dictionaries. Raises GuardError."""
    try:
        dictionaries, batches = _blocks(memoryview(tail))
    except struct.error as error:
        raise GuardError(f"an offset leads out of the footer ({error})") from error
    if dictionaries:
        raise GuardError(f"{len(dictionaries)} dictionaries")
    return batches


def check_batch(data: pa.Buffer) -> None:
    """Raises GuardError for anything but one record batch's message."""
    view = memoryview(data)
    try:
        end = _check_message(view, 0, _BATCH)
    except struct.error as error:
        raise GuardError(f"an offset leads out of the message ({error})") from error
    if end != len(view):
        raise GuardError(f"a message of {end} bytes in {len(view)}")


def check_stream(data: bytes) -> None:
    """The same for an Arrow stream of one record batch."""
    view = memoryview(data)
    at = dictionaries = 0
    try:
        at = _check_message(view, at, _SCHEMA)
        while _kind(view, at) == _DICTIONARY:
            at = _check_message(view, at, _DICTIONARY)
            dictionaries += 1
            if dictionaries > _MAX_DICTIONARIES:
                raise GuardError("too many dictionaries")
        at = _check_message(view, at, _BATCH)
    except struct.error as error:
        raise GuardError(f"an offset leads out of the data ({error})") from error
    if bytes(view[at:]) != struct.pack("<II", _CONTINUES, 0):
        raise GuardError("more than one record batch")


def _kind(view: memoryview, at: int) -> int:
    message, _ = _message(view, at)
    return _byte(message, _field(message, _root(message), 1))


def _check_messages(view: memoryview, blocks: Iterable[Block], kind: int) -> None:
    """Each message lies behind the one before: none is read twice."""
    end = 0
    for at, _ in blocks:
        if at < end:
            raise GuardError(f"the message at byte {at} begins before the end of another")
        end = _check_message(view, at, kind)


def _check_message(view: memoryview, at: int, kind: int) -> int:
    """Looks at the message at `at`; where the next one begins."""
    message, body_at = _message(view, at)
    table = _root(message)
    if _byte(message, _field(message, table, 1)) != kind:
        raise GuardError(f"the message at byte {at} is of another kind than {kind}")
    body = _field(message, table, 3)
    (body_bytes,) = struct.unpack_from("<q", message, body) if body else (0,)
    if not 0 <= body_bytes <= len(view) - body_at:
        raise GuardError(f"the message at byte {at} is {body_bytes} bytes long")
    header = _follow(message, _field(message, table, 2))
    if kind == _DICTIONARY:
        if _byte(message, _field(message, header, 2)):
            raise GuardError("a dictionary in pieces")
        header = _follow(message, _field(message, header, 1))
    if kind != _SCHEMA and _field(message, header, 3):
        raise GuardError("compressed buffers")
    return body_at + int(body_bytes)


def _message(view: memoryview, at: int) -> tuple[memoryview, int]:
    """The flatbuffer of the message at `at`, and where its body begins."""
    if at < 0:
        raise GuardError(f"a message at byte {at}")
    mark, size = struct.unpack_from("<Ii", view, at)
    if mark != _CONTINUES or not 0 < size <= len(view) - at - 8:
        raise GuardError(f"no message at byte {at}")
    return view[at + 8 : at + 8 + size], at + 8 + size


def _blocks(view: memoryview) -> tuple[list[Block], list[Block]]:
    """Dictionaries and record batches, from the footer at the end of the data."""
    size = tail_bytes(view)
    if size > len(view):
        raise GuardError(f"a footer of {size - _MARK_BYTES - _FRAME_BYTES} bytes")
    footer = view[len(view) - size + _MARK_BYTES : len(view) - _FRAME_BYTES]
    table = _root(footer)
    return list(_vector(footer, _field(footer, table, 2))), list(_vector(footer, _field(footer, table, 3)))


def _vector(footer: memoryview, vector: int) -> Iterator[Block]:
    """Its Blocks, of 24 bytes each: first byte, bytes of the flatbuffer, of the body."""
    if vector:
        start = _follow(footer, vector)
        (count,) = struct.unpack_from("<I", footer, start)
        if count > len(footer) // 24:
            raise GuardError(f"{count} blocks")
        for number in range(count):
            at, header_bytes, body_bytes = struct.unpack_from("<qi4xq", footer, start + 4 + 24 * number)
            yield Block(at, header_bytes + body_bytes)


# Flatbuffers: a table begins with the distance back to its vtable, which holds each field's place in the table, 0 for none.


def _root(view: memoryview) -> int:
    return _follow(view, 0)


def _follow(view: memoryview, at: int) -> int:
    (distance,) = struct.unpack_from("<I", view, at)
    return int(at + distance)


def _field(view: memoryview, table: int, number: int) -> int:
    """Where a field lies; 0: it is not there."""
    (back,) = struct.unpack_from("<i", view, table)
    vtable = table - back
    if vtable < 0:
        raise GuardError("an offset leads out of the data")
    (size,) = struct.unpack_from("<H", view, vtable)
    if 4 + 2 * number >= size:
        return 0
    (place,) = struct.unpack_from("<H", view, vtable + 4 + 2 * number)
    return int(table + place) if place else 0


def _byte(view: memoryview, at: int) -> int:
    return int(view[at]) if at and at < len(view) else 0
