"""The ledger: every event of every rollout id, durable before anyone is answered, never reclaimed.

An append-only file, each append one frame: magic, length and crc32, then a complete Arrow stream with one record batch. An
append costs one fsync, where a file an append would cost three metadata operations and leave thousands of names. Only the
orchestrator writes, one file for each of its starts, and it never continues a file that another start has left. So whatever a
kill leaves behind is a torn last frame, which was never acknowledged: readers drop it. A bad frame with others behind it is
damage, and an error.
"""

import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, get_args

import numpy as np
import pyarrow as pa

from prl.config.plain_files import NotPlainError, read_plain
from prl.flow.events import EventKind, LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.runfolder.publish import storage, sync_folder, write_all
from prl.streams.arrays import DICTIONARY, dictionary_array, has_nulls, strings
from prl.streams.files import StreamError
from prl.streams.guard import check_stream

SCHEMA = pa.schema(
    [
        ("epoch", pa.int32()),
        ("problem_id", DICTIONARY),
        ("group_id", pa.int64()),
        ("rollout", pa.int32()),
        ("issue", pa.int32()),
        ("event", DICTIONARY),
        ("version_lineage", pa.int32()),
        ("version_step", pa.int64()),
        ("step", pa.int64()),
        ("reason", DICTIONARY),
    ]
)
_FRAME = struct.Struct("<4sIII")  # magic, bytes of the payload, its crc32, crc32 of the three before
_MAGIC = b"PRLL"
_ROWS_AT_ONCE = 65536
_KINDS = frozenset(get_args(EventKind))
log = logging.getLogger(__name__)


class LedgerWriter:
    """The ledger of one attempt. One writer at a time; `append` is not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = max((int(p.stem.removeprefix("ledger_")) for p in _files(folder)), default=-1) + 1
        self.path = folder / f"ledger_{number:04d}.frames"
        with storage(self.path):
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            sync_folder(folder)
        self._broken: OSError | None = None

    def append(self, events: Sequence[LedgerEvent]) -> None:
        """Returns once the events are durable. After an OSError nothing more can be appended: the file's end is unknown."""
        if self._broken is not None:
            raise StreamError(
                f"{self.path}: an earlier append failed ({self._broken}); nothing may follow it"
            ) from self._broken
        if not events:
            return
        payload = _encode(events)
        head = struct.pack("<4sII", _MAGIC, len(payload), zlib.crc32(payload))
        try:
            with storage(self.path):
                write_all(self._file, head + struct.pack("<I", zlib.crc32(head)) + payload)
                os.fdatasync(self._file)
        except OSError as error:
            self._broken = error
            raise

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "LedgerWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_ledger(folder: Path) -> pa.Table:
    """All events in the order in which they were recorded: of one attempt's folder, or of all attempts in the folder above.
    Raises StreamError for damage before the last frame of a file; a torn last frame is logged and left out."""
    tables = [table for path in _files(folder) for table in _read(path)]
    return pa.concat_tables([SCHEMA.empty_table(), *tables]).unify_dictionaries()


def ledger_events(table: pa.Table) -> Iterator[LedgerEvent]:
    """The rows as events."""
    column = {name: table.column(name).combine_chunks() for name in SCHEMA.names}
    text = {name: strings(values) for name, values in column.items() if values.type == DICTIONARY}
    for start in range(0, len(table), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        rows = (text[n][start:end] if n in text else v[start:end].to_numpy().tolist() for n, v in column.items())
        for row in zip(*rows, strict=True):
            epoch, problem, group, rollout, issue, kind, lineage, version_step, step, reason = row
            if kind not in _KINDS:
                raise StreamError(f"the ledger speaks of {kind!r}, which is no event")
            rollout_id = RolloutId(epoch, problem, group, rollout, issue)
            yield LedgerEvent(rollout_id, cast("EventKind", kind), Version(lineage, version_step), step, reason)


def _files(folder: Path) -> list[Path]:
    """Raises OSError where a folder may not be read (`Path.rglob` takes it for empty)."""

    def tell(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    found = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=tell) for name in names]
    return sorted(p for p in found if re.fullmatch(r"ledger_\d+\.frames", p.name))


def _encode(events: Sequence[LedgerEvent]) -> pa.Buffer:
    count = len(events)
    ids = [e.rollout for e in events]
    columns = [
        pa.array(np.fromiter((i.epoch for i in ids), np.int32, count)),
        dictionary_array([i.problem for i in ids]),
        pa.array(np.fromiter((i.group for i in ids), np.int64, count)),
        pa.array(np.fromiter((i.rollout for i in ids), np.int32, count)),
        pa.array(np.fromiter((i.issue for i in ids), np.int32, count)),
        dictionary_array([e.kind for e in events]),
        pa.array(np.fromiter((e.version.lineage for e in events), np.int32, count)),
        pa.array(np.fromiter((e.version.step for e in events), np.int64, count)),
        pa.array(np.fromiter((e.step for e in events), np.int64, count)),
        dictionary_array([e.reason for e in events]),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    return sink.getvalue()


def _read(path: Path) -> Iterator[pa.Table]:
    try:
        data = read_plain(path)
    except NotPlainError as error:
        raise StreamError(f"{error}: restore the file") from error
    at = 0
    while at < len(data):
        payload = _frame(data, at)
        if payload is None:
            if data.find(_MAGIC, at + 1) >= 0 and _frames_follow(data, at + 1):
                raise StreamError(
                    f"{path}: damaged at byte {at}, with whole frames behind it: restore the file, it cannot be repaired"
                )
            log.warning("%s: the last %d bytes are a torn append, never acknowledged: left out", path, len(data) - at)
            return
        yield decode(payload, f"{path}, the entry at byte {at}")
        at += _FRAME.size + len(payload)


def decode(payload: bytes, where: str) -> pa.Table:
    """The events of one append. Raises StreamError where the bytes are nothing that an append wrote."""
    try:
        check_stream(payload)
        reader = pa.ipc.open_stream(payload)
        if not reader.schema.equals(SCHEMA):
            raise StreamError(f"{where}: of another schema")
        table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StreamError(f"{where}: no events ({type(error).__name__}: {error})") from error
    if any(has_nulls(chunk) for column in table.columns for chunk in column.chunks):
        raise StreamError(f"{where}: values are missing")
    return table


def _frame(data: bytes, at: int) -> bytes | None:
    """The payload of the frame that begins at `at`; None where there is no whole and sound one."""
    if at + _FRAME.size > len(data):
        return None
    magic, size, checksum, head_checksum = _FRAME.unpack_from(data, at)
    if magic != _MAGIC or zlib.crc32(data[at : at + _FRAME.size - 4]) != head_checksum:
        return None
    payload = data[at + _FRAME.size : at + _FRAME.size + size]
    return payload if len(payload) == size and zlib.crc32(payload) == checksum else None


def _frames_follow(data: bytes, at: int) -> bool:
    at = data.find(_MAGIC, at)
    while at >= 0:
        if _frame(data, at) is not None:
            return True
        at = data.find(_MAGIC, at + 1)
    return False
