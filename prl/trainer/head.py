"""From packed tokens to log-probabilities: the model up to its last hidden states, then its output layer, chunk by chunk.

Logits exist for one chunk of tokens at a time: they are computed once in the forward and once more in the backward pass, where
the gradient of the output layer's weight is summed over the chunks in float32, straight into Megatron's buffer. The vocabulary
may be split over tensor-parallel ranks: two small all-reduces a call (a maximum and three sums a token), and one of the hidden
states' gradient.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import get_model_config
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.trainer import device
from prl.trainer.batch import Batch
from prl.trainer.model import unwrap
from prl.trainer.options import TrainOptions


@dataclass(frozen=True)
class Head:
    """How the output layer is applied."""

    vocabulary: int  # the true size: rows of the weight from there on are padding and take no part
    group: dist.ProcessGroup  # ranks that split the vocabulary
    chunk_elements: int  # a chunk's logits on a rank; up to three float32 buffers of that size are in use at once
    float32: bool = False  # logits are not rounded to the weight's dtype


def hidden_states(model: torch.nn.Module, batch: Batch) -> Tensor:
    """What a chunk of layers makes of a micro-batch, [T, 1, width] ([T / ranks, 1, width] with sequence parallelism): for the
    next pipeline stage, or on the last one for the output layer, which is not applied."""
    half = {"fp32_output": False} if get_model_config(model).bf16 else {}
    output: Tensor = model(
        batch.tokens[None],
        batch.positions[None],
        None,
        packed_seq_params=batch.sequences,
        output_processor=lambda *, hidden_states, **unused: hidden_states,
        **half,
    )
    return output


def token_logprobs(
    model: torch.nn.Module, hidden: Tensor, targets: Tensor, config: ModelConfig, options: TrainOptions
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy [T] of each token, from what `hidden_states` gave for `model`, the last pipeline stage's
    chunk of layers. A collective of the tensor-parallel ranks, and so is the backward pass."""
    gpt = unwrap(model)
    weight = gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else gpt.output_layer.weight
    if gpt.config.sequence_parallel:
        whole = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    else:
        whole = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    head = Head(
        vocabulary=config.vocabulary,
        group=parallel_state.get_tensor_model_parallel_group(),
        chunk_elements=options.head_chunk_mib << 18,
        float32=options.head_dtype == "float32",
    )
    return logprobs_and_entropies(whole.squeeze(1), weight, targets, head)


