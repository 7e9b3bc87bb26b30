"""Replay of the samplers' routing: each token goes to the experts that it went to as it was sampled, so that trainer and
sampler compute the same function of the weights. How much each expert counts is the trainer's own, with its gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.streams.records import MicroBatch

TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class RoutingReplay:
    """Stands in one layer's router for Megatron's RouterReplay, which cannot tell micro-batches apart."""

    def __init__(self) -> None:
        self.experts: Tensor | None = None  # [tokens of this rank, experts a token] int64; rows of -1: the router's own choice

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.experts is None:
            return values, own
        experts = torch.where(self.experts < 0, own, self.experts)
        return scores.gather(1, experts), experts


def check_routings(batch: MicroBatch, model: ModelConfig) -> None:
    """Raises ValueError where the samplers' routings are not those of this model."""
    if batch.routings is None:
        return
    found, wanted, last = batch.routings.shape[1:], (model.layers, model.experts_per_token), int(batch.routings.max())
    if found != wanted or last >= model.experts:
        raise ValueError(
            f"routings of {found[0]} layers to {found[1]} experts a token, up to number {last}; the model has "
            f"{wanted[0]} layers, {wanted[1]} experts a token, {model.experts} in all"
        )


def replay_routings(gpt: GPTModel) -> None:
    """Have the routers of a model with experts follow `PackedSequences.routings` of what they are given, where it has them. In
    evaluation, which a reference always is in, they choose for themselves."""
    for layer in gpt.decoder.layers:
        replay = RoutingReplay()
        layer.mlp.router.router_replay = replay
        layer.register_forward_pre_hook(partial(_give, replay), with_kwargs=True)


def _give(replay: RoutingReplay, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    routings: Tensor | None = kwargs["packed_seq_params"].routings
    if routings is None or not layer.training:
        replay.experts = None
        return
    if layer.config.recompute_granularity == "selective" and layer.config.pipeline_model_parallel_size > 1:
        raise ValueError(
            "train.recompute = selective with pipeline stages: experts would be computed again with the routing of another "
            "micro-batch; take none or full, or micro-batches without the samplers' routings"
        )
    experts = routings[:, layer.layer_number - 1]
    if layer.config.sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        experts = experts.chunk(group.size())[group.rank()]
    replay.experts = experts
