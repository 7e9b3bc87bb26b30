"""Models and layouts for plans of lanes, what ranks and workers hold of them written down a second time with numpy, and a
transfer within one process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prl.config.hf_config import ModelConfig, model_config
from prl.config.layout import Layout
from prl.config.tensors import tensor_shapes
from prl.weights.plan import LanePlan, Tile, lane_buckets, schedule
from prl.weights.shards import Held, Shard, sampler_shards, trainer_shards

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 131,  # padded by trainers to a multiple of their ranks, by samplers to 192
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
RAW: dict[str, dict[str, Any]] = {
    "biases_tied": BASE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "plain": BASE | {"model_type": "llama", "num_key_value_heads": 8},
    "one_key": BASE | {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": None},
    "norms_tied": BASE | {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "experts": BASE | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 16},
}
MODELS = {name: model_config(raw) for name, raw in RAW.items()}
TENSOR = (1, 2, 4, 8)

Arrays = dict[str, np.ndarray]


def layouts(model: ModelConfig, tensor: int) -> list[tuple[Layout, int]]:
    """With their numbers of trainer ranks: one and two stages, in turns too, one and two copies, experts dealt or not."""
    found = []
    for stages, turns in ((1, 1), (2, 1), (2, 2)):
        for expert in (1, 2, 4) if model.experts else (1,):
            layout = Layout(tensor=tensor, pipeline=stages, virtual=turns, context=1, expert=expert)
            found += [(layout, layout.unit * copies) for copies in ((1, 2) if expert == 1 else (1,))]
    return found


def numbered_tensors(model: ModelConfig) -> Arrays:
    """No two elements are alike."""
    found, first = {}, 0
    for name, shape in tensor_shapes(model).items():
        size = int(np.prod(shape))
        found[name] = np.arange(first, first + size, dtype=np.int64).reshape(shape)
        first += size
    return found


# --- what Megatron's ranks hold, from the full tensors ---


def rank_parameters(model: ModelConfig, layout: Layout, ranks: int, full: Mapping[str, np.ndarray]) -> list[Arrays]:
    """By the names of Megatron's local layers, numbered over all stages and ranks."""
    copies = ranks // (layout.tensor * layout.context * layout.pipeline)
    expert_copies = ranks // (layout.expert * layout.pipeline)
    tensor_of = np.broadcast_to(np.arange(layout.tensor), (layout.pipeline, copies, layout.context, layout.tensor)).reshape(-1)
    expert_of = np.broadcast_to(np.arange(layout.expert), (layout.pipeline, expert_copies, layout.expert)).reshape(-1)
    stage_of = np.repeat(np.arange(layout.pipeline), ranks // layout.pipeline)
    where = zip(stage_of.tolist(), tensor_of.tolist(), expert_of.tolist(), strict=True)
    return [_of_rank(model, layout, full, *place) for place in where]


def _of_rank(model: ModelConfig, layout: Layout, full: Mapping[str, np.ndarray], stage: int, rank: int, expert: int) -> Arrays:
    def rows(matrix: np.ndarray) -> np.ndarray:
        return np.split(matrix, layout.tensor)[rank]

    def vocabulary(matrix: np.ndarray) -> np.ndarray:
        padding = -len(matrix) % layout.tensor
        return rows(np.concatenate([matrix, np.full((padding, *matrix.shape[1:]), -1)]))

    def gate_up(path: str, split: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return np.concatenate([split(full[f"{path}.gate_proj.weight"]), split(full[f"{path}.up_proj.weight"])])

    def fused(path: str, leaf: str) -> np.ndarray:
        q, k, v = (np.split(full[f"{path}.{x}_proj.{leaf}"], model.kv_heads) for x in "qkv")
        return rows(np.concatenate([part for group in zip(q, k, v, strict=True) for part in group]))

    found: Arrays = {}
    first, last = stage == 0, stage == layout.pipeline - 1
    if first:
        found["embedding.word_embeddings.weight"] = vocabulary(full["model.embed_tokens.weight"])
    chunk = model.layers // (layout.pipeline * layout.virtual)
    turns = [turn * model.layers // layout.virtual + stage * chunk for turn in range(layout.virtual)]
    for number in (start + within for start in turns for within in range(chunk)):
        ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        found[f"{ours}.input_layernorm.weight"] = full[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.pre_mlp_layernorm.weight"] = full[f"{theirs}.post_attention_layernorm.weight"]
        for leaf in ("weight", "bias") if model.architecture == "qwen2" else ("weight",):
            found[f"{ours}.self_attention.linear_qkv.{leaf}"] = fused(f"{theirs}.self_attn", leaf)
        if model.architecture.startswith("qwen3"):
            for x in "qk":
                found[f"{ours}.self_attention.{x}_layernorm.weight"] = full[f"{theirs}.self_attn.{x}_norm.weight"]
        output = np.split(full[f"{theirs}.self_attn.o_proj.weight"], layout.tensor, 1)[rank]
        found[f"{ours}.self_attention.linear_proj.weight"] = output
        if not model.experts:
            found[f"{ours}.mlp.linear_fc1.weight"] = gate_up(f"{theirs}.mlp", rows)
            found[f"{ours}.mlp.linear_fc2.weight"] = np.split(full[f"{theirs}.mlp.down_proj.weight"], layout.tensor, 1)[rank]
            continue
        found[f"{ours}.mlp.router.weight"] = full[f"{theirs}.mlp.gate.weight"]
        for one in np.split(np.arange(model.experts), layout.expert)[expert].tolist():
            path, local = f"{theirs}.mlp.experts.{one}", f"{ours}.mlp.experts.local_experts.{one}"
            found[f"{local}.linear_fc1.weight"] = gate_up(path, lambda matrix: matrix)
            found[f"{local}.linear_fc2.weight"] = full[f"{path}.down_proj.weight"]
    if last:
        found["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not model.tied:
            found["output_layer.weight"] = vocabulary(full["lm_head.weight"])
        elif not first:
            found["output_layer.weight"] = vocabulary(full["model.embed_tokens.weight"])
    return found


# --- what vLLM's workers hold ---


def worker_tensors(model: ModelConfig, workers: int, full: Mapping[str, np.ndarray]) -> list[Arrays]:
    """By Hugging Face's names; a tensor of which a worker has nothing has no rows."""
    found: list[Arrays] = [{} for _ in range(workers)]
    for name, tensor in full.items():
        if "embed_tokens" in name or "lm_head" in name:
            padding = np.full((-len(tensor) % 64, tensor.shape[1]), -1)
            parts = [part[part[:, 0] >= 0] for part in np.split(np.concatenate([tensor, padding]), workers)]
        elif ("k_proj" in name or "v_proj" in name) and workers > model.kv_heads:
            parts = [part for part in np.split(tensor, model.kv_heads) for _ in range(workers // model.kv_heads)]
        elif "o_proj" in name or "down_proj" in name:
            parts = np.split(tensor, workers, 1)
        elif "_proj" in name:
            parts = np.split(tensor, workers)
        else:
            parts = [tensor] * workers
        for worker, part in enumerate(parts):
            found[worker][name] = part
    return found


# --- a transfer ---


@dataclass
class Staged:
    """What a worker has received: the shards of its tensors as matrices, and how often each element came."""

    shards: dict[int, Shard]
    contents: dict[int, np.ndarray]
    counts: dict[int, np.ndarray]


def transfer(
    plan: LanePlan,
    parameters: Sequence[Mapping[str, np.ndarray]],
    held: Sequence[Sequence[Held]],
    shards: Sequence[Sequence[Shard]],
    bucket_bytes: int,
) -> list[Staged]:
    """Every bucket of the schedule, packed by its root from its own parameters alone and unpacked by its lane."""
    lanes = []
    for own in shards:
        by_tensor = {shard.tile.tensor: shard for shard in own}
        shapes = {number: (shard.tile.rows, shard.tile.columns) for number, shard in by_tensor.items()}
        dtype = next(iter(parameters[0].values())).dtype
        empty = {number: np.zeros(shape, dtype) for number, shape in shapes.items()}
        lanes.append(Staged(by_tensor, empty, {number: np.zeros(shape, int) for number, shape in shapes.items()}))
    of_tensor: list[dict[int, list[Held]]] = []
    for rank in held:
        of_tensor.append({})
        for one in rank:
            of_tensor[-1].setdefault(one.tile.tensor, []).append(one)
    buckets = {(leg.root, leg.lane): lane_buckets(plan, leg, bucket_bytes) for leg in plan.legs}
    for root, lane, number in schedule(plan, bucket_bytes):
        tiles = buckets[root, lane][number]
        wire = np.concatenate([_packed(tile, of_tensor[root][tile.tensor], parameters[root]) for tile in tiles])
        at = 0
        for tile in tiles:
            index = lanes[lane].shards[tile.tensor].index(tile)
            target = lanes[lane].contents[tile.tensor][index]
            assert target.shape == (tile.rows, tile.columns)
            target[...] = wire[at : at + target.size].reshape(target.shape)
            lanes[lane].counts[tile.tensor][index] += 1
            at += target.size
    return lanes


def _packed(tile: Tile, held: Sequence[Held], parameters: Mapping[str, np.ndarray]) -> np.ndarray:
    (source,) = (one for one in held if tile.within(one.tile) == tile)
    (name,) = (name for name in source.parameters if name in parameters)
    parameter = parameters[name]
    found = parameter.reshape(len(parameter), -1)[source.index(tile)]
    assert found.shape == (tile.rows, tile.columns)
    return found.reshape(-1)


def check_transfer(plan: LanePlan, model: ModelConfig, layout: Layout, bucket_bytes: int, full: Arrays) -> None:
    """Every element of each worker's shards comes once, from where it is."""
    parameters = rank_parameters(model, layout, plan.trainer_ranks, full)
    held, shards = trainer_shards(model, layout, plan.trainer_ranks), sampler_shards(model, plan.lanes)
    staged = transfer(plan, parameters, held, shards, bucket_bytes)
    for lane, expected in zip(staged, worker_tensors(model, plan.lanes, full), strict=True):
        for number, (name, part) in enumerate(expected.items()):
            if part.size:
                np.testing.assert_array_equal(lane.contents[number], part.reshape(len(part), -1), err_msg=name)
                assert (lane.counts[number] == 1).all(), name
            else:
                assert number not in lane.shards
