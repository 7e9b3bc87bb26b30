"""Safetensors files as prl writes them, of versions and of model folders."""

import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a new file, not yet durable on return. Raises OSError.

    safetensors makes its files readable by their owner alone; this one is so for all whom the process's umask lets in.
    """
    path.touch(exist_ok=False)
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    path.chmod(mode)
