"""Weights between Hugging Face's names and Megatron's tensor-parallel shards, for Qwen2, Qwen3 and Llama.

Both directions go through the same table, `entries`, in the same order. A full tensor never depends on the tensor parallelism.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.trainer import device
from prl.trainer.model import unwrap

# How shards make up the full tensor:
#   whole    every rank holds all of it
#   vocab    rows, padded at the end so that ranks hold equally many
#   columns  columns of the weight (Megatron's row-parallel layers split their input)
#   gate_up  two tensors, each split by rows, a rank's pieces one above the other
#   qkv      three tensors, fused by query group (its queries, its key, its value), then split by rows
Kind = Literal["whole", "vocab", "columns", "gate_up", "qkv"]

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+(?=\.)|(?<=\.experts\.linear_fc[12]\.weight)\d+$")


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter (by its name in the local layers, then in Transformer Engine's) and the tensors it holds."""

    parameters: tuple[str, ...]
    kind: Kind
    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    expert: bool = False  # of one expert, which is whole on one of the ranks that share a layer's experts


def entries(model: ModelConfig) -> list[Entry]:
    """The table of a model, in the order in which weights are loaded, exported and drawn."""
    hidden, head = model.hidden_size, model.head_dim
    queries, keys = model.heads * head, model.kv_heads * head
    table = [_entry(_EMBEDDING, "vocab", {"model.embed_tokens.weight": (model.vocabulary, hidden)})]
    for number in range(model.layers):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."

        def add(
            parameters: str, kind: Kind, tensors: Mapping[str, tuple[int, ...]], ours: str = ours, theirs: str = theirs
        ) -> None:
            names = " ".join(ours + name for name in parameters.split())
            table.append(_entry(names, kind, {theirs + name: shape for name, shape in tensors.items()}))

        attention, mlp = "self_attention.", "mlp."
        qkv = {"q": queries, "k": keys, "v": keys}
        add(f"input_layernorm.weight {attention}linear_qkv.layer_norm_weight", "whole", {"input_layernorm.weight": (hidden,)})
        add(f"{attention}linear_qkv.weight", "qkv", {f"self_attn.{x}_proj.weight": (rows, hidden) for x, rows in qkv.items()})
        if model.qkv_bias:
            add(f"{attention}linear_qkv.bias", "qkv", {f"self_attn.{x}_proj.bias": (rows,) for x, rows in qkv.items()})
        if model.qk_norm:
            add(f"{attention}q_layernorm.weight", "whole", {"self_attn.q_norm.weight": (head,)})
            add(f"{attention}k_layernorm.weight", "whole", {"self_attn.k_norm.weight": (head,)})
        add(f"{attention}linear_proj.weight", "columns", {"self_attn.o_proj.weight": (hidden, queries)})
        add(
            f"pre_mlp_layernorm.weight {mlp}linear_fc1.layer_norm_weight",
            "whole",
            {"post_attention_layernorm.weight": (hidden,)},
        )
        gate_up = {f"mlp.{x}_proj.weight": (model.ffn_size, hidden) for x in ("gate", "up")}
        add(f"{mlp}linear_fc1.weight", "gate_up", gate_up)
        add(f"{mlp}linear_fc2.weight", "columns", {"mlp.down_proj.weight": (hidden, model.ffn_size)})
    table.append(_entry("decoder.final_layernorm.weight", "whole", {"model.norm.weight": (hidden,)}))
    if not model.tied:
        table.append(_entry(_OUTPUT, "vocab", {"lm_head.weight": (model.vocabulary, hidden)}))
    return table


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of all weights, in the order of `export_weights`."""
    return {name: shape for entry in entries(model) for name, shape in zip(entry.tensors, entry.shapes, strict=True)}


@torch.no_grad()
def load_weights(chunks: Sequence[torch.nn.Module], model: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fill this rank's shards from full tensors, which must come in the order of `tensor_shapes`.

    Raises ValueError for a tensor that is out of order or of the wrong shape, and for a parameter that the table does not know.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    parameters = named_parameters(chunks)
    copy = parameters.pop(_OUTPUT, None) if model.tied else None  # the last pipeline stage's own, of the embedding
    stream = iter(tensors)
    for entry in entries(model):
        full = [_expect(stream, name, shape) for name, shape in zip(entry.tensors, entry.shapes, strict=True)]
        name = _name(entry, parameters)
        holders = [parameters.pop(name)] if name else []
        if copy is not None and _EMBEDDING in entry.parameters:
            holders.append(copy)
        if holders:
            ranks, rank = (1, 0) if entry.expert else (group.size(), group.rank())
            shard = _shard(entry.kind, full, model, ranks, rank)
            for parameter in holders:
                parameter.copy_(shard)
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
        if group.size() > 1 and entry.kind != "whole" and not entry.expert:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(shards, shard.contiguous(), group=group)
        yield from zip(entry.tensors, _full(entry.kind, shards, model), strict=True)


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by Megatron's names, with layers and experts numbered over all pipeline stages and ranks."""
    found: dict[str, torch.nn.Parameter] = {}
    for chunk in chunks:
        gpt = unwrap(chunk)
        experts = (gpt.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        first_expert = experts * parallel_state.get_expert_model_parallel_rank()
        first_layer = gpt.decoder.layers[0].layer_number - 1
        for name, parameter in gpt.named_parameters():
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
        shard = None if parameter is None else parameter.detach().to(dtype)
        if stage is not None:
            shard = _broadcast(shard, *stage, dtype, stages)
        yield _broadcast(shard, *expert, dtype, experts) if entry.expert or shard is None else shard


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


def random_weights(model: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Full float32 tensors drawn one after another from one generator, so that they are the same for any tensor parallelism:
    matrices normal with standard deviation 0.02, norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in tensor_shapes(model).items():
        if name.endswith(".bias"):
            yield name, torch.zeros(shape)
        elif len(shape) == 1:
            yield name, torch.ones(shape)
        else:
            yield name, torch.empty(shape).normal_(0.0, 0.02, generator=generator)


def _entry(parameters: str, kind: Kind, tensors: Mapping[str, tuple[int, ...]]) -> Entry:
    return Entry(tuple(parameters.split()), kind, tuple(tensors), tuple(tensors.values()))


def _name(entry: Entry, parameters: Mapping[str, torch.nn.Parameter]) -> str | None:
    """The entry's parameter among this rank's; None where another one holds it."""
    return next((name for name in entry.parameters if name in parameters), None)


def _expect(stream: Iterator[tuple[str, Tensor]], name: str, shape: tuple[int, ...]) -> Tensor:
    found, tensor = next(stream, ("nothing", torch.empty(0)))
    if found != name or tuple(tensor.shape) != shape:
        raise ValueError(f"expected the tensor {name} of shape {list(shape)}, got {found} of shape {list(tensor.shape)}")
    return tensor


def _shard(kind: Kind, full: list[Tensor], model: ModelConfig, ranks: int, rank: int) -> Tensor:
    if kind == "vocab":
        padding = model.padded_vocabulary(ranks) - model.vocabulary
        return torch.nn.functional.pad(full[0], (0, 0, 0, padding)).chunk(ranks, 0)[rank]
    if kind == "columns":
        return full[0].chunk(ranks, 1)[rank]
    if kind == "gate_up":
        return torch.cat([x.chunk(ranks, 0)[rank] for x in full])
    if kind == "qkv":
        return _fuse_qkv(full, model).chunk(ranks, 0)[rank]
    return full[0]


def _full(kind: Kind, shards: list[Tensor], model: ModelConfig) -> list[Tensor]:
    if kind == "vocab":
        return [torch.cat(shards)[: model.vocabulary]]
    if kind == "columns":
        return [torch.cat(shards, 1)]
    if kind == "gate_up":
        gates, ups = zip(*(shard.chunk(2, 0) for shard in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]
    if kind == "qkv":
        return _split_qkv(torch.cat(shards), model)
    return [shards[0]]


def _fuse_qkv(tensors: list[Tensor], model: ModelConfig) -> Tensor:
    tail = tensors[0].shape[1:]
    return torch.cat([x.view(model.kv_heads, -1, *tail) for x in tensors], 1).reshape(-1, *tail)


def _split_qkv(fused: Tensor, model: ModelConfig) -> list[Tensor]:
    tail = fused.shape[1:]
    widths = [model.heads // model.kv_heads * model.head_dim, model.head_dim, model.head_dim]
    return [x.reshape(-1, *tail) for x in torch.split(fused.view(model.kv_heads, sum(widths), *tail), widths, 1)]
