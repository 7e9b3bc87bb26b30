"""Whole versions of the weights in files: weights/<lineage>_<step>/ in the run folder, whoever wrote them. Free of torch.

The files hold pieces of tensors. They are written into a folder whose name begins with a dot; the manifest, which names them,
the digest of each piece and that of the version, comes last, and then the folder gets its name. A folder that is replaced or
given up gets a name with a dot again, since others may be reading in it; `remove_before` deletes what nobody needs any more.
"""

import errno
import json
import logging
import os
import random
import re
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from prl.config.plain_files import read_plain
from prl.flow.versions import Version
from prl.runfolder.publish import publish_json, sync_folder

MANIFEST = "manifest.json"
MODULUS = 2**64
_NAME = re.compile(r"(?:\.(?:tmp|old)-)?(\d{1,9})_(\d{1,15})(?:-[0-9a-f]{32})?")
_NOT_YET_VISIBLE = (errno.ENOENT, errno.ESTALE)
_LOOK_S = (0.05, 1.0)  # between two looks for a new name
log = logging.getLogger(__name__)


class StoredError(Exception):
    """A version in files is not there, or not what it was; the message names the file."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Elements [start, start + size) along `dim` of a tensor, and all of its other dimensions, under the tensor's name in a
    file; `digest`: what they add to the version's."""

    tensor: str
    dim: int
    start: int
    size: int
    digest: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: str  # relative to the version's folder
    bytes: int
    pieces: tuple[StoredPiece, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "StoredFile":
        """Raises KeyError, TypeError or ValueError."""
        name = str(value["path"])
        if Path(name).name != name:
            raise ValueError(f"a file of a version lies in its folder, not in {name!r}")
        return cls(name, int(value["bytes"]), tuple(StoredPiece(**piece) for piece in value["pieces"]))


@dataclass(frozen=True)
class StoredVersion:
    version: Version
    digest: int
    files: Sequence[StoredFile]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def folder_of(weights: Path, version: Version) -> Path:
    return weights / _stem(version)


def new_folder(weights: Path, version: Version) -> Path:
    """An empty folder to write a version's files into. Raises OSError."""
    folder = weights / f".tmp-{_stem(version)}-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    return folder


def publish_version(temporary: Path, stored: StoredVersion) -> Path:
    """Make a version of the files in `temporary`, which are durable; an earlier one of its name makes room. Raises StoredError
    where they are not those of `stored`, or do not add up to its digest, and OSError."""
    _check_sizes(temporary, stored)
    found = sum(piece.digest for file in stored.files for piece in file.pieces) % MODULUS
    if found != stored.digest:
        raise StoredError(
            f"{temporary}: its pieces add up to digest {found}, not to {stored.digest} of version {stored.version}"
        )
    content = {
        "lineage": stored.version.lineage,
        "step": stored.version.step,
        "digest": stored.digest,
        "files": [file.to_json() for file in stored.files],
    }
    publish_json(temporary / MANIFEST, {**content, "checksum": _checksum(content)})
    folder = folder_of(temporary.parent, stored.version)
    give_up(folder)
    temporary.rename(folder)
    sync_folder(folder.parent)
    return folder


def read_version(weights: Path, version: Version, wait_s: float = 0.0) -> StoredVersion:
    """What a version consists of; all its files are there then, with their sizes. A shared filesystem may show a new name
    late: it is waited for so long. Raises StoredError."""
    path = folder_of(weights, version) / MANIFEST
    try:
        content = json.loads(_read_new(path, wait_s))
        checksum = content.pop("checksum")
        if checksum != _checksum(content):
            raise StoredError(f"{path}: does not fit its own checksum: it was changed after it was written")
        files = tuple(StoredFile.from_json(file) for file in content["files"])
        stored = StoredVersion(Version(int(content["lineage"]), int(content["step"])), int(content["digest"]), files)
    except OSError as error:
        raise StoredError(f"{path}: cannot be read within {wait_s:g} s: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoredError(f"{path}: is no manifest of a version ({error!r})") from error
    if stored.version != version:
        raise StoredError(f"{path}: is of version {stored.version}")
    _check_sizes(path.parent, stored)
    return stored


def give_up(folder: Path) -> None:
    """Take a version's name away, where there is one, and leave its files to those who read in them. Raises OSError."""
    if folder.exists():
        folder.rename(folder.with_name(f".old-{folder.name}-{uuid.uuid4().hex}"))


def remove_before(weights: Path, version: Version | None) -> None:
    """Delete all folders of versions before this one, whole or not; None: all folders. What cannot be deleted is logged."""
    try:
        names = sorted(os.listdir(weights))
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be looked through for versions that nobody needs: %s", weights, error)
        return
    for name in names:
        match = _NAME.fullmatch(name)
        if match and (version is None or Version(int(match[1]), int(match[2])) < version):
            shutil.rmtree(weights / name, ignore_errors=True)
            if (weights / name).exists():
                log.warning("%s is of a version that nobody needs and could not be deleted", weights / name)


def _stem(version: Version) -> str:
    return f"{version.lineage}_{version.step}"


def _check_sizes(folder: Path, stored: StoredVersion) -> None:
    for file in stored.files:
        path = folder / file.path
        try:
            size = path.stat().st_size
        except OSError as error:
            raise StoredError(f"{path}: {error.strerror}; version {stored.version} needs it") from error
        if size != file.bytes:
            raise StoredError(f"{path}: has {size} bytes, of {file.bytes} that were written")


def _read_new(path: Path, wait_s: float) -> bytes:
    """The folders above are listed before the name is tried: it may be remembered for long that it did not exist."""
    end, pause_s = time.monotonic() + wait_s, _LOOK_S[0]
    while True:
        try:
            os.listdir(path.parent.parent)
            return read_plain(path)
        except OSError as error:
            if error.errno not in _NOT_YET_VISIBLE or time.monotonic() + pause_s > end:
                raise
        time.sleep(pause_s * random.uniform(0.5, 1))  # noqa: S311
        pause_s = min(2 * pause_s, _LOOK_S[1])


def _checksum(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