def logprobs_and_entropies(hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """For each token log p(target) and the entropy in nats, both [T] float32 (float64 where the weight is) with gradients.

    hidden [T, width], equal on all ranks of `head.group`: its gradient is this rank's share and must be summed over them.
    weight [padded vocabulary / ranks, width]: this rank's rows. Where it has a `main_grad` its gradient is added to that,
    otherwise it is returned to autograd. targets [T] int64, ids of the whole vocabulary.
    """
    result: tuple[Tensor, Tensor] = _LogprobsAndEntropies.apply(hidden, weight, targets, head)  # type: ignore[no-untyped-call]
    return result


class _LogprobsAndEntropies(torch.autograd.Function):
    # With l the logits, Z = sum e^l and p = e^l / Z:  log p(y) = l_y - log Z  and  H = log Z - sum p l.
    # Gradients to l:  of log p(y): [y] - p;  of H: -p (log p + H).

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        first = weight.size(0) * head.group.rank()
        columns = min(max(head.vocabulary - first, 0), weight.size(0))  # the rest is padding
        local = targets - first
        mine = (local >= 0) & (local < columns)
        local = local.clamp(0, max(columns - 1, 0))

        dtype = torch.promote_types(weight.dtype, torch.float32)
        # Of the part of the distribution that this rank has: log Z, the entropy were it all of it, and the targets' logits.
        log_z = torch.full(targets.shape, torch.finfo(dtype).min, dtype=dtype, device=hidden.device)
        entropies, chosen = torch.zeros_like(log_z), torch.zeros_like(log_z)
        for rows in _chunks(len(hidden), columns, head):
            x = _logits(hidden[rows], weight[:columns], head)
            p = x.softmax(-1, dtype)
            log_z[rows] = x.amax(-1) - p.amax(-1).log()
            entropies[rows] = log_z[rows] - p.mul_(x).sum(-1)
            chosen[rows] = x.gather(-1, local[rows, None]).squeeze(-1).to(dtype)
            del x, p  # or they would be there until the next chunk has its own

        # The parts together: Z = sum of their Z;  H = sum over them of Z_i / Z (H_i - log (Z_i / Z)).
        reference = log_z.clone()
        _all_reduce(reference, head.group, dist.ReduceOp.MAX)
        shift = log_z - reference
        share = shift.exp()
        sums = torch.stack([share, share * (entropies - shift), torch.where(mine, chosen - reference, 0)])
        _all_reduce(sums, head.group, dist.ReduceOp.SUM)
        log_z = sums[0].log()
        entropies = sums[1] / sums[0] + log_z
        ctx.save_for_backward(hidden, local, mine, log_z + reference, entropies)
        ctx.weight, ctx.head, ctx.columns = weight, head, columns
        ctx.set_materialize_grads(False)
        return sums[2] - log_z, entropies

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, local, mine, log_z, entropies = ctx.saved_tensors
        weight = ctx.weight[: ctx.columns]
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(log_z)
        of_targets = of_logprobs * mine
        of_hidden = torch.zeros_like(hidden)
        of_weight = _weight_gradient(ctx.weight) if ctx.needs_input_grad[1] else None
        used = (of_logprobs if of_entropies is None else of_logprobs.abs() + of_entropies.abs()).nonzero().squeeze(-1)
        for part in _chunks(len(used), ctx.columns, ctx.head):
            rows = used[part]  # not of prompts, nor of tokens that a bound of the loss limits
            x = _logits(hidden[rows], weight, ctx.head)
            logp = torch.sub(x, log_z[rows, None], out=x if x.dtype == log_z.dtype else None)
            if of_entropies is None:
                p, factor = logp.exp_(), (-of_logprobs[rows, None]).expand_as(logp)
            else:
                p = logp.exp()
                factor = logp.add_(entropies[rows, None]).mul_(-of_entropies[rows, None]).sub_(of_logprobs[rows, None])
            target = local[rows, None]  # whose p may be all but 1: it is not to be rounded before the 1 is added
            exact = p.gather(-1, target) * factor.gather(-1, target) + of_targets[rows, None]
            of_logits = torch.mul(p, factor, out=p if p.dtype == weight.dtype else torch.empty_like(p, dtype=weight.dtype))
            of_logits.scatter_(-1, target, exact.to(weight.dtype))
            del x, logp, p, factor
            of_hidden[rows] = of_logits @ weight
            if of_weight is not None:
                device.add_product(of_weight[: ctx.columns], of_logits.t(), hidden[rows])
            del of_logits
        if of_weight is None:
            return of_hidden, None, None, None
        if of_weight is getattr(ctx.weight, "main_grad", None):
            ctx.weight.grad_added_to_main_grad = True
            return of_hidden, None, None, None
        return of_hidden, of_weight.to(weight.dtype), None, None


def _weight_gradient(weight: Tensor) -> Tensor:
    main: Tensor | None = getattr(weight, "main_grad", None)
    return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) if main is None else main


def _logits(hidden: Tensor, weight: Tensor, head: Head) -> Tensor:
    dtype = torch.promote_types(weight.dtype, torch.float32) if head.float32 else weight.dtype
    return device.product(hidden, weight.t(), dtype)


def _chunks(tokens: int, columns: int, head: Head) -> list[slice]:
    """None for a rank that has only padding."""
    rows = max(1, head.chunk_elements // max(columns, 1))
    return [slice(start, start + rows) for start in range(0, tokens, rows) if columns]


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=group)
