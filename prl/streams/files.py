"""What all stream files have in common: names that say what is inside, headers, and reading that trusts nothing unchecked.

A file is named `<stem>_a<attempt>_<sequence>_<bytes>_<xxh3>.arrow`. With size and checksum in the name, a file found by
listing is checked like an announced one, and the file itself stays plain Arrow, which any tool opens. The checksum is of all
bytes, or, where a file is read in parts, of its end, which has those of all the rest (`parts.py`). The header (metadata of
the Arrow schema) says kind, schema version, run, attempt, writer and sequence. Sequence numbers rise over all restarts of a
writer: order goes by them, never by times of the filesystem.
"""

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from prl.config.plain_files import NotPlainError, open_plain
from prl.runfolder.publish import publish
from prl.streams.guard import check_file
from prl.streams.routings import ROUTINGS

SCHEMA_VERSION = 1
FILE_NAME = re.compile(  # digits bounded so that the numbers fit where numbers are kept
    r"(?P<stem>[a-z]+(?:_[0-9]{1,15})?)_a(?P<attempt>[0-9]{1,9})_(?P<sequence>[0-9]{1,15})_(?P<bytes>[0-9]{1,15})"
    r"_(?P<checksum>[0-9a-f]{16})\.arrow"
)
_SEQUENCES = 10**15
_LATE_S = 1.0  # for which a name may be missing without a word
_NOT_YET_VISIBLE = (errno.ENOENT, errno.ESTALE)
T = TypeVar("T")
ReadAt = Callable[[int, int], pa.Buffer]  # from which byte on, and how many; raises StreamError where there are fewer
_UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENOTDIR)  # that file, and not for want of something here
log = logging.getLogger(__name__)


class StreamError(Exception):
    """A file is not what it was announced as, or holds what the schema forbids. It is of no use to anyone."""


class UnreadableError(StreamError):
    """A file cannot be read here and now: a disk fails, or its name does not show."""


@dataclass(frozen=True, slots=True)
class StreamFile:
    """A durable stream file."""

    path: Path
    bytes: int
    checksum: str  # xxh3 in 16 hexadecimal digits, of all its bytes (of a step file: of its end, see `parts.py`)
    attempt: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Header:
    kind: str  # "rollouts" or "step"
    run: str
    attempt: int
    writer: str
    sequence: int

    def metadata(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            "prl.kind": self.kind,
            "prl.schema_version": str(SCHEMA_VERSION),
            "prl.run": self.run,
            "prl.attempt": str(self.attempt),
            "prl.writer": self.writer,
            "prl.sequence": str(self.sequence),
            **(more or {}),
        }


@dataclass(frozen=True, slots=True)
class ArrowFile:
    """A stream file in memory."""

    header: Header
    metadata: Mapping[bytes, bytes]  # the header's, and what more there is
    batches: list[pa.RecordBatch]  # views of its bytes


@dataclass(frozen=True, slots=True)
class Encoded:
    """A whole Arrow file before it lies anywhere."""

    pieces: list[pa.Buffer | bytes]  # one after another; columns are where they were, since copying them together would cost
    size: int  # bytes
    checksum: str  # as of `StreamFile`

    def whole(self) -> bytes:
        """In one piece."""
        return b"".join(self.pieces)


