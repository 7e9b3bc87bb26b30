"""Full tensors of a model and the shards of them that ranks hold, by the table of `prl.config.tensors`. Free of Megatron.

A full tensor never depends on how ranks share the model.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.config.tensors import Entry, Kind, tensor_shapes

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
    row = 0
    for number, index in _parts(entry, model, ranks, rank):
        part = tensors[number][index]
        parameter[row : row + len(part)].copy_(part)
        row += len(part)
    parameter[row:].zero_()  # what pads the vocabulary


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


def _parts(entry: Entry, model: ModelConfig, ranks: int, rank: int) -> list[tuple[int, tuple[slice, ...]]]:
    """What of an entry's tensors (a tensor's number, an index) makes up a rank's shard, one part below the other."""

    def share(size: int) -> slice:
        return slice(rank * size // ranks, (rank + 1) * size // ranks)

    rows = entry.shapes[0][0]
    if entry.kind == "vocab":
        padded = share(model.padded_vocabulary(ranks))
        return [(0, (slice(padded.start, min(padded.stop, rows)),))] if padded.start < rows else []
    if entry.kind == "columns":
        return [(0, (slice(0, rows), share(entry.shapes[0][1])))]
    if entry.kind == "gate_up":
        return [(number, (share(rows),)) for number in range(2)]
    if entry.kind == "qkv":
        return list(_fused(model, share(sum(shape[0] for shape in entry.shapes))))
    return [(0, (slice(0, rows),))]


def _fused(model: ModelConfig, wanted: slice) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Rows of queries, keys and values, fused by query group, as rows of the three tensors."""
    at = 0
    for group in range(model.kv_heads):
        for number, rows in enumerate(_rows_of_a_group(model)):
            first, last = max(wanted.start - at, 0), min(wanted.stop - at, rows)
            if first < last:
                yield number, (slice(group * rows + first, group * rows + last),)
            at += rows


def _rows_of_a_group(model: ModelConfig) -> list[int]:
    return [model.heads // model.kv_heads * model.head_dim, model.head_dim, model.head_dim]
