"""Reading of files by a name under which anything may lie: what is no regular file is refused, and never waited for."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# A file that nobody could hold, sparse perhaps, must not take this machine's memory.
MOST_BYTES = min(2**35, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


class NotPlainError(OSError):
    """A pipe, a socket, a device, a folder, a link to itself or a file larger than `MOST_BYTES` lies there."""

    def __init__(self, words: str, path: Path | str) -> None:
        super().__init__(errno.EINVAL, words, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_plain(path: Path | str, flags: int = 0) -> BinaryIO:
    """A regular file for reading; `flags` are more of `os.open`'s. Raises NotPlainError, and other OSErrors as they are."""
    try:
        # A pipe would be waited for without O_NONBLOCK; regular files do not know of it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPlainError("is a link that is not followed, or leads to itself", path) from error
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device without a driver
            raise NotPlainError("is no regular file", path) from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NotPlainError("is no regular file", path)
        if found.st_size > MOST_BYTES:
            raise NotPlainError(f"has {found.st_size} bytes; the most that is read of one file here is {MOST_BYTES}", path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path | str) -> bytes:
    """All that is in a regular file. Raises OSError."""
    with open_plain(path) as file:
        return file.read()
