"""Full tensors of a model and the shards of them that ranks hold, by the table of `prl.config.tensors`. Free of Megatron.

A full tensor never depends on how ranks share the model.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.config.tensors import Entry, Kind, tensor_shapes
from prl.weights.shards import trainer_parts

ADAPTER_SCALE = 32.0  # an adapter's product, divided by its rank, is added to its weight times this


class Sliced(Protocol):
    """A tensor whose parts can be had without the rest: one in memory, or one in a file."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


def random_weights(model: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Full float32 tensors drawn one after another from one generator, so that they are the same however ranks share the model:
    matrices normal with standard deviation 0.02, norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in tensor_shapes(model).items():
        if name.endswith(".bias"):
            yield name, torch.zeros(shape)
        elif len(shape) == 1:
            yield name, torch.ones(shape)
        else:
            yield name, torch.empty(shape).normal_(0.0, 0.02, generator=generator)


@torch.no_grad()
def fill_shard(parameter: Tensor, entry: Entry, tensors: Sequence[Sliced], model: ModelConfig, ranks: int, rank: int) -> None:
    """Copy this rank's share of the entry's full tensors into its parameter, taking no more of them than that."""
    end = 0
    for row, part in trainer_parts(entry, model, ranks, rank):
        end = row + part.rows
        rows, columns = slice(part.row, part.row + part.rows), slice(part.column, part.column + part.columns)
        parameter[row:end].copy_(tensors[part.tensor][(rows, columns)[: parameter.dim()]])
    parameter[end:].zero_()  # what pads the vocabulary


def full_tensors(kind: Kind, shards: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
    """An entry's full tensors from the shards of all ranks, in their order."""
    if kind == "vocab":
        return [torch.cat(list(shards))[: model.vocabulary]]
    if kind == "columns":
        return [torch.cat(list(shards), 1)]
    if kind == "gate_up":
        gates, ups = zip(*(shard.chunk(2, 0) for shard in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]
    if kind == "qkv":
        fused = torch.cat(list(shards))
        tail, rows = fused.shape[1:], _rows_of_a_group(model)
        parts = torch.split(fused.view(model.kv_heads, sum(rows), *tail), rows, 1)
        return [part.reshape(-1, *tail) for part in parts]
    return [shards[0]]


def _rows_of_a_group(model: ModelConfig) -> list[int]:
    return [model.heads // model.kv_heads * model.head_dim, model.head_dim, model.head_dim]
