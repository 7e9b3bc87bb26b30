"""A checkpoint as a Hugging Face folder: without process groups, accelerators and Megatron, in the memory of one file of
weights."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from prl.config.hf_config import ModelConfig, read_model_config
from prl.config.resumed import model_changes
from prl.config.tensors import entries
from prl.trainer.hf_folder import SHARD_BYTES, write_folder
from prl.trainer.table import ADAPTER_SCALE, full_tensors

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_FACTS = "common_state/shard_0_1"
_MODEL = ("embedding.", "decoder.", "output_layer.")  # before the names of the model's weights, and of its adapters
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)")


def export_checkpoint(
    checkpoint: Path, source: Path, target: Path, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the model of `checkpoint` (a folder in torch's distributed form, as Megatron writes it) to the folder `target`,
    with the config and tokenizer of `source`, the model that was trained. `dtype`: that of the weights, if another than in the
    checkpoint. An earlier target is replaced.

    Raises UnsupportedModelError, OSError, ValueError where the checkpoint is not of that model.
    """
    model = read_model_config(source)
    reader = _Reader(checkpoint)
    _check_fit(reader, model, source)
    found = dtype or str(reader.dtype).removeprefix("torch.")
    write_folder(target, _tensors(reader, model, getattr(torch, found)), source, found, shard_bytes)


def _tensors(reader: "_Reader", model: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for entry in entries(model):
        shape = (sum(shape[0] for shape in entry.shapes), *entry.shapes[0][1:])
        parameter = reader.read([_key(name) for name in entry.parameters], shape)
        parameter = _with_adapter(reader, parameter, *_key(entry.parameters[-1])).to(dtype)
        yield from zip(entry.tensors, full_tensors(entry.kind, [parameter], model), strict=True)


def _check_fit(reader: "_Reader", model: ModelConfig, source: Path) -> None:
    """Raises ValueError where the checkpoint is not of this model, or has weights that it lacks."""
    changes = model_changes(reader.facts().get("model", {}), model)  # earlier versions of prl did not write it
    if changes:
        raise ValueError(f"{source}: the model is another one than when {reader.folder} was written: {changes}")
    last = {}  # key to the place of the last layer, and expert, in it
    for entry in entries(model):
        key, index = reader.find([_key(name) for name in entry.parameters])[0]
        last[key] = index
    for key, index in last.items():
        if tuple(reader.size(key)[: len(index)]) != tuple(number + 1 for number in index):
            raise ValueError(f"{reader.folder}: {key} is {list(reader.size(key))}: it is of another model than {source}")
    unknown = [key for key in reader.weights() if key not in last]
    if unknown:
        raise ValueError(f"{reader.folder}: has {unknown[0]}, which the model in {source} has not: it is of another model")


def _with_adapter(reader: "_Reader", parameter: Tensor, key: str, index: tuple[int, ...]) -> Tensor:
    a_key, b_key = (f"{key.removesuffix('weight')}{name}" for name in ("lora_a", "lora_b"))
    if not reader.has(a_key):
        return parameter
    outputs, inputs = parameter.shape
    rank = reader.size(a_key)[len(index)]
    a, b = reader.read([(a_key, index)], (rank, inputs)), reader.read([(b_key, index)], (outputs, rank))
    return torch.addmm(parameter, b, a, alpha=ADAPTER_SCALE / rank)


def _key(name: str) -> tuple[str, tuple[int, ...]]:
    """Under which key a checkpoint has a parameter, and where in it: all layers, and all experts, are in one tensor."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name, ()
    expert = _EXPERT.fullmatch(layer[2])
    if expert is None:
        return f"decoder.layers.{layer[2]}", (int(layer[1]),)
    return f"decoder.layers.mlp.experts.experts.{expert[1]}", (int(layer[1]), int(expert[2]))


class _Reader:
    """Parts of a checkpoint's tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = FileSystemReader(folder)
        self._metadata = self._files.read_metadata()
        self._files.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def dtype(self) -> torch.dtype:
        return self.find([("decoder.final_layernorm.weight", ())])[1].properties.dtype

    def facts(self) -> Mapping[str, Any]:
        """What the trainer says of its checkpoint."""
        whole = torch.Size([])
        item = ReadItem(LoadItemType.BYTE_IO, MetadataIndex(_FACTS), whole, MetadataIndex(_FACTS), whole, whole)
        planner = _Into(torch.empty(0))
        self._files.read_data(LoadPlan([item]), planner)
        facts: Mapping[str, Any] = torch.load(planner.content, weights_only=True)[0]["facts"]
        return facts

    def weights(self) -> list[str]:
        """The keys of the model's weights, without those of adapters."""
        keys = [key for key, saved in self._metadata.state_dict_metadata.items() if isinstance(saved, TensorStorageMetadata)]
        return [key for key in keys if key.startswith(_MODEL) and not key.endswith(("lora_a", "lora_b"))]

    def has(self, key: str) -> bool:
        return key in self._metadata.state_dict_metadata

    def size(self, key: str) -> torch.Size:
        return self.find([(key, ())])[1].size

    def read(self, places: Sequence[tuple[str, tuple[int, ...]]], shape: tuple[int, ...]) -> Tensor:
        """tensor[index] of the one of `places` (key, index) that is there; it may have more rows than `shape` says."""
        place, saved = self.find(places)
        key, index = place
        result = torch.empty(*(1 for _ in index), *shape, dtype=saved.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size([*index, *(0 for _ in shape)]), result.size())
        items = create_read_items_for_chunk_list(key, saved, [wanted])
        if sum(item.lengths.numel() for item in items) != result.numel():
            raise ValueError(
                f"{self.folder}: {key} is {list(saved.size)}, without {list(shape)} at {list(index)}: it is of another model"
            )
        self._files.read_data(LoadPlan(items), _Into(result))
        return result.view(shape)

    def find(self, places: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[str, tuple[int, ...]], TensorStorageMetadata]:
        for place in places:
            saved = self._metadata.state_dict_metadata.get(place[0])
            if isinstance(saved, TensorStorageMetadata):
                return place, saved
        raise ValueError(
            f"{self.folder}: the checkpoint has no {' or '.join(key for key, _ in places)}: it is of another model"
        )


class _Into(DefaultLoadPlanner):
    """Where what is read goes: into one tensor, or as it is."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = tuple(slice(start, start + size) for start, size in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self._target[index]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.content = value