class Pieces:
    """A file for Arrow to write, which keeps what it is given as it is."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[pa.Buffer | bytes] = []
        self.size = 0

    def write(self, piece: pa.Buffer | bytes) -> None:
        self.pieces.append(piece)
        self.size += len(piece)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None: ...

    def close(self) -> None: ...


def encode_file(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> Encoded:
    """A whole Arrow file. The batches' memory becomes part of it and must not change any more."""
    file = Pieces()
    with pa.ipc.new_file(pa.PythonFile(file, "w"), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    checksum = xxhash.xxh3_64()
    for piece in file.pieces:
        checksum.update(piece)
    return Encoded(file.pieces, file.size, checksum.hexdigest())


def publish_arrow(folder: Path, stem: str, header: Header, data: Encoded, descriptor: int | None = None) -> StreamFile:
    """Make an Arrow file durable under its final name; see `publish`, also for the folder's `descriptor`. Raises OSError."""
    path = folder / f"{stem}_a{header.attempt:03d}_{header.sequence:08d}_{data.size}_{data.checksum}.arrow"
    publish(path, data.pieces, descriptor)
    return StreamFile(path, data.size, data.checksum, header.attempt, header.sequence)


def list_published(folder: Path) -> list[tuple[str, StreamFile]]:
    """(stem, file) of every finished stream file in a folder, by attempt and sequence, from one listing. Other names are
    passed over; a folder that is not there is empty."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        match = FILE_NAME.fullmatch(name)
        if match:
            file = StreamFile(
                folder / name, int(match["bytes"]), match["checksum"], int(match["attempt"]), int(match["sequence"])
            )
            found.append((match["stem"], file))
    return sorted(found, key=lambda f: (f[1].attempt, f[1].sequence))


def next_sequence(folder: Path) -> int:
    """The number after the highest one in use: a writer that starts again asks once. Raises StreamError where a foreign name
    has the last number there is."""
    following = max((file.sequence for _, file in list_published(folder)), default=-1) + 1
    if following == _SEQUENCES:
        raise StreamError(f"{folder}: a file there has the number {following - 1}, which nothing can follow: move it away")
    return following


def checksum_of(data: pa.Buffer | bytes) -> str:
    """xxh3 in 64 bits, which costs a sixth of zlib's crc32."""
    return xxhash.xxh3_64_hexdigest(data)


def read_checked(
    path: Path,
    size_bytes: int,
    checksum: str,
    *,
    wait_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> pa.Buffer:
    """The bytes of a published file, once size and checksum are right. See `read_published`."""

    def whole(read: ReadAt) -> pa.Buffer:
        return check_bytes(read(0, size_bytes), size_bytes, checksum, path)

    return read_published(path, size_bytes, whole, wait_s=wait_s, clock=clock, sleep=sleep)


def read_published(
    path: Path,
    size_bytes: int,
    make: Callable[[ReadAt], T],
    *,
    wait_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `make` makes of a published file, once its size is right. On a shared filesystem a new name may show late on other
    nodes: for up to `wait_s` it is polled, each time by one listing of its parent (which refreshes what the node believes) and
    one opening; a wait worth a word is logged. Raises StreamError, also where the disk fails; other OSErrors as they are."""
    began, told = clock(), False
    while True:
        try:
            with _open_published(path, size_bytes) as file:
                if told:
                    log.warning("%s: there after %.1f s", path, clock() - began)
                return make(partial(_read_at, path, file.fileno()))
        except OSError as error:
            if error.errno in _UNREADABLE:
                raise UnreadableError(f"{path}: cannot be read ({error.strerror})") from error
            if error.errno not in _NOT_YET_VISIBLE:
                raise
            waited_s = clock() - began
            if waited_s >= wait_s:
                raise UnreadableError(
                    f"{path}: not there after waiting {waited_s:.1f} s for it, the deadline is {wait_s:g} s "
                    f"({error.strerror}); look whether this node sees {path.parent} as the one that wrote it does"
                ) from error
            if waited_s >= _LATE_S and not told:
                log.warning("%s: announced, and not there after %.1f s; waited for up to %g s", path, waited_s, wait_s)
                told = True
        sleep(random.uniform(0.05, 0.15))  # noqa: S311  (so that the nodes do not ask in step)
        try:
            os.listdir(path.parent)
        except OSError as error:
            if error.errno not in _NOT_YET_VISIBLE:
                raise


def _open_published(path: Path, size_bytes: int) -> BinaryIO:
    try:
        file = open_plain(path, os.O_NOFOLLOW)
    except NotPlainError as error:
        raise StreamError(str(error)) from error
    size = file.seek(0, os.SEEK_END)
    if size != size_bytes:
        file.close()
        raise StreamError(f"{path}: {size} bytes, announced were {size_bytes}: torn or not the file announced")
    return file


def _read_at(path: Path, descriptor: int, at: int, size_bytes: int) -> pa.Buffer:
    data = pa.allocate_buffer(size_bytes)  # Arrow's memory is used again, which costs less than new
    rest = memoryview(data).cast("B")
    while rest and (count := os.preadv(descriptor, [rest], at + size_bytes - len(rest))):
        rest = rest[count:]
    if rest:
        raise StreamError(f"{path}: ends at byte {at + size_bytes - len(rest)}, before what was announced: torn")
    return data


def check_bytes(data: pa.Buffer | bytes, size_bytes: int, checksum: str, where: object) -> pa.Buffer:
    """The bytes, where they are those announced. Raises StreamError."""
    if len(data) != size_bytes:
        raise StreamError(f"{where}: {len(data)} bytes read, announced were {size_bytes}: torn")
    if checksum_of(data) != checksum:
        raise StreamError(f"{where}: checksum {checksum_of(data)}, announced was {checksum}: damaged or not what was announced")
    return pa.py_buffer(data)


def check_tokens(where: object, tokens: npt.NDArray[np.int32], vocabulary: int | None) -> None:
    """Raises StreamError where a token is none of the model's: tensor-parallel ranks would take zeros for its embedding without
    a word, a single one would fail somewhere in the model. `vocabulary`: how many tokens the model knows; None: not asked."""
    if vocabulary is not None and len(tokens) and tokens.max() >= vocabulary:
        raise StreamError(f"{where}: holds the token {tokens.max()}, the model's are 0 to {vocabulary - 1}")


def open_arrow(where: object, data: pa.Buffer, kind: str, schema: pa.Schema, run: str | None) -> ArrowFile:
    """What is in checked bytes. Raises StreamError where they are of another kind, schema version, schema or (if `run` is
    given) run, or not valid Arrow. Whatever the bytes are, no more memory is taken than they are long."""
    try:
        check_file(data)
        reader = pa.ipc.open_file(data)
        header = check_schema(where, reader.schema, kind, schema, run)
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=True)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise StreamError(f"{where}: not a stream file of prl ({type(error).__name__}: {error})") from error
    return ArrowFile(header, reader.schema.metadata, batches)


def check_schema(where: object, found: pa.Schema, kind: str, schema: pa.Schema, run: str | None) -> Header:
    """The header of a file of this kind and schema. Raises StreamError as `open_arrow` does, KeyError and ValueError where it
    has none."""
    header = _header(found)
    if header.kind != kind:
        raise StreamError(f"{where}: holds {header.kind!r}, wanted {kind!r}")
    if found.metadata[b"prl.schema_version"] != str(SCHEMA_VERSION).encode():
        version = found.metadata[b"prl.schema_version"].decode()
        raise StreamError(
            f"{where}: schema version {version}, this program reads {SCHEMA_VERSION}: use the program that wrote it"
        )
    if not found.equals(schema) and not found.equals(schema.append(ROUTINGS)):
        raise StreamError(f"{where}: its columns are not those of schema version {SCHEMA_VERSION}")
    if run is not None and header.run != run:
        raise StreamError(f"{where}: of run {header.run!r}, this is run {run!r}")
    return header


def _header(schema: pa.Schema) -> Header:
    metadata = schema.metadata or {}
    text = {name: metadata[f"prl.{name}".encode()].decode() for name in ("kind", "run", "attempt", "writer", "sequence")}
    return Header(text["kind"], text["run"], int(text["attempt"]), text["writer"], int(text["sequence"]))
