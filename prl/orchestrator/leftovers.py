"""What dead processes leave in the memory of their node: files of /dev/shm. A process that is killed cannot remove its own, and
what it has there (vLLM's rings between a sampler's workers: hundreds of MiB; NCCL's buffers) stays in the node's memory until
somebody does."""

import os
from collections.abc import Iterable
from pathlib import Path

from prl.orchestrator.process_groups import Group, is_there, members

SHARED_MEMORY = "/dev/shm/"  # noqa: S108 (names are read there, none is made)


def names() -> frozenset[str]:
    """Of all files of shared memory on this node: as long as they stay the same, so does what each process has mapped."""
    return frozenset(os.listdir(SHARED_MEMORY)) if os.path.isdir(SHARED_MEMORY) else frozenset()


def segments_of(group: Group, since: float) -> set[Path]:
    """The shared memory that the living processes of a process group have mapped and may have made: this user's files of
    /dev/shm itself that were made after `since` (seconds since the epoch). What lay there before, or lies in a folder of it (a
    model, a whole run folder), is no leftover."""
    if not is_there(group):
        return set()
    mapped = {path for pid in members(group) for path in _mapped(pid)}
    return {path for path in mapped if path.parent == Path(SHARED_MEMORY) and _is_own(path, since)}


def remove(segments: Iterable[Path]) -> None:
    """Remove those that are there still, of processes that have ended."""
    for path in segments:
        path.unlink(missing_ok=True)


def _is_own(path: Path, since: float) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and found.st_ctime >= since


def _mapped(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()  # has ended meanwhile, or the system keeps no such list
    mapped = (line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line)
    return {Path(name) for name in mapped if not name.endswith(" (deleted)")}
