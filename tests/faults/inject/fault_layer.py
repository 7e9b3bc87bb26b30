"""A filesystem that misbehaves, under the real code: the functions of `os` and `open` by which Python reaches files are
replaced by ones that first ask a plan what happens to this operation. Only what lies in one folder is touched.

Operations have a kind (create, write, fsync, rename, unlink, mkdir, read, open (of a folder), list, stat) and a point: kind,
path and module of prl that wants it, with all that differs between two runs taken out of it. Faults:

    kill           SIGKILL to this process before the operation; a write is torn: half of it is done
    short          a write takes half of what it was given, which POSIX allows
    an errno name  the operation fails with it; a write that fails has done half
    late           a name is not there yet: reads fail with ENOENT, listings lack it
"""

import builtins
import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

WRITES = ("create", "write", "fsync", "rename", "unlink", "mkdir")
LOOKS = ("read", "open", "list", "stat")
HELPERS = (
    *("prl.config.plain_files", "prl.runfolder.publish", "prl.runfolder.paths", "prl.streams.files", "prl.streams.reader"),
    "prl.trainer.hf_folder",
)
_REPLACED = {  # function of os to the one of the layer that stands for it
    **{name: name for name in ("open", "write", "fsync", "close", "rename", "unlink", "mkdir", "listdir", "scandir", "stat")},
    "writev": "writev",
    "fdatasync": "fsync",
    "replace": "rename",
    "remove": "unlink",
}
_UNSTEADY = (
    (re.compile(r"(\.tmp|\.new|\.old)-[0-9a-z]{8,}"), r"\1"),
    (re.compile(r"_[0-9a-f]{16}\.arrow"), "_C.arrow"),
    (re.compile(r"\d+"), "N"),
)


@dataclass(frozen=True)
class Operation:
    kind: str
    path: str  # relative to the layer's folder
    target: str = ""  # of a rename
    caller: str = ""  # the module of prl that wants it

    @property
    def point(self) -> str:
        words = f"{self.kind} {self.path}" + (f" -> {self.target}" if self.target else "")
        words += f" ({self.caller})" if self.caller else ""
        for pattern, steady in _UNSTEADY:
            words = pattern.sub(steady, words)
        return words


def _caller() -> str:
    """The innermost module of prl on the stack that is more than a helper of publishing."""
    frame, module = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("prl."):
            module = module or name
            if name not in HELPERS:
                return name
        frame = frame.f_back
    return module


Plan = Callable[[Operation], str | None]


