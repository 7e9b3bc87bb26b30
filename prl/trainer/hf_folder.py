"""Model folders in Hugging Face's form: reading their weights, writing one that transformers loads."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from prl.config.hf_config import ModelConfig, UnsupportedModelError
from prl.config.model_files import INDEX, WEIGHT_SUFFIXES, WEIGHTS, find_weights
from prl.runfolder.publish import storage, sync_folder
from prl.trainer.table import Sliced
from prl.weights.tensor_files import write_tensors

SHARD_BYTES = 2 << 30  # of a file of weights, at most, unless a single tensor is larger


@dataclass(frozen=True)
class _OfAnExpert:
    """One expert's matrix in a tensor that holds all experts of a layer: `rows` of tensor[expert]."""

    tensor: Sliced
    expert: int
    rows: slice

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        first, *rest = index
        return self.tensor[(self.expert, slice(self.rows.start + first.start, self.rows.start + first.stop), *rest)]


def read_weights(folder: Path, model: ModelConfig) -> Iterator[tuple[str, Sliced]]:
    """The folder's tensors in the order of `tensors.tensor_shapes`, each to be read by slices: nothing is in memory before.
    Raises UnsupportedModelError where they are not those of the model (`model_files.find_weights`)."""
    try:
        places = find_weights(folder, model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(*(f"{folder}: {problem}" for problem in error.args)) from None
    opened = {path: _open(path) for path in {place.path for place in places.values()}}
    for name, place in places.items():
        tensor = opened[place.path].get_slice(place.name)
        yield name, tensor if place.expert is None else _OfAnExpert(tensor, place.expert, place.rows)


def write_folder(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], source: Path, dtype: str, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights with `source`'s config and tokenizer to `folder`, whole or not at all; an earlier one is replaced.

    `dtype` is the name of the tensors' dtype, e.g. float32. Files hold at most `shard_bytes` of weights (but at least one
    tensor), and no more than that is held in memory. Raises OSError (StorageFull).
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    with storage(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_weights(temporary, tensors, shard_bytes)
        for path in source.iterdir():
            if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and not _is_index(path):
                shutil.copyfile(path, temporary / path.name)
        _write_config(temporary / "config.json", dtype)
        replace_folder(temporary, folder)


def replace_folder(temporary: Path, final: Path) -> None:
    """Make a folder's files durable and give it its name. What had the name before goes last."""
    for path in temporary.rglob("*"):
        sync(path)
    sync_folder(temporary)
    old = final.with_name(f".old-{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    shards: list[Path] = []
    shard: dict[str, Tensor] = {}
    files: dict[str, int] = {}
    size = total = 0

    def write() -> None:
        shards.append(folder / f"shard_{len(shards)}")
        write_tensors(shards[-1], shard, {"format": "pt"})
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            write()
            size = 0
        shard[name] = tensor.contiguous().cpu()
        files[name] = len(shards)
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    if len(shards) == 1:
        shards[0].rename(folder / WEIGHTS)
        return
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for path, name in zip(shards, names, strict=True):
        path.rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[number] for name, number in files.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}; download it again") from error


def _is_index(path: Path) -> bool:
    return path.name.endswith((".safetensors.index.json", ".bin.index.json"))


def _write_config(path: Path, dtype: str) -> None:
    config: dict[str, Any] = json.loads(path.read_text())
    config.pop("torch_dtype", None)  # transformers 4's name of the key
    config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")


def sync(path: Path) -> None:
    """Make a file or the names in a folder durable."""
    if path.is_dir():
        sync_folder(path)
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
