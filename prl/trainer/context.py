"""Context parallelism: how packed sequences are cut over the ranks of a context group, and how what these ranks find is put
together again.

The cut is the one that Transformer Engine's attention of packed sequences ("thd") goes by. Of n ranks: each sequence is filled
up to a multiple of 2 n tokens and cut into 2 n chunks of the same length, of which rank r has chunks r and 2 n - 1 - r, so that
causal attention is as much work for each. What fills a sequence stands at its end, where none of its tokens looks.

Tokens of different ranks meet in attention alone. A rank computes the log-probs of its own tokens; `joined` gives those of all
to every rank, and from there on - advantages, ratios and masks of sequences, losses, measures - each rank of a context group
does the same with whole sequences, as if there were no other. Its share of the gradient is that of its own tokens; Megatron
adds up the shares of context- and data-parallel ranks.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from prl.trainer import device

Boundaries = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """The slots of one rank of a context group, for a micro-batch of T packed tokens in S sequences. Those of no token fill a
    sequence up."""

    boundaries: Boundaries  # [S + 1], of the sequences as they are filled up, over all ranks
    positions: Tensor  # [slots] int64, in its sequence; what fills it up has the next ones
    token_of_slot: Tensor  # [slots] int64; 0 where there is none
    is_token: Tensor  # [slots] bool
    slot_of_token: Tensor  # [T] int64, among the slots of all ranks, rank by rank

    def own(self, values: Tensor, filling: int = 0) -> Tensor:
        """[T, ...] -> [slots, ...], with `filling` where there is no token."""
        mine = values.index_select(0, self.token_of_slot)
        return torch.where(self.is_token.view(-1, *[1] * (values.ndim - 1)), mine, filling)


def cut_sequences(boundaries: Boundaries, rank: int, ranks: int) -> Cut:
    """Of sequences packed between `boundaries` [S + 1], for rank `rank` of a context group of `ranks`."""
    slots = [slots_of_rank(boundaries, other, ranks) for other in range(ranks)]
    tokens, positions = slots[rank]
    everywhere = np.concatenate([numbers for numbers, _ in slots])
    slot_of_token = np.empty(int(boundaries[-1]), np.int64)
    slot_of_token[everywhere[everywhere >= 0]] = np.flatnonzero(everywhere >= 0)
    return Cut(
        boundaries=filled_up(boundaries, ranks),
        positions=torch.from_numpy(positions).to(device.device()),
        token_of_slot=torch.from_numpy(tokens.clip(min=0)).to(device.device()),
        is_token=torch.from_numpy(tokens >= 0).to(device.device()),
        slot_of_token=torch.from_numpy(slot_of_token).to(device.device()),
    )


def slots_of_rank(boundaries: Boundaries, rank: int, ranks: int) -> tuple[Numbers, Numbers]:
    """For each slot the token, by its number among all that are packed (-1: none), and the position in its sequence."""
    lengths = np.diff(boundaries).astype(np.int64)
    chunks = np.diff(filled_up(boundaries, ranks)).astype(np.int64) // (2 * ranks)  # their lengths
    sequence = np.repeat(np.arange(len(lengths)), 2 * chunks)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(2 * chunks) - 2 * chunks, 2 * chunks)
    chunk = chunks[sequence]
    # Chunks of other ranks that come before; one more is its own before its second one, and in `within` already.
    others = np.where(within < chunk, rank, 2 * ranks - 2 - rank)
    positions = others * chunk + within
    return np.where(positions < lengths[sequence], boundaries[:-1][sequence] + positions, -1), positions


def filled_up(boundaries: Boundaries, ranks: int) -> Boundaries:
    """[S + 1], of sequences that so many ranks can share."""
    if ranks == 1:
        return boundaries
    lengths = -(-np.diff(boundaries) // (2 * ranks)) * (2 * ranks)
    return np.cumsum([0, *lengths]).astype(np.int32)


def idle_tokens(boundaries: Boundaries, tensor_parallel: int, ranks: int) -> int:
    """Length of one more sequence, without weight, with which tensor-parallel ranks can divide the slots of each of so many
    context-parallel ranks evenly."""
    unit = tensor_parallel if ranks == 1 else math.lcm(2 * ranks, ranks * tensor_parallel)
    return int(-filled_up(boundaries, ranks)[-1] % unit)


def computed_tokens(boundaries: Boundaries, tensor_parallel: int, ranks: int) -> int:
    """Slots of each of so many context-parallel ranks, with those of the sequence without weight."""
    return (int(filled_up(boundaries, ranks)[-1]) + idle_tokens(boundaries, tensor_parallel, ranks)) // ranks


def joined(values: Tensor, cut: Cut | None) -> Tensor:
    """[slots] of each rank -> [T] on every rank of the context group; without one (None) as it is. The loss that every rank
    makes of it is the same, so that a rank's share of the gradient is that of its own slots, not a sum over the ranks."""
    if cut is None:
        return values
    return _Joined.apply(values, cut)  # type: ignore[no-any-return, no-untyped-call]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        group = parallel_state.get_context_parallel_group()
        everywhere = values.new_empty(group.size() * len(values))
        dist.all_gather_into_tensor(everywhere, values.contiguous(), group=group)
        return everywhere.index_select(0, cut.slot_of_token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.cut.own(gradient), None
