"""Manifests of checkpoints: what makes a checkpoint count, and says of every file of it, and of itself, what it must be."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from prl.config.plain_files import open_plain, read_plain
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish_json

READERS = 8  # files that are read at once
PIECE_BYTES = 1 << 22


class ManifestError(Exception):
    """A checkpoint cannot be gone on from; the message names the file and says what is wrong with it."""


class NotWanted(Exception):
    """Nobody wants to know any more what is looked for."""


GoOn = Callable[[], None]  # called again and again by what takes long; raises NotWanted once it need not go on


def always() -> None:
    """The answer is wanted, whatever happens."""


@dataclass(frozen=True)
class Part:
    """A file of a checkpoint; `path` is relative to the checkpoint's folder."""

    path: str
    bytes: int
    checksum: str  # xxh3 of all its bytes, 16 hexadecimal digits


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    attempt: int
    lineage: int
    forks: Mapping[int, int]  # lineage -> the step at which it left the one before
    dispatcher: Mapping[str, Any]  # its state
    streams: Mapping[str, Any]  # how far rollouts and steps had come
    evaluations_reached: int
    parts: Sequence[Part]

    @property
    def events(self) -> int:
        """Rows of the ledger that the dispatcher's state counts on."""
        return int(self.dispatcher["events"])


def part_of(folder: Path, path: Path, go_on: GoOn = always) -> Part:
    """Read a file of a checkpoint once. Raises OSError."""
    digest, size = xxhash.xxh3_64(), 0
    with open_plain(path) as file:
        while piece := file.read(PIECE_BYTES):
            go_on()
            digest.update(piece)
            size += len(piece)
    return Part(path.relative_to(folder).as_posix(), size, digest.hexdigest())


def write_manifest(run: RunFolder, manifest: Manifest) -> None:
    """Make the checkpoint count; durable on return. Raises OSError."""
    content = json.loads(json.dumps(asdict(manifest)))  # as it will be read: all keys are text
    publish_json(run.manifest(manifest.step), {**content, "checksum": _checksum(content)})


def read_manifest(path: Path) -> Manifest:
    """A manifest as it was written. Raises ManifestError for anything else."""
    try:
        content = json.loads(read_plain(path))
        checksum = content.pop("checksum")
        if checksum != _checksum(content):
            raise ManifestError(f"{path}: does not fit its own checksum: it was changed after it was written")
        manifest = Manifest(
            **{
                **content,
                "forks": {int(lineage): int(step) for lineage, step in content["forks"].items()},
                "parts": tuple(Part(**part) for part in content["parts"]),
            }
        )
        if path.parent != path.parent.with_name(f"step_{manifest.step:06d}"):
            raise ManifestError(f"{path}: is of step {manifest.step}")
        if manifest.events < 0:
            raise ManifestError(f"{path}: counts on {manifest.events} rows of the ledger")
        return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{path}: is no manifest of a checkpoint ({type(error).__name__}: {error})") from error


def check_parts(path: Path, manifest: Manifest, *, content: bool = True, go_on: GoOn = always) -> None:
    """Read all files of a checkpoint, or but look at their sizes. Raises ManifestError naming the first one that is not what
    the manifest says."""

    def wrong(part: Part) -> str:
        go_on()
        file = path.parent / part.path
        try:
            size = file.stat().st_size
            if size != part.bytes:
                return f"{file}: has {size} bytes, of {part.bytes} that were written"
            same = not content or part_of(path.parent, file, go_on) == part
        except OSError as error:
            return f"{file}: {error.strerror}"
        return "" if same else f"{file}: its content is not what was written (checksum)"

    if not manifest.parts:
        raise ManifestError(f"{path}: names no files, so that nothing can be loaded")
    with ThreadPoolExecutor(READERS) as pool:
        damage = next(filter(None, pool.map(wrong, manifest.parts)), "")
    if damage:
        raise ManifestError(damage)


def newest_manifest(
    run: RunFolder, *, parts: bool = False, survives: Callable[[Manifest], bool] = lambda _: True, go_on: GoOn = always
) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint that is whole, as far as its manifest and the sizes of its files say (with `parts`: and all that is
    in them), and why each newer one was refused. One that does not survive, since the run has gone back behind it, is none."""
    refused: list[str] = []
    for _, path in reversed(run.manifests()):
        try:
            manifest = read_manifest(path)
            if not survives(manifest):
                continue
            check_parts(path, manifest, content=parts, go_on=go_on)
            return manifest, refused
        except ManifestError as error:
            refused.append(f"checkpoint {path.parent.name} is damaged and was passed over: {error}")
    return None, refused


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
