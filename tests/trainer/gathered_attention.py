"""What stands for Transformer Engine's attention over the ranks of a context group, which needs a GPU: plain attention of a
rank's tokens to those of all ranks. It finds by itself which tokens a rank has."""

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from prl.trainer import model
from prl.trainer.layers import _rotated
from prl.trainer.options import TrainOptions


def attention_of(options: TrainOptions) -> AbstractContextManager[Any]:
    """While it lasts models are built with this attention, if ranks are to share sequences."""
    return mock.patch.object(model, "PackedAttention", GatheredAttention) if options.context_parallel > 1 else nullcontext()


class GatheredAttention(MegatronModule):
    def __init__(self, config, *args, softmax_scale=None, **unused) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, *, packed_seq_params, **unused) -> Tensor:
        query, key = (_rotated(x, *packed_seq_params.rotation) for x in (query, key))
        group = parallel_state.get_context_parallel_group()
        boundaries = packed_seq_params.boundaries.tolist()
        tokens = [torch.tensor(_tokens(boundaries, rank, group.size())) for rank in range(group.size())]
        own, others = tokens[group.rank()], torch.cat(tokens)
        sequence = torch.repeat_interleave(torch.arange(len(boundaries) - 1), torch.tensor(boundaries).diff())
        seen = (sequence[own][:, None] == sequence[others]) & (own[:, None] >= others)

        keys, values = (_Gathered.apply(x.squeeze(1), group) for x in (key, value))
        each = query.size(2) // keys.size(1)
        keys, values = (x.repeat_interleave(each, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query.squeeze(1), keys) * self.scale
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, values).reshape(len(own), 1, -1)


def _tokens(boundaries: list[int], rank: int, ranks: int) -> list[int]:
    """Of a rank, in order: of each sequence, in 2 n parts, one from the front and its counterpart from the back."""
    found: list[int] = []
    for start, end in pairwise(boundaries):
        part = (end - start) // (2 * ranks)
        front, back = start + rank * part, end - (rank + 1) * part
        found += [*range(front, front + part), *range(back, back + part)]
    return found


class _Gathered(torch.autograd.Function):
    """[slots, ...] of each rank -> those of all, rank by rank; gradients are added up over the ranks that have used them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None
