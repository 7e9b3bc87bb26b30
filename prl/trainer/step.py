"""One optimizer step over this rank's micro-batches."""

from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from prl.metrics import names
from prl.streams.records import MicroBatch, StepFacts
from prl.trainer.batch import Batch, idle_microbatch, to_device
from prl.trainer.engine import Engine, optimizer_step
from prl.trainer.head import hidden_states, token_logprobs
from prl.trainer.measures import Measures
from prl.trainer.objective import objective


def train_step(engine: Engine, microbatches: Sequence[MicroBatch], facts: StepFacts) -> dict[str, float]:
    """Turn version facts.step - 1 into version facts.step. `microbatches` are this data-parallel rank's, which may be none;
    loss and gradient are the same however the step's micro-batches are made and dealt. Returns the step's metrics over all
    ranks, equal on all of them (but for train/reference_s, which is this rank's).

    Where the gradient is not finite the step is skipped: it makes a version with the weights of the one before.

    Raises ValueError where the options ask for what the micro-batches lack.
    """
    reference = engine.reference
    spent_s = reference.spent_s if reference else 0.0
    batches = list(microbatches) or [idle_microbatch()]
    measures = Measures()
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    engine.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=_forward_step(engine, facts, len(batches), measures),
        data_iterator=_on_device(engine, batches),
        model=list(engine.chunks),
        num_microbatches=len(batches),
        seq_length=max(len(batch.tokens) for batch in batches),
        micro_batch_size=1,
        forward_only=False,
    )
    norm, changed = optimizer_step(engine, facts.step)
    reduced = measures.reduce(parallel_state.get_data_parallel_group())
    metrics = {names.GRAD_NORM: norm, names.SKIPPED: float(not changed), **reduced}
    return metrics | {"train/reference_s": reference.spent_s - spent_s} if reference else metrics


def _on_device(engine: Engine, batches: Sequence[MicroBatch]) -> Iterator[Batch]:
    """The micro-batches as they are asked for: what the reference makes of one is computed before the model's own logits take
    up memory."""
    for microbatch in batches:
        batch = to_device(microbatch, engine.options.tensor_parallel)
        yield engine.reference.complete(batch) if engine.reference else batch


def _forward_step(
    engine: Engine, facts: StepFacts, microbatches: int, measures: Measures
) -> Callable[[Iterator[Batch], torch.nn.Module], tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]]:
    # Megatron's schedule divides by the micro-batches, its data parallelism by the ranks; our denominator already is global.
    scale = microbatches * parallel_state.get_data_parallel_world_size()

    def forward_step(
        batches: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        batch = next(batches)

        def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, entropies = token_logprobs(model, output, batch.targets, engine.config, engine.options)
            found = objective(batch, logprobs, entropies, facts, engine.options)
            measures.add(batch, found, logprobs.detach(), entropies.detach())
            return found.loss * scale, {}

        return hidden_states(model, batch), loss_of

    return forward_step
