"""Micro-batches through the chunks of a model by Megatron's schedules."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from prl.streams.records import MicroBatch
from prl.trainer.batch import Batch, to_device
from prl.trainer.context import computed_tokens

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
    stages = parallel_state.get_pipeline_model_parallel_group()
    neighbours: dict[str, Any] = {}
    if stages.size() > 1:
        neighbours = {
            "p2p_communicator": _Neighbours(stages, get_model_config(chunks[0]), batches),
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        }
    found: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=max(len(batch.tokens) for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        **neighbours,
    )
    return found


class _Neighbours(P2PCommunicator):  # type: ignore[misc]
    """Stages know how long each micro-batch is, and so the shape of what they are to receive. (Megatron would have them tell
    each other first; in a virtual pipeline both then wait for the other's word.)"""

    def __init__(self, stages: dist.ProcessGroup, config: TransformerConfig, batches: Sequence[MicroBatch]) -> None:
        super().__init__(stages, config)
        tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
        lengths = [computed_tokens(batch.boundaries, tensor, context) for batch in batches]
        if config.sequence_parallel:
            lengths = [length // tensor for length in lengths]
        turns = config.virtual_pipeline_model_parallel_size or 1
        order = get_schedule_table(len(batches), turns, config.microbatch_group_size_per_vp_stage)
        first, last = stages.rank() == 0, stages.rank() == stages.size() - 1
        # In the order of arrival. The first stage receives nothing in its first turn; nor does the last one, for which turns go
        # backwards, of gradients.
        self._from_prev = iter([lengths[number] for number, turn in order if turn or not first])
        self._from_next = iter([lengths[number] for number, turn in order if turn or not last])

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int] | None, list[int] | None]:
        width = self.config.hidden_size
        from_prev = [next(self._from_prev), 1, width] if recv_prev else None
        return from_prev, [next(self._from_next), 1, width] if recv_next else None


def _on_device(batches: Sequence[MicroBatch]) -> Iterator[tuple[int, Batch]]:
    tensor_parallel, context = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_group(),
    )
    for number, batch in enumerate(batches):
        yield number, to_device(batch, tensor_parallel, context_rank=context.rank(), context_parallel=context.size())
