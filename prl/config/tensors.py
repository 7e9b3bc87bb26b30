"""Which of Hugging Face's tensors make up which of Megatron's parameters, for Qwen2, Qwen3 (also with experts), Llama and
Mistral: names and shapes. No torch.

Whatever reads or writes weights goes through the same table, `entries`, in the same order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prl.config.hf_config import ModelConfig

# How shards make up the full tensor:
#   whole    every rank holds all of it
#   vocab    rows, padded at the end so that ranks hold equally many
#   columns  columns of the weight (Megatron's row-parallel layers split their input)
#   gate_up  two tensors, each split by rows, a rank's pieces one above the other
#   qkv      three tensors, fused by query group (its queries, its key, its value), then split by rows
Kind = Literal["whole", "vocab", "columns", "gate_up", "qkv"]

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter (by its name in the local layers, then in Transformer Engine's) and the tensors it holds."""

    parameters: tuple[str, ...]
    kind: Kind
    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layer: int | None = None
    expert: int | None = None  # its number in the layer; it is whole on one of the ranks that share a layer's experts


def entries(model: ModelConfig) -> list[Entry]:
    """The table of a model, in the order in which weights are loaded, exported and drawn."""
    hidden = model.hidden_size
    table = [Entry((EMBEDDING,), "vocab", ("model.embed_tokens.weight",), ((model.vocabulary, hidden),))]
    for number in range(model.layers):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        for entry in _layer(model):
            parameters = tuple(ours + name for name in entry.parameters)
            tensors = tuple(theirs + name for name in entry.tensors)
            table.append(Entry(parameters, entry.kind, tensors, entry.shapes, number, entry.expert))
    table.append(Entry(("decoder.final_layernorm.weight",), "whole", ("model.norm.weight",), ((hidden,),)))
    if not model.tied:
        table.append(Entry((OUTPUT,), "vocab", ("lm_head.weight",), ((model.vocabulary, hidden),)))
    return table


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of all weights, in the table's order."""
    return {name: shape for entry in entries(model) for name, shape in zip(entry.tensors, entry.shapes, strict=True)}


def _layer(model: ModelConfig) -> Iterator[Entry]:
    """The entries of one layer, by their names within it."""
    hidden, head = model.hidden_size, model.head_dim
    queries, keys = model.heads * head, model.kv_heads * head
    qkv = {"q": queries, "k": keys, "v": keys}
    attention = "self_attention."
    yield _entry(
        f"input_layernorm.weight {attention}linear_qkv.layer_norm_weight", "whole", {"input_layernorm.weight": (hidden,)}
    )
    projections = {f"self_attn.{x}_proj.weight": (rows, hidden) for x, rows in qkv.items()}
    yield _entry(f"{attention}linear_qkv.weight", "qkv", projections)
    if model.qkv_bias:
        yield _entry(f"{attention}linear_qkv.bias", "qkv", {f"self_attn.{x}_proj.bias": (rows,) for x, rows in qkv.items()})
    if model.qk_norm:
        yield _entry(f"{attention}q_layernorm.weight", "whole", {"self_attn.q_norm.weight": (head,)})
        yield _entry(f"{attention}k_layernorm.weight", "whole", {"self_attn.k_norm.weight": (head,)})
    yield _entry(f"{attention}linear_proj.weight", "columns", {"self_attn.o_proj.weight": (hidden, queries)})
    norm = {"post_attention_layernorm.weight": (hidden,)}
    yield _entry("pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight", "whole", norm)
    if model.experts:
        yield _entry("mlp.router.weight", "whole", {"mlp.gate.weight": (model.experts, hidden)})
        for number in range(model.experts):
            local, grouped = f"mlp.experts.local_experts.{number}.linear_fc", "mlp.experts.linear_fc"
            gate_up, down = _feed_forward(f"mlp.experts.{number}.", hidden, model.expert_ffn_size)
            yield _entry(f"{local}1.weight {grouped}1.weight{number}", "gate_up", gate_up, expert=number)
            yield _entry(f"{local}2.weight {grouped}2.weight{number}", "columns", down, expert=number)
    else:
        gate_up, down = _feed_forward("mlp.", hidden, model.ffn_size)
        yield _entry("mlp.linear_fc1.weight", "gate_up", gate_up)
        yield _entry("mlp.linear_fc2.weight", "columns", down)


def _feed_forward(prefix: str, hidden: int, inner: int) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    gate_up: dict[str, tuple[int, ...]] = {f"{prefix}{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
    return gate_up, {f"{prefix}down_proj.weight": (hidden, inner)}


def _entry(parameters: str, kind: Kind, tensors: Mapping[str, tuple[int, ...]], *, expert: int | None = None) -> Entry:
    return Entry(tuple(parameters.split()), kind, tuple(tensors), tuple(tensors.values()), expert=expert)