class FaultLayer:
    """A context manager: the faults of `plan` (called with the operation's name, in one thread at a time) happen in `folder`
    while it is open. `before_kill` is called with the operation that this process dies of."""

    def __init__(self, folder: Path, plan: Plan, before_kill: Callable[[Operation], None] = lambda _: None) -> None:
        self._folder = os.path.realpath(folder)
        self._plan = plan
        self._before_kill = before_kill
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._paths: dict[int, str] = {}  # of open files and folders
        self._real = {name: getattr(os, name) for name in _REPLACED}
        self._real_open = io.open

    def __enter__(self) -> "FaultLayer":
        for name, own in _REPLACED.items():
            real = self._real[name]
            stand_in = partial(getattr(self, f"_{own}"), real)
            for place in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
                if real in place:
                    place.add(stand_in)
            setattr(os, name, stand_in)
        io.open = builtins.open = self._io_open
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        io.open = builtins.open = self._real_open

    # What stands for the functions of os.

    def _open(self, real, path, flags, *args, dir_fd=None, **kwargs):
        inside = self._inside(path, dir_fd)
        if inside is not None:
            if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                self._meet(Operation("create", inside))
            else:
                self._meet(Operation("open" if self._is_folder(inside) else "read", inside))
        descriptor = real(path, flags, *args, dir_fd=dir_fd, **kwargs)
        self._paths.pop(descriptor, None)
        if inside is not None:
            self._paths[descriptor] = inside
        return descriptor

    def _write(self, real, descriptor, data):
        inside = self._paths.get(descriptor)
        if inside is None:
            return real(descriptor, data)
        view = memoryview(data).cast("B")
        half = (len(view) + 1) // 2
        fault = self._meet(Operation("write", inside), lambda: real(descriptor, view[:half]))
        return real(descriptor, view[:half] if fault == "short" else view)

    def _writev(self, real, descriptor, pieces):
        return self._write(self._real["write"], descriptor, b"".join(pieces))

    def _fsync(self, real, descriptor):
        inside = self._paths.get(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        if inside is not None:
            self._meet(Operation("fsync", inside))
        return real(descriptor)

    def _close(self, real, descriptor):
        self._paths.pop(descriptor, None)
        return real(descriptor)

    def _rename(self, real, source, target, *, src_dir_fd=None, dst_dir_fd=None):
        inside = self._inside(target, dst_dir_fd)
        if inside is not None:
            self._meet(Operation("rename", self._inside(source, src_dir_fd) or str(source), inside))
        return real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def _unlink(self, real, path, *, dir_fd=None):
        inside = self._inside(path, dir_fd)
        if inside is not None:
            self._meet(Operation("unlink", inside))
        return real(path, dir_fd=dir_fd)

    def _mkdir(self, real, path, mode=0o777, *, dir_fd=None):
        inside = self._inside(path, dir_fd)
        if inside is not None:
            self._meet(Operation("mkdir", inside))
        return real(path, mode, dir_fd=dir_fd)

    def _stat(self, real, path, **kwargs):
        inside = None if isinstance(path, int) else self._inside(path, kwargs.get("dir_fd"))
        if inside is not None:
            self._meet(Operation("stat", inside))
        return real(path, **kwargs)

    def _listdir(self, real, path="."):
        names = real(path)
        inside = self._listed(path)
        return names if inside is None else [name for name in names if self._shows(inside, name)]

    def _scandir(self, real, path="."):
        inside = self._listed(path)
        return real(path) if inside is None else _Entries(real(path), lambda name: self._shows(inside, name))

    def _io_open(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        rest = (buffering, encoding, errors, newline, closefd, opener)
        inside = None if isinstance(file, int) else self._inside(file, None)
        if inside is None or self._elsewhere():
            return self._real_open(file, mode, *rest)
        if "r" in mode and "+" not in mode:
            self._meet(Operation("read", inside))
            return self._real_open(file, mode, *rest)
        if "+" in mode:
            raise NotImplementedError(f"the fault layer does not know mode {mode!r}: {file}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        flags |= os.O_EXCL if "x" in mode else os.O_APPEND if "a" in mode else os.O_TRUNC
        raw = _Raw(os.open(file, flags, 0o666))
        if "a" in mode:
            raw.seek(0, os.SEEK_END)  # as open does, for tell
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    # The plan.

    def _meet(self, operation: Operation, half: Callable[[], object] = lambda: None) -> str | None:
        """Ask the plan what happens; what it says happens here, but for short writes."""
        if self._elsewhere():
            return None
        with self._lock, self._aside():
            fault = self._plan(replace(operation, caller=_caller()))
        if not fault or (fault == "short" and operation.kind == "write"):
            return fault
        where = os.path.join(self._folder, operation.path)
        if fault == "kill":
            half()
            with self._aside():
                self._before_kill(replace(operation, caller=_caller()))
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "late":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
        half()
        code = getattr(errno, fault)
        named = () if operation.kind in ("write", "fsync") else (where,)  # as the real ones, which know a descriptor alone
        raise OSError(code, os.strerror(code), *named)

    def _shows(self, folder: str, name: str) -> bool:
        """Whether a listing has the name."""
        if self._elsewhere():
            return True
        with self._lock, self._aside():
            return self._plan(Operation("stat", os.path.normpath(os.path.join(folder, name)))) != "late"

    def _listed(self, path) -> str | None:
        inside = self._paths.get(path) if isinstance(path, int) else self._inside(path, None)
        if inside is not None:
            self._meet(Operation("list", inside))
        return inside

    def _elsewhere(self) -> bool:
        """In a forked process, or in the plan itself."""
        return os.getpid() != self._process or getattr(_local, "aside", False)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        _local.aside = True
        try:
            yield
        finally:
            _local.aside = False

    def _inside(self, path, dir_fd) -> str | None:
        name = os.fsdecode(path)
        if dir_fd is not None:
            parent = self._paths.get(dir_fd)
            return None if parent is None else os.path.normpath(os.path.join(parent, name))
        full = os.path.abspath(name)
        if full == self._folder or full.startswith(self._folder + os.sep):
            return os.path.relpath(full, self._folder)
        return None

    def _is_folder(self, inside: str) -> bool:
        try:
            return (self._real["stat"](os.path.join(self._folder, inside)).st_mode & 0o170000) == 0o040000
        except FileNotFoundError:
            return False


_local = threading.local()


class _Raw(io.RawIOBase):
    """A file opened for writing whose writes pass through os.write."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset, whence=0):
        return os.lseek(self._descriptor, offset, whence)

    def tell(self):
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def truncate(self, size=None):
        os.ftruncate(self._descriptor, self.tell() if size is None else size)

    def write(self, data):
        return os.write(self._descriptor, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


class _Entries:
    """What os.scandir returns, without the names that do not show."""

    def __init__(self, entries, shows: Callable[[str], bool]) -> None:
        self._entries = entries
        self._shows = shows

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            entry = next(self._entries)
            if self._shows(os.fsdecode(entry.name)):
                return entry

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()
