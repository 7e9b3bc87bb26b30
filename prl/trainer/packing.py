"""Sequences packed one after another, and how attention takes them apart again without a loop over sequences."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from prl.trainer.device import has_transformer_engine


@dataclass(frozen=True)
class Bucket:
    """Rows [start, start + sequences * width) of the padded layout: sequences of nearly equal length."""

    start: int
    sequences: int
    width: int


@dataclass(frozen=True)
class Buckets:
    """The padded layout of T packed tokens: sequences sorted into buckets by length (powers of two), each padded at its end
    to the bucket's longest. Slots of padding hold token 0, which no real token ever looks at (attention is causal)."""

    buckets: tuple[Bucket, ...]
    token_of_slot: Tensor  # [slots]
    slot_of_token: Tensor  # [T]
    is_token: Tensor | None  # [slots, 1]; None where no slot is padding
    as_packed: bool  # the padded layout is the packed one

    def pad(self, packed: Tensor) -> Tensor:
        """[T, width] -> [slots, width]."""
        if self.as_packed:
            return packed
        return _Rearrange.apply(packed, self.token_of_slot, self.slot_of_token, None)  # type: ignore[no-any-return, no-untyped-call]

    def unpad(self, padded: Tensor) -> Tensor:
        """[slots, width] -> [T, width]."""
        if self.as_packed:
            return padded
        return _Rearrange.apply(padded, self.slot_of_token, self.token_of_slot, self.is_token)  # type: ignore[no-any-return, no-untyped-call]


class _Rearrange(torch.autograd.Function):
    """Rows by an index, whose gradient is rows by the inverse index: a scatter-add would cost ten times as much on a CPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, keep: Tensor | None) -> Tensor:
        ctx.save_for_backward(inverse, keep)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        inverse, keep = ctx.saved_tensors
        back = gradient.index_select(0, inverse)
        return back if keep is None else back * keep, None, None, None


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """What Megatron hands through the model for packed input; without Transformer Engine: where sequences begin, positions, the
    padded layout."""

    boundaries: Tensor | None = None  # [S + 1] int32
    positions: Tensor | None = None  # [T], from 0 in each sequence
    layout: Buckets | None = None  # None in a context group
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines of the rotary angles [T, 1, 1, head_dim / 2], once known
    routings: Tensor | None = None  # [T, layers, experts a token] int64, the experts that a token goes to; -1: not given


def packed_sequences(boundaries: npt.NDArray[np.int32], positions: Tensor, routings: Tensor | None = None) -> PackedSequences:
    """`boundaries` [S + 1] of S sequences, `positions` [T] and `routings` on the device that computes. In a context group these
    two are of the rank's own slots, the boundaries of the filled-up sequences (see `context`)."""
    longest = int(np.diff(boundaries).max())
    shared = len(positions) < boundaries[-1]
    starts = torch.from_numpy(boundaries.astype(np.int32)).to(positions.device)
    if has_transformer_engine():
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            # Asked for over several ranks. Filling counts as part of its sequence: between sequences it would take cuDNN's
            # attention alone, and nothing looks at it.
            cu_seqlens_q_padded=starts if shared else None,
            cu_seqlens_kv_padded=starts if shared else None,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            routings=routings,
        )
    # "sbhd" keeps Megatron from its own loop over sequences (rotary embedding of "thd"); our layers need no more than this.
    return PackedSequences(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        boundaries=starts,
        positions=positions,
        layout=None if shared else buckets(boundaries, positions.device),
        routings=routings,
    )


def buckets(boundaries: npt.NDArray[np.int32], device: torch.device) -> Buckets:
    """The padded layout of the sequences between `boundaries` [S + 1]."""
    lengths = np.diff(boundaries).astype(np.int64)
    starts = boundaries[:-1].astype(np.int64)
    exponents = np.ceil(np.log2(lengths)).astype(np.int64)
    found, tokens, kept = [], [], []
    slots = 0
    for exponent in np.unique(exponents):
        rows = np.flatnonzero(exponents == exponent)
        width = int(lengths[rows].max())
        within = np.arange(width)
        keep = within < lengths[rows][:, None]
        tokens.append(np.where(keep, starts[rows][:, None] + within, 0).ravel())
        kept.append(keep.ravel())
        found.append(Bucket(slots, len(rows), width))
        slots += len(rows) * width
    token_of_slot, is_token = np.concatenate(tokens), np.concatenate(kept)
    slot_of_token = np.empty(int(lengths.sum()), np.int64)
    slot_of_token[token_of_slot[is_token]] = np.flatnonzero(is_token)
    return Buckets(
        buckets=tuple(found),
        token_of_slot=torch.from_numpy(token_of_slot).to(device),
        slot_of_token=torch.from_numpy(slot_of_token).to(device),
        is_token=None if is_token.all() else torch.from_numpy(is_token[:, None]).to(device),
        as_packed=np.array_equal(token_of_slot, np.arange(len(slot_of_token))),
    )
