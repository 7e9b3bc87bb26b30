"""One optimizer step over this rank's micro-batches."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from prl.metrics import names
from prl.streams.records import MicroBatch, StepFacts
from prl.trainer import device
from prl.trainer.batch import Batch, idle_microbatch
from prl.trainer.context import joined
from prl.trainer.efficiency import Stopwatch, efficiency
from prl.trainer.engine import Engine, optimizer_step
from prl.trainer.head import hidden_states, token_logprobs
from prl.trainer.measures import Measures
from prl.trainer.model import unwrap
from prl.trainer.objective import objective
from prl.trainer.parallel import broadcast_json
from prl.trainer.pipeline import ForwardStep, LossOf, run_schedule
from prl.trainer.routing import check_routings
from prl.trainer.schedule import learning_rate
from prl.trainer.value_head import token_values


def train_step(
    engine: Engine, microbatches: Sequence[MicroBatch], facts: StepFacts, before_change: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Turn version facts.step - 1 into version facts.step. `microbatches` are this data-parallel rank's, which may be none;
    loss and gradient are the same however the step's micro-batches are made and dealt. Returns the step's metrics over all
    ranks, equal on all of them but for the seconds, and what follows from them, which are by this rank's clock.
    `before_change` is called between the passes and the optimizer; until it returns no weight changes.

    Where the gradient is not finite the step is skipped: it makes a version with the weights of the one before.

    Raises ValueError where the options ask for what the micro-batches lack.
    """
    reference, proximal = engine.reference, engine.proximal
    reference_logprobs = proximal_logprobs = None
    batches, compare = _even(engine, microbatches)
    watch = Stopwatch()
    if reference and compare:
        with watch.phase(names.REFERENCE_S):
            reference_logprobs = reference.logprobs(batches)
    if proximal and proximal.known:
        with watch.phase(names.PROXIMAL_S):
            proximal_logprobs = proximal.logprobs(batches)
    measures = Measures()
    with watch.phase(names.FORWARD_BACKWARD_S):
        for chunk in engine.chunks:
            chunk.zero_grad_buffer()
        engine.optimizer.zero_grad()
        forward_step = _forward_step(engine, facts, len(batches), measures, reference_logprobs, proximal_logprobs)
        run_schedule(engine.chunks, batches, forward_step)
    if proximal:
        with watch.phase(names.PROXIMAL_S):
            proximal.take(engine.chunks)
    before_change()
    with watch.phase(names.OPTIMIZER_S):
        norm, changed = optimizer_step(engine, facts.step)
    return {
        names.GRAD_NORM: norm,
        names.SKIPPED: float(not changed),
        names.LEARNING_RATE: learning_rate(engine.options, facts.step),
        **_measured(measures),
        **efficiency(engine.config, engine.options, microbatches, batches, watch.seconds),
        **watch.seconds,
    }


def _even(engine: Engine, microbatches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], bool]:
    """This rank's micro-batches, with idle ones where it must have more, and whether the reference has to judge them. Ranks
    that share experts go through equally many together; a virtual pipeline takes as many as it has stages at a time."""
    options = engine.options
    for batch in microbatches:
        check_routings(batch, engine.config)
    wanted = [max(1, len(microbatches)), int(any(batch.reference_logprobs is None for batch in microbatches))]
    if options.expert_parallel > 1:
        told = torch.tensor(wanted, device=device.device())
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        wanted = told.tolist()
    count, compare = wanted
    if options.virtual_pipeline > 1:
        count = math.ceil(count / options.pipeline_parallel) * options.pipeline_parallel
    return [*microbatches, *[idle_microbatch()] * (count - len(microbatches))], bool(compare)


def _measured(measures: Measures) -> dict[str, float]:
    """The step's measures, for every rank: the last pipeline stage has taken them."""
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    found = measures.reduce(parallel_state.get_data_parallel_group()) if last else None
    stages = parallel_state.get_pipeline_model_parallel_group()
    return broadcast_json(found, stages.size() - 1, stages, device.device())


def _forward_step(
    engine: Engine,
    facts: StepFacts,
    microbatches: int,
    measures: Measures,
    reference_logprobs: Sequence[Tensor] | None,
    proximal_logprobs: Sequence[Tensor] | None,
) -> ForwardStep:
    # Megatron's schedule divides by the micro-batches, its data parallelism by the ranks (also by those of a context group, by
    # which the schedule multiplies); our denominator already is global.
    scale = microbatches * parallel_state.get_data_parallel_world_size()

    def forward_step(batches: Iterator[tuple[int, Batch]], model: torch.nn.Module) -> tuple[Tensor, LossOf]:
        number, batch = next(batches)

        def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            own = batch
            if batch.reference_logprobs is None and reference_logprobs is not None:
                own = replace(own, reference_logprobs=reference_logprobs[number])
            if proximal_logprobs is not None:
                own = replace(own, proximal_logprobs=proximal_logprobs[number])
            options = engine.options
            found_here = token_logprobs(model, output, own.targets, engine.config, options)
            logprobs, entropies = (joined(x, own.cut) for x in found_here)
            values = None
            if options.value_head:
                values = joined(token_values(unwrap(model), output, stop_gradient=options.value_stop_gradient), own.cut)
            found = objective(own, logprobs, entropies, facts, options, values)
            measures.add(own, found, logprobs.detach(), entropies.detach())
            return found.loss * scale, {}

        return hidden_states(model, batch), loss_of

    return forward_step
