"""A value head: one number a token, linear in the last hidden states of the policy's model. It is trained and checkpointed with
the model, but is no part of what samplers get or an export holds.

It starts at 0. Its weight has the model's dtype (and like every weight a copy in float32 in the optimizer), its values are
float32. The ranks of the last pipeline stage each hold all of it; where they split the sequence, each computes the values of
its own tokens, and Megatron sums the weight's gradient over them.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from prl.trainer import device


class ValueHead(torch.nn.Module):
    """[T, width] -> [T]. Its weight is a vector, and so does not decay."""

    def __init__(self, width: int, dtype: torch.dtype, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width, dtype=dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.weight.value_head = True  # type: ignore[attr-defined]  # by this the optimizer knows it

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = _Values.apply(hidden, self.weight)  # type: ignore[no-untyped-call]
        return values


def add_value_head(gpt: GPTModel) -> None:
    """To the chunk with the last layer."""
    config = gpt.config
    gpt.value_head = ValueHead(config.hidden_size, config.params_dtype, sequence_parallel=config.sequence_parallel)


def is_value_head(name: str) -> bool:
    """Whether this is the parameter of a value head."""
    return name.endswith("value_head.weight")


def token_values(gpt: GPTModel, hidden: Tensor, *, stop_gradient: bool) -> Tensor:
    """The value [T] of what precedes each token that is predicted, float32, from what `head.hidden_states` gave for the chunk
    with the last layer. With sequence parallelism a collective of the tensor-parallel ranks. `stop_gradient`: none goes on into
    the model."""
    values: Tensor = gpt.value_head((hidden.detach() if stop_gradient else hidden).squeeze(1))
    if gpt.config.sequence_parallel:
        # All ranks make the same loss of all values: a rank's share of the gradient is that of its own tokens, not a sum.
        values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
    return values


class _Values(torch.autograd.Function):
    """The product in float32, without a copy of the hidden states in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight = weight
        return device.product(hidden, weight[:, None], torch.promote_types(weight.dtype, torch.float32)).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, of_values: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (hidden,), weight = ctx.saved_tensors, ctx.weight
        factors = of_values.to(weight.dtype)
        of_hidden = torch.outer(factors, weight) if ctx.needs_input_grad[0] else None
        main = getattr(weight, "main_grad", None)  # Megatron's buffer, in float32: a micro-batch's share is not rounded
        if main is None:
            return of_hidden, device.product(factors[None], hidden, of_values.dtype).squeeze(0).to(weight.dtype)
        device.add_product(main[None], factors[None], hidden)
        weight.grad_added_to_main_grad = True
        return of_hidden, None
