"""Log-probabilities and entropies from logits whose vocabulary is split over tensor-parallel ranks.

Two small all-reduces a call (a maximum and three sums a token) and none in the backward pass. Work in float32 goes chunk by
chunk along the sequence, so that no second copy of the logits is ever alive but for their gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32


def logprobs_and_entropies(logits: Tensor, targets: Tensor, vocabulary: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """For each token log p(target) and the entropy in nats, both [T] float32 with gradients.

    logits [T, padded vocabulary / ranks]: this rank's columns. targets [T] int64, ids of the whole vocabulary. `vocabulary` is
    the true size: columns from there on are padding and take no part.
    """
    result: tuple[Tensor, Tensor] = _LogprobsAndEntropies.apply(logits, targets, vocabulary, group)  # type: ignore[no-untyped-call]
    return result


class _LogprobsAndEntropies(torch.autograd.Function):
    # With l the logits, Z = sum e^l and p = e^l / Z:  log p(y) = l_y - log Z  and  H = log Z - sum p l.
    # Gradients to l:  of log p(y): [y] - p;  of H: -p (log p + H).

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        width = logits.size(-1)
        first = width * group.rank()
        columns = min(max(vocabulary - first, 0), width)  # the rest is padding
        local = targets - first
        mine = (local >= 0) & (local < columns)
        local = local.clamp(0, width - 1)

        if columns:
            largest = logits[:, :columns].amax(-1).float()
        else:
            largest = logits.new_full((logits.size(0),), -torch.inf, dtype=torch.float32)
        _all_reduce(largest, group, dist.ReduceOp.MAX)
        sums = torch.zeros(3, logits.size(0), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits):
            x = logits[rows, :columns].float() - largest[rows, None]
            e = x.exp()
            sums[0, rows] = e.sum(-1)
            sums[1, rows] = (e * x).sum(-1)
        sums[2] = torch.where(mine, logits.gather(-1, local[:, None]).squeeze(-1).float() - largest, torch.zeros_like(largest))
        _all_reduce(sums, group, dist.ReduceOp.SUM)
        log_z = sums[0].log()
        entropies = log_z - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, mine, log_z + largest, entropies)
        ctx.columns = columns
        return sums[2] - log_z, entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor, None, None, None]:
        logits, local, mine, log_z, entropies = ctx.saved_tensors
        gradient = torch.zeros_like(logits) if ctx.columns < logits.size(-1) else torch.empty_like(logits)
        for rows in _chunks(logits):
            logp = logits[rows, : ctx.columns].float() - log_z[rows, None]
            factor = of_logprobs[rows, None] + of_entropies[rows, None] * (logp + entropies[rows, None])
            gradient[rows, : ctx.columns] = (-logp.exp() * factor).to(gradient.dtype)
        gradient.scatter_add_(-1, local[:, None], (of_logprobs * mine).to(gradient.dtype)[:, None])
        return gradient, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits.size(-1))
    return [slice(start, start + rows) for start in range(0, logits.size(0), rows)]


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=group)
