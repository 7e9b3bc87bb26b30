"""Model folders in Hugging Face's form: reading their weights, writing one that transformers loads."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prl.config.hf_config import ModelConfig, UnsupportedModelError
from prl.runfolder.publish import storage, sync_folder
from prl.trainer.mapping import tensor_shapes

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
# Weights that some folders hold although they follow from the config or from other weights.
_DERIVED = ("rotary_emb.inv_freq", "lm_head.weight")


def read_weights(folder: Path, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors, one at a time, in the order of `mapping.tensor_shapes`.

    Raises UnsupportedModelError where the folder lacks a tensor or holds one that the architecture does not have.
    """
    files = _files(folder)
    wanted = tensor_shapes(model)
    missing = [name for name in wanted if name not in files]
    unknown = [name for name in files if name not in wanted and not name.endswith(_DERIVED)]
    if missing or unknown:
        raise UnsupportedModelError(
            f"{folder} is no plain {model.architecture} model: missing tensors {missing[:3]}, unknown tensors {unknown[:3]}"
        )
    opened = {path: safe_open(path, framework="pt") for path in set(files.values())}
    for name in wanted:
        yield name, opened[files[name]].get_tensor(name)  # type: ignore[no-untyped-call]


def write_folder(folder: Path, tensors: Iterable[tuple[str, Tensor]], source: Path, dtype: str) -> None:
    """Write the weights with `source`'s config and tokenizer to `folder`, whole or not at all; an earlier one is replaced.

    `dtype` is the name of the tensors' dtype, e.g. float32. All tensors are held in memory until they are written.
    Raises OSError (StorageFull).
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    weights = {name: tensor.contiguous().cpu() for name, tensor in tensors}
    with storage(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            save_file(weights, temporary / _WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder}: {error}") from error
        for path in source.iterdir():
            if path.is_file() and path.name != _INDEX and path.suffix not in (".safetensors", ".bin", ".pt", ".gguf"):
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


def _files(folder: Path) -> dict[str, Path]:
    """Where each tensor of the folder lies."""
    if (folder / _INDEX).exists():
        index: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in index.items()}
    path = folder / _WEIGHTS
    if not path.exists():
        raise UnsupportedModelError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}: no weights to start from")
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def _write_config(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text())
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
