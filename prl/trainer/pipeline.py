"""Micro-batches through the chunks of a model by Megatron's schedules."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from prl.streams.records import MicroBatch
from prl.trainer.batch import Batch, to_device

LossOf = Callable[..., Any]  # of the last chunk's output
ForwardStep = Callable[[Iterator[tuple[int, Batch]], torch.nn.Module], tuple[Tensor, LossOf]]


def run_schedule(
    chunks: Sequence[torch.nn.Module], batches: Sequence[MicroBatch], forward_step: ForwardStep, *, forward_only: bool = False
) -> list[Any]:
    """Forward and backward pass of every micro-batch; gradients are those of all ranks when it returns. `forward_step` takes a
    numbered micro-batch from its first argument. With `forward_only` gives what the loss functions made of the last chunk's
    outputs, in order: on the last pipeline stage, nothing on the others. A collective of all ranks.

    Each chunk has an iterator of its own, which puts a micro-batch on the device when its turn comes.
    """
    iterators = [_on_device(batches) for _ in chunks]
    found: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=max(len(batch.tokens) for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return found


def _on_device(batches: Sequence[MicroBatch]) -> Iterator[tuple[int, Batch]]:
    for number, batch in enumerate(batches):
        yield number, to_device(batch, parallel_state.get_tensor_model_parallel_world_size())
