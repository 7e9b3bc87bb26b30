"""Arrow files that are checked and read in parts, so that who needs a few record batches reads those and the file's end.

What is announced, and stands in the name, is the checksum of the end of the file: of all that follows the last record batch,
the footer above all. In the footer lie the schema, the place of each record batch, and, as metadata of prl's, the checksums of
what comes before: of the head (everything before the first batch) and of each batch. So every byte is under a checksum, none is
parsed before its own was compared, and one number still names the whole file. Any Arrow tool opens it.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from prl.streams.files import Encoded, Pieces, ReadAt, StreamError, check_bytes, checksum_of
from prl.streams.guard import Block, GuardError, batches_in, check_batch, tail_bytes

CHECKSUMS = "prl.checksums"  # of the head and of each batch, one after another
_DIGITS = 16
_END_BYTES = 10  # these say how long the footer is
_HEAD_MAGIC = b"ARROW1\0\0"


@dataclass(frozen=True, slots=True)
class Part:
    """The head of a file, or a record batch."""

    at: int  # its first byte
    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Footer:
    """What a file's end says of it."""

    schema: pa.Schema
    head: Part
    batches: list[Part]


def encode_parts(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> Encoded:
    """A whole Arrow file, whose checksum is that of its end. The batches' memory becomes part of it and must not change any
    more."""
    first, tail = _write(schema, batches, {})  # to see the bytes that have to be known when the footer is written
    tail_at = first.size - len(tail)
    starts = {0, tail_at, *(block.at for block in batches_in(tail))}
    *checksums, _ = _checksums(first.pieces, starts)
    file, tail = _write(schema, batches, {CHECKSUMS: "".join(checksums)})
    return Encoded(file.pieces, file.size, checksum_of(tail))


def _write(schema: pa.Schema, batches: Sequence[pa.RecordBatch], metadata: dict[str, str]) -> tuple[Pieces, bytes]:
    """The file, and its end."""
    file, behind = Pieces(), 0  # the last batch
    with pa.ipc.new_file(pa.PythonFile(file, "w"), schema, metadata=metadata) as writer:
        for batch in batches:
            writer.write_batch(batch)
            behind = len(file.pieces)
    end = b"".join(file.pieces[behind:])
    return file, end[-tail_bytes(end) :]


def _checksums(pieces: Sequence[pa.Buffer | bytes], starts: Set[int]) -> Iterator[str]:
    """Of what lies between these bytes, at each of which a piece begins."""
    at, checksum = 0, xxhash.xxh3_64()
    for piece in pieces:
        if at in starts and at:
            yield checksum.hexdigest()
            checksum.reset()
        checksum.update(piece)
        at += len(piece)
    yield checksum.hexdigest()


def read_footer(where: object, read: ReadAt, size_bytes: int, checksum: str) -> Footer:
    """A file's footer. Raises StreamError where the end of the file is not what was announced, or no such footer is in it."""
    last = read(max(0, size_bytes - _END_BYTES), min(_END_BYTES, size_bytes))
    try:
        tail_size = tail_bytes(last)  # all that is believed before the checksum, and only as far as to read as much
        if tail_size > size_bytes:
            raise GuardError(f"its end would be {tail_size} bytes of {size_bytes}")
    except GuardError as error:
        raise StreamError(f"{where}: not a stream file of prl ({error})") from error
    tail_at = size_bytes - tail_size
    tail = check_bytes(read(tail_at, tail_size), tail_size, checksum, f"{where}, its end")
    try:
        blocks = batches_in(tail)
        reader = pa.ipc.open_file(pa.py_buffer(_HEAD_MAGIC + tail.to_pybytes()))  # which looks at nothing but the footer
        schema, checksums = reader.schema, (reader.metadata or {})[CHECKSUMS.encode()].decode()
        head, *batches = _parts(blocks, tail_at, checksums)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise StreamError(f"{where}: not a stream file of prl ({type(error).__name__}: {error})") from error
    return Footer(schema, head, batches)


def _parts(blocks: Sequence[Block], tail_at: int, checksums: str) -> Iterator[Part]:
    """The head and the batches, which have to follow each other without a gap up to the end. Raises GuardError."""
    if len(checksums) != _DIGITS * (len(blocks) + 1):
        raise GuardError(f"{len(checksums)} digits of checksums for {len(blocks)} record batches")
    head_bytes = blocks[0].at if blocks else tail_at
    at = 0
    for number, block in enumerate([Block(0, head_bytes), *blocks]):
        if block.at != at or block.bytes <= 0:
            raise GuardError(f"a record batch at byte {block.at} of {block.bytes} bytes, expected at byte {at}")
        yield Part(at, block.bytes, checksums[_DIGITS * number : _DIGITS * (number + 1)])
        at += block.bytes
    if at != tail_at:
        raise GuardError(f"record batches up to byte {at}, its end begins at byte {tail_at}")


def read_part(where: object, read: ReadAt, part: Part) -> pa.Buffer:
    """The bytes of a part. Raises StreamError where they are not what the footer says."""
    return check_bytes(read(part.at, part.bytes), part.bytes, part.checksum, where)


def read_batch(where: object, read: ReadAt, part: Part, schema: pa.Schema) -> pa.RecordBatch:
    """A record batch; its columns are views of the bytes read. Raises StreamError."""
    data = read_part(where, read, part)
    try:
        check_batch(data)
        batch = pa.ipc.read_record_batch(data, schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StreamError(f"{where}: no record batch of prl ({type(error).__name__}: {error})") from error
    return batch
