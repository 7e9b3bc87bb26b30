"""A micro-batch on the device, shifted to what the logits predict."""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from prl.streams.records import MicroBatch
from prl.trainer import device
from prl.trainer.context import Cut, cut_sequences, idle_tokens
from prl.trainer.losses import Sequences
from prl.trainer.packing import packed_sequences


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device. Per-token values are shifted by one against the records: entry t speaks of predicting
    targets[t] = tokens[t + 1] from tokens[: t + 1], which is what the logits at t do.

    What the model goes through are this rank's slots, of a context group's; the loss is of all T tokens."""

    tokens: Tensor  # [slots] int64, like the next two; without context parallelism [T]
    positions: Tensor
    targets: Tensor
    sequences: PackedSeqParams
    cut: Cut | None  # which slots these are; None: all
    weights: Tensor  # [T], as all that follow
    advantages: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor | None
    proximal_logprobs: Tensor | None  # of no record: the trainer's own of the step before, where they are asked for
    lags: Tensor
    sequence_numbers: Sequences


def to_device(batch: MicroBatch, tensor_parallel: int, *, context_rank: int = 0, context_parallel: int = 1) -> Batch:
    """Shifted, on the device, and padded by a sequence without weight so that tensor-parallel ranks can share the tokens; of a
    context group of `context_parallel` ranks what rank `context_rank` has."""
    padding = idle_tokens(batch.boundaries, tensor_parallel, context_parallel)
    boundaries, positions = batch.boundaries, batch.positions
    if padding:
        boundaries = np.append(boundaries, boundaries[-1] + padding).astype(np.int32)
        positions = np.append(positions, np.arange(padding)).astype(np.int32)

    def next_token(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        shifted = torch.zeros(len(values) + padding, dtype=dtype)
        shifted[: len(values) - 1] = torch.from_numpy(np.array(values[1:]))
        return shifted.to(device.device())

    tokens = torch.from_numpy(np.pad(batch.tokens, (0, padding)).astype(np.int64)).to(device.device())
    targets = next_token(batch.tokens, torch.int64)
    on_device = torch.from_numpy(positions.astype(np.int64)).to(device.device())
    routings = _routings(batch, padding)
    cut = None
    if context_parallel > 1:
        cut = cut_sequences(boundaries, context_rank, context_parallel)
        tokens, targets, on_device = cut.own(tokens), cut.own(targets), cut.positions
        routings = None if routings is None else cut.own(routings, filling=-1)
    # A token with weight is predicted from its own sequence, so that both have its number.
    numbers = np.repeat(np.arange(len(boundaries) - 1), np.diff(boundaries))
    reference = batch.reference_logprobs
    return Batch(
        tokens=tokens,
        positions=on_device,
        targets=targets,
        sequences=packed_sequences(boundaries if cut is None else cut.boundaries, on_device, routings),
        cut=cut,
        weights=next_token(batch.loss_weights, torch.float32),
        advantages=next_token(batch.advantages, torch.float32),
        old_logprobs=next_token(batch.old_logprobs, torch.float32),
        reference_logprobs=None if reference is None else next_token(reference, torch.float32),
        proximal_logprobs=None,
        lags=next_token(batch.lags, torch.float32),
        sequence_numbers=Sequences(torch.from_numpy(numbers).to(device.device()), len(boundaries) - 1),
    )


def _routings(batch: MicroBatch, padding: int) -> Tensor | None:
    if batch.routings is None:
        return None
    padded = np.pad(batch.routings, ((0, padding), (0, 0), (0, 0)), constant_values=-1)
    return torch.from_numpy(padded.astype(np.int64)).to(device.device())


def idle_microbatch() -> MicroBatch:
    """One token without weight, for a rank that has nothing to train on: every rank takes part in the collectives."""
    one = np.zeros(1, np.float32)
    return MicroBatch(
        tokens=np.zeros(1, np.int32),
        positions=np.zeros(1, np.int32),
        boundaries=np.array([0, 1], np.int32),
        loss_weights=one,
        advantages=one,
        old_logprobs=one,
        reference_logprobs=one,
        lags=np.full(1, -1, np.int32),
        rollouts=(),
    )
