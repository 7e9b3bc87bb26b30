"""Files that are either whole or not there, also for readers on other nodes and after a crash."""

import contextlib
import ctypes
import errno
import itertools
import json
import os
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")  # that the system takes at once
_AHEAD_BYTES = 2**21  # after which the system is asked to begin with writing
_START = 2  # SYNC_FILE_RANGE_WRITE: begin, and wait for nothing
_libc = ctypes.CDLL(None)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_FULL = {errno.ENOSPC: "no space is left", errno.EDQUOT: "the quota is used up"}


_ADVICE = (
    "What was made durable before is safe. Free some space or have the quota raised (look at blocks and inodes: df -h, df -i, "
    "quota; on Lustre lfs quota and lfs df, where a single full target is enough), then go on with prl-submit "
    "--resume RUN, where there is a checkpoint"
)


class StorageFull(OSError):
    """Nothing more can be written, though what is durable stays so."""

    def __init__(self, path: Path, error: OSError) -> None:
        words = f"{_FULL[error.errno or 0]} ({error.strerror}). {_ADVICE}"
        super().__init__(error.errno, words, str(path))


def in_words(error: BaseException, folder: Path | str | None = None) -> str:
    """An error as the cause of a run's end: its kind and what it says. Where it, or what it comes from, says that the storage
    is full, the path (else `folder`, where this process writes) and what to do come first."""
    said = f"{type(error).__name__}: {error}"
    if _ADVICE in said:
        return said
    cause: BaseException | None = error
    while cause is not None:
        for code, words in _FULL.items():
            if (isinstance(cause, OSError) and cause.errno == code) or os.strerror(code) in str(cause):
                path = getattr(cause, "filename", None) or folder
                at = f"{os.fsdecode(path)}: " if path else ""
                return f"{at}{words}. {_ADVICE}. {said}"
        cause = cause.__cause__ or cause.__context__
    return said


def says_full(words: str) -> bool:
    """Whether these words of an error, as `in_words` puts them, say that the storage is full."""
    return _ADVICE in words


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """Errors that say that the storage is full become `StorageFull`, which names `path`; others stay what they are."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and not isinstance(error, StorageFull):
            raise StorageFull(path, error) from error
        raise


def publish(path: Path, data: Any, folder: int | None = None) -> None:
    """Write `data` (see `write_all`) under a temporary name in the same folder, make it durable, and rename it to `path`.
    Readers ignore names with a leading dot. Who publishes often keeps the folder open and gives its descriptor.

    Raises OSError (StorageFull). Nothing is left behind then, except where the very last act failed, the folder's fsync:
    publishing the same again is right in any case."""
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
    with storage(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if folder is None:
            sync_folder(path.parent)
        else:
            os.fsync(folder)


def publish_json(path: Path, value: Any) -> None:
    publish(path, (json.dumps(value, indent=1) + "\n").encode())


def write_all(descriptor: int, data: Any) -> None:
    """All of a buffer, or of a list of buffers one after another, however little the system takes at a time. Of much data the
    first is on its way to the disk while the rest is still handed over."""
    views = (memoryview(piece).cast("B") for piece in (data if isinstance(data, list) else [data]) if len(piece))
    rest = deque(view[at : at + _AHEAD_BYTES] for view in views for at in range(0, len(view), _AHEAD_BYTES))
    while rest:
        sizes = itertools.accumulate(map(len, itertools.islice(rest, _MOST_BUFFERS)))
        count = sum(1 for _ in itertools.takewhile(lambda size: size <= _AHEAD_BYTES, sizes))
        taken = os.writev(descriptor, list(itertools.islice(rest, count)))
        while rest and taken >= len(rest[0]):
            taken -= len(rest.popleft())
        if taken:
            rest[0] = rest[0][taken:]
        if rest:
            _libc.sync_file_range(descriptor, 0, 0, _START)  # advice: whatever fails, fsync says


def open_folder(path: Path) -> int:
    """A descriptor of a folder, for `publish` and fsync."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = open_folder(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
