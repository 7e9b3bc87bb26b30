"""Versions of the weights in safetensors files: what writes their pieces, and what reads a part of them.
The folder itself is in prl/runfolder/weights.py."""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from prl.flow.versions import Version
from prl.runfolder.publish import storage
from prl.runfolder.weights import (
    MODULUS,
    StoredError,
    StoredFile,
    StoredPiece,
    StoredVersion,
    folder_of,
    new_folder,
    publish_version,
    read_version,
)
from prl.weights import digest
from prl.weights.plan import TensorSpec
from prl.weights.tensor_files import write_tensors

FILE_BYTES = 1 << 30  # of pieces in a file, at most, unless a single one is larger; so much is copied to the host at once


@dataclass(frozen=True)
class Slab:
    """Elements [start, start + size) along `dim` of a tensor, and all of its other dimensions."""

    spec: TensorSpec
    dim: int
    start: int
    size: int

    @classmethod
    def whole(cls, spec: TensorSpec) -> "Slab":
        return cls(spec, 0, 0, spec.shape[0] if spec.shape else 1)

    @property
    def ranges(self) -> tuple[range, ...]:
        """Of indices, by dimension."""
        return tuple(
            range(self.start, self.start + self.size) if dim == self.dim else range(size)
            for dim, size in enumerate(self.spec.shape)
        )


def write_version(
    weights: Path, version: Version, tensors: Mapping[TensorSpec, torch.Tensor], file_bytes: int = FILE_BYTES
) -> StoredVersion:
    """A version of whole tensors, durable on return. Raises OSError (StorageFull)."""
    folder = new_folder(weights, version)
    pieces = ((Slab.whole(spec), tensor) for spec, tensor in tensors.items())
    files = write_pieces(folder, "rank_0", pieces, file_bytes)
    total = sum(piece.digest for file in files for piece in file.pieces) % MODULUS
    stored = StoredVersion(version, total, files)
    publish_version(folder, stored)
    return stored


def write_pieces(
    folder: Path, stem: str, pieces: Iterable[tuple[Slab, torch.Tensor]], file_bytes: int = FILE_BYTES
) -> list[StoredFile]:
    """Files <stem>_<number>.safetensors of pieces, of no tensor twice; each of at most `file_bytes`. Durable on return. Raises
    OSError (StorageFull)."""
    files: list[StoredFile] = []
    batch: dict[str, torch.Tensor] = {}
    stored: list[StoredPiece] = []
    size = 0

    def write() -> None:
        path = folder / f"{stem}_{len(files)}.safetensors"
        _save(path, batch)
        files.append(StoredFile(path.name, path.stat().st_size, tuple(stored)))
        batch.clear()
        stored.clear()

    for slab, tensor in pieces:
        if batch and size + tensor.nbytes > file_bytes:
            write()
            size = 0
        shard = tensor.detach().to("cpu").reshape([len(indices) for indices in slab.ranges]).contiguous()
        name = slab.spec.name
        part = digest.slab(name, shard, slab.spec.shape, slab.dim, slab.start)
        batch[name] = shard
        stored.append(StoredPiece(name, slab.dim, slab.start, slab.size, digest.total([part])))
        size += tensor.nbytes
    if batch:
        write()
    return files


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with storage(path):
        write_tensors(path, tensors)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class VersionReader:
    """Reads parts of a version's tensors. Raises StoredError, which names the file, for what is missing or damaged."""

    def __init__(self, weights: Path, version: Version, tensors: Iterable[TensorSpec], wait_s: float) -> None:
        """`wait_s`: how long a new name may take to show."""
        self._folder = folder_of(weights, version)
        self._stored = read_version(weights, version, wait_s)
        self._files: dict[str, Any] = {}
        self._pieces: dict[str, list[tuple[StoredFile, StoredPiece]]] = defaultdict(list)
        for file in self._stored.files:
            for piece in file.pieces:
                self._pieces[piece.tensor].append((file, piece))
        unknown = sorted(self._pieces.keys() - {spec.name for spec in tensors})
        if unknown:
            raise StoredError(f"{self._folder}: holds {unknown[0]} ({len(unknown)} such), which the version has not")

    def read(self, slab: Slab, device: torch.device | str = "cpu", *, verify: bool) -> torch.Tensor:
        """A slab of a tensor. A piece of the files that is taken as a whole is compared with its digest; with `verify` a piece
        of which a part is taken is, too, and all of it is read for that."""
        wanted = slab.ranges
        dtype = getattr(torch, slab.spec.dtype)
        result = torch.empty([len(indices) for indices in wanted], dtype=dtype, device=device)
        found = 0
        for file, piece in self._pieces.get(slab.spec.name, ()):
            held = Slab(slab.spec, piece.dim, piece.start, piece.size)
            common = [_both(one, other) for one, other in zip(wanted, held.ranges, strict=True)]
            if not all(common) and slab.spec.shape:
                continue
            part = self._part(file, piece, held, common, verify=verify)
            if part.dtype != dtype:
                raise StoredError(f"{self._folder / file.path}: {piece.tensor} is {part.dtype}, not {dtype}")
            result[_within(common, wanted)] = part.to(device)
            found += part.numel()
        if found != result.numel():
            raise StoredError(
                f"{self._folder}: holds {found} of {result.numel()} elements of {slab.spec.name} that are wanted of it"
            )
        return result

    def _part(self, file: StoredFile, piece: StoredPiece, held: Slab, common: list[range], *, verify: bool) -> torch.Tensor:
        """The elements `common` of a piece."""
        path = self._folder / file.path
        shape = tuple(len(indices) for indices in held.ranges)
        all_of_it = math.prod(len(indices) for indices in common) == math.prod(shape)
        try:
            opened = self._files.get(file.path)
            if opened is None:
                opened = self._files[file.path] = safe_open(path, framework="pt")
            view = opened.get_slice(piece.tensor)
            if tuple(view.get_shape()) != shape:
                raise StoredError(f"{path}: {piece.tensor} has shape {view.get_shape()}, not {list(shape)}")
            if shape and not (all_of_it or verify):
                part: torch.Tensor = view[_within(common, held.ranges)]
                return part
            whole: torch.Tensor = opened.get_tensor(piece.tensor)
        except (SafetensorError, OSError) as error:
            raise StoredError(f"{path}: cannot be read: {error}") from error
        found = digest.total([digest.slab(piece.tensor, whole, held.spec.shape, held.dim, held.start)])
        if found != piece.digest:
            raise StoredError(f"{path}: {piece.tensor} is damaged: digest {found}, not {piece.digest} as it was written")
        return whole[_within(common, held.ranges)]


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _within(indices: list[range], all_of: tuple[range, ...]) -> tuple[slice, ...]:
    """The place of indices in an array that begins at those of `all_of`."""
    return tuple(slice(one.start - whole.start, one.stop - whole.start) for one, whole in zip(indices, all_of, strict=True))
