"""Weights between full tensors under Hugging Face's names and what each rank holds of Megatron's model."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.config.tensors import EMBEDDING, OUTPUT, Entry, entries
from prl.trainer import device
from prl.trainer.lora import is_adapter, merged
from prl.trainer.model import unwrap
from prl.trainer.table import Sliced, fill_shard, full_tensors
from prl.trainer.value_head import is_value_head

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+(?=\.)|(?<=\.experts\.linear_fc[12]\.weight)\d+$")


@torch.no_grad()
def load_weights(chunks: Sequence[torch.nn.Module], model: ModelConfig, tensors: Iterable[tuple[str, Sliced]]) -> None:
    """Fill this rank's shards from full tensors, which must come in the order of `tensors.tensor_shapes`; no more of them is
    read than the shards hold.

    Raises ValueError for a tensor that is out of order, and for a parameter that the table does not know.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    parameters = named_parameters(chunks)
    copy = parameters.pop(OUTPUT, None) if model.tied else None  # the last pipeline stage's own, of the embedding
    stream = iter(tensors)
    for entry in entries(model):
        full = [_expect(stream, name) for name in entry.tensors]
        name = _name(entry, parameters)
        holders = [parameters.pop(name)] if name else []
        if copy is not None and EMBEDDING in entry.parameters:
            holders.append(copy)
        for parameter in holders:
            fill_shard(parameter, entry, full, model, group.size(), group.rank())
    if parameters:
        raise ValueError(f"parameters of the model without a Hugging Face name: {', '.join(parameters)}")


@torch.no_grad()
def export_weights(
    chunks: Sequence[torch.nn.Module], model: ModelConfig, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor), cast to `dtype` if given. A collective of the ranks that hold the rest of the
    model: each must go through all of it, and gets all of it. A tensor may share memory with the parameter: use it before the
    next step."""
    group = parallel_state.get_tensor_model_parallel_group()
    table = entries(model)
    for entry, shard in zip(table, _from_holders(table, named_parameters(chunks), dtype), strict=True):
        shards = [shard]
        if group.size() > 1 and entry.kind != "whole" and entry.expert is None:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(shards, shard.contiguous(), group=group)
        yield from zip(entry.tensors, full_tensors(entry.kind, shards, model), strict=True)


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters, but for adapters and value head, by Megatron's names, with layers and experts numbered over all
    pipeline stages and ranks."""
    found: dict[str, torch.nn.Parameter] = {}
    for chunk in chunks:
        gpt = unwrap(chunk)
        experts = (gpt.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        first_expert = experts * parallel_state.get_expert_model_parallel_rank()
        first_layer = gpt.decoder.layers[0].layer_number - 1
        for name, parameter in gpt.named_parameters():
            if is_adapter(name) or is_value_head(name):
                continue
            found[_EXPERT.sub(partial(_add, first_expert), _LAYER.sub(partial(_add, first_layer), name))] = parameter
    return found


def _add(first: int, match: re.Match[str]) -> str:
    return str(first + int(match[0]))


def _from_holders(
    table: Sequence[Entry], parameters: Mapping[str, torch.nn.Parameter], dtype: torch.dtype | None
) -> Iterator[Tensor]:
    """Each entry's shard of this tensor-parallel rank, from the pipeline stage and then from the expert rank that holds it."""
    own = [parameters.get(_name(entry, parameters) or "") for entry in table]
    dtype = dtype or next(iter(parameters.values())).dtype
    stages = parallel_state.get_pipeline_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    at_stage = _places([None if parameter is None else parameter.shape for parameter in own], stages)
    at_expert = _places([place and place[1] for place in at_stage], experts)
    for entry, parameter, stage, expert in zip(table, own, at_stage, at_expert, strict=True):
        if expert is None:
            names, tensors = " or ".join(entry.parameters), ", ".join(entry.tensors)
            raise ValueError(f"the model has no parameter {names}, which would hold {tensors}")
        shard = None if parameter is None else merged(parameter).detach().to(dtype)
        if stage is not None:
            shard = _broadcast(shard, *stage, dtype, stages)
        yield shard if entry.expert is None and shard is not None else _broadcast(shard, *expert, dtype, experts)


def _places(shapes: Sequence[Sequence[int] | None], group: dist.ProcessGroup) -> list[tuple[int, tuple[int, ...]] | None]:
    """For each tensor, of which a rank gives the shape if it holds it: one rank of the group that does, and the shape; None
    where none does. A collective."""
    found = torch.zeros(len(shapes), 3, dtype=torch.int64)
    for row, shape in zip(found, shapes, strict=True):
        if shape is not None:
            row[: 1 + len(shape)] = torch.tensor([group.rank() + 1, *shape])
    if group.size() > 1:
        found = found.to(device.device())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [(holder - 1, tuple(n for n in shape if n)) if holder else None for holder, *shape in found.tolist()]


def _broadcast(
    shard: Tensor | None, holder: int, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup
) -> Tensor:
    """The tensor of rank `holder` of the group, on every rank of it."""
    if shard is None:
        shard = torch.empty(shape, dtype=dtype, device=device.device())
    if group.size() > 1:
        shard = shard.contiguous()
        dist.broadcast(shard, group=group, group_src=holder)
    return shard


def _name(entry: Entry, parameters: Mapping[str, torch.nn.Parameter]) -> str | None:
    """The entry's parameter among this rank's; None where another one holds it."""
    return next((name for name in entry.parameters if name in parameters), None)


def _expect(stream: Iterator[tuple[str, Sliced]], name: str) -> Sliced:
    found, tensor = next(stream, ("nothing", torch.empty(0)))
    if found != name:
        raise ValueError(f"expected the tensor {name}, got {found}")
    return tensor
