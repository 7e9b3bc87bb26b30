"""One optimizer step over this rank's micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from prl.metrics import names
from prl.streams.records import MicroBatch, StepFacts
from prl.trainer import device, losses
from prl.trainer.engine import Engine, set_schedule
from prl.trainer.measures import Measures
from prl.trainer.options import TrainOptions
from prl.trainer.packing import packed_sequences
from prl.trainer.vocab_parallel import logprobs_and_entropies


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device. Per-token values are shifted by one against the records: entry t speaks of predicting
    targets[t] = tokens[t + 1] from tokens[: t + 1], which is what the logits at t do."""

    tokens: Tensor  # [T] int64, as all of them
    positions: Tensor
    sequences: PackedSeqParams
    targets: Tensor
    weights: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor | None
    lags: Tensor


def train_step(engine: Engine, microbatches: Sequence[MicroBatch], facts: StepFacts) -> dict[str, float]:
    """Turn version facts.step - 1 into version facts.step. `microbatches` are this data-parallel rank's, which may be none;
    loss and gradient are the same however the step's micro-batches are made and dealt. Returns the step's metrics over all
    ranks, equal on all of them.

    Raises RuntimeError where a gradient is not finite, ValueError where the options ask for what the micro-batches lack.
    """
    model, options = engine.model, engine.options
    batches = list(microbatches) or [_idle_microbatch()]  # every rank takes part in the collectives
    measures = Measures()
    model.zero_grad_buffer()
    engine.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=_forward_step(engine, facts, len(batches), measures),
        data_iterator=(to_device(batch, options.tensor_parallel) for batch in batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=max(len(batch.tokens) for batch in batches),
        micro_batch_size=1,
        forward_only=False,
    )
    set_schedule(engine, facts.step)
    _, grad_norm, _ = engine.optimizer.step()
    reduced = measures.reduce(parallel_state.get_data_parallel_group())
    return {names.GRAD_NORM: float(grad_norm), **reduced}


def to_device(batch: MicroBatch, tensor_parallel: int) -> Batch:
    """Shifted, on the device, and padded by a sequence without weight so that tensor-parallel ranks can share the tokens."""
    padding = -len(batch.tokens) % tensor_parallel
    boundaries, positions = batch.boundaries, batch.positions
    if padding:
        boundaries = np.append(boundaries, boundaries[-1] + padding).astype(np.int32)
        positions = np.append(positions, np.arange(padding)).astype(np.int32)

    def next_token(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        shifted = torch.zeros(len(values) + padding, dtype=dtype)
        shifted[: len(values) - 1] = torch.from_numpy(np.array(values[1:]))
        return shifted.to(device.device())

    tokens = torch.from_numpy(np.pad(batch.tokens, (0, padding)).astype(np.int64)).to(device.device())
    on_device = torch.from_numpy(positions.astype(np.int64)).to(device.device())
    reference = batch.reference_logprobs
    return Batch(
        tokens=tokens,
        positions=on_device,
        sequences=packed_sequences(boundaries, on_device),
        targets=next_token(batch.tokens, torch.int64),
        weights=next_token(batch.loss_weights, torch.float32),
        advantages=next_token(batch.advantages, torch.float32),
        old_logprobs=next_token(batch.old_logprobs, torch.float32),
        reference_logprobs=None if reference is None else next_token(reference, torch.float32),
        lags=next_token(batch.lags, torch.float32),
    )


def batch_loss(batch: Batch, logprobs: Tensor, entropies: Tensor, denominator: float, options: TrainOptions) -> Tensor:
    """This micro-batch's share of the step's loss, from log-probabilities and entropies [T]."""
    ratios = losses.importance_ratios(logprobs, batch.old_logprobs, batch.weights)
    if options.loss == "ppo":
        loss = losses.ppo_loss(
            ratios, batch.advantages, batch.weights, denominator, clip_low=options.clip_low, clip_high=options.clip_high
        )
    else:
        loss = losses.reinforce_loss(logprobs, ratios, batch.advantages, batch.weights, denominator, truncate=options.truncate)
    if options.entropy_coefficient:
        loss = loss + losses.entropy_loss(entropies, batch.weights, denominator, coefficient=options.entropy_coefficient)
    if options.kl_coefficient:
        if batch.reference_logprobs is None:
            raise ValueError("train.kl_coefficient is above 0, but the step has no log-probs of a reference model")
        loss = loss + losses.kl_loss(
            logprobs, batch.reference_logprobs, batch.weights, denominator, coefficient=options.kl_coefficient
        )
    return loss


def _forward_step(
    engine: Engine, facts: StepFacts, microbatches: int, measures: Measures
) -> Callable[[Iterator[Batch], torch.nn.Module], tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]]:
    group = parallel_state.get_tensor_model_parallel_group()
    # Megatron's schedule divides by the micro-batches, its data parallelism by the ranks; our denominator already is global.
    scale = microbatches * parallel_state.get_data_parallel_world_size()

    def forward_step(
        batches: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        batch = next(batches)
        logits = model(batch.tokens[None], batch.positions[None], None, packed_seq_params=batch.sequences)

        def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, entropies = logprobs_and_entropies(output[0], batch.targets, engine.config.vocabulary, group)
            loss = batch_loss(batch, logprobs, entropies, facts.denominator, engine.options)
            measures.add(batch, loss.detach(), logprobs.detach(), entropies.detach(), engine.options)
            return loss * scale, {}

        return logits, loss_of

    return forward_step


def _idle_microbatch() -> MicroBatch:
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
