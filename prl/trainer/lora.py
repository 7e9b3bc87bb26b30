"""Low-rank adapters (LoRA) on the attention and feed-forward layers: of W + (32 / rank) B A only A [rank, inputs] and
B [outputs, rank] are trained. B starts at 0, so that the model starts as it was.

The sum is taken before the product with the input, and rounded to the weights' dtype: the trainer computes with what is
exported and sent to the samplers. That keeps a merged copy of the weights until the backward pass, but with
train.recompute: full.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from prl.trainer import device
from prl.trainer.table import ADAPTER_SCALE


def add_adapters(gpt: GPTModel, rank: int) -> None:
    """Freeze a chunk of a dense model but for new adapters, which are the same however ranks share the model. Raises ValueError
    where its layers cannot have them."""
    if device.has_transformer_engine() or gpt.config.num_moe_experts:
        raise ValueError("train.lora_rank: adapters are for dense models without Transformer Engine; set it to 0")
    gpt.requires_grad_(False)
    for layer in gpt.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
        for number, linear in enumerate(linears):
            _add_adapter(linear, rank, gated=linear is mlp.linear_fc1, seed=len(linears) * layer.layer_number + number)
    if gpt.pre_process:  # else recomputed layers would see no input that has a gradient, and compute none
        gpt.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_(torch.is_grad_enabled()))


def merged(parameter: Tensor) -> Tensor:
    """A weight with its adapter, if it has one."""
    linear = getattr(parameter, "adapted", None)
    return parameter if linear is None else _merged(linear)


def is_adapter(name: str) -> bool:
    """Whether this is a parameter of an adapter."""
    return name.endswith((".lora_a", ".lora_b"))


def _add_adapter(linear: Any, rank: int, *, gated: bool, seed: int) -> None:
    group = parallel_state.get_tensor_model_parallel_group()
    by_rows = isinstance(linear, ColumnParallelLinear)
    outputs, inputs = linear.weight.shape
    if not by_rows:
        inputs *= group.size()
    a = torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=torch.Generator().manual_seed(seed))
    if not by_rows:
        a = a.chunk(group.size(), 1)[group.rank()]
    linear.lora_a = torch.nn.Parameter(a.contiguous().to(linear.weight))
    linear.lora_b = torch.nn.Parameter(linear.weight.new_zeros(outputs, rank))
    split = linear.lora_b if by_rows else linear.lora_a  # the other one is whole on every rank
    set_tensor_model_parallel_attributes(split, is_parallel=True, dim=0 if by_rows else 1, stride=1)
    linear.weight.adapted = linear
    linear._forward_impl = partial(_forward, linear)
    linear.sharded_state_dict = partial(_sharded_state, linear, gated)


def _merged(linear: Any) -> Tensor:
    a, b = linear.lora_a, linear.lora_b
    # What is whole has a share of its gradient from each rank.
    if isinstance(linear, ColumnParallelLinear):
        a = copy_to_tensor_model_parallel_region(a)
    else:
        b = copy_to_tensor_model_parallel_region(b)
    return torch.addmm(linear.weight, b, a, alpha=ADAPTER_SCALE / a.size(0))


def _forward(linear: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002  # by name
    output: Tensor = linear_with_grad_accumulation_and_async_allreduce(input, _merged(linear), *args, **kwargs)
    return output


def _sharded_state(
    linear: Any, gated: bool, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """In the form of Megatron's layers, with the adapter."""
    by_rows = isinstance(linear, ColumnParallelLinear)
    group = metadata["dp_cp_group"] if metadata else parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        linear.state_dict(prefix="", keep_vars=True),
        prefix,
        {"weight": 0, "bias": 0, "lora_b": 0} if by_rows else {"weight": 1, "lora_a": 1},
        sharded_offsets,
        tp_group=linear.tp_group,
        dp_cp_group=group,
    )
    if gated:  # as of the weight: the gates of all ranks, then what they are multiplied with
        key = f"{prefix}lora_b"
        state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets, tp_group=linear.tp_group, dp_group=group)
    return state
