"""Micro-batches through the chunks of a model by Megatron's schedules."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from prl.streams.records import MicroBatch
from prl.trainer import device
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
    neighbours: dict[str, Any] = {}
    if len(chunks) > 1:
        stages = parallel_state.get_pipeline_model_parallel_group()
        neighbours = {
            "p2p_communicator": _Neighbours(stages, get_model_config(chunks[0])),
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
    """Of a virtual pipeline. Of two stages each is before and after the other, and both send in both directions at once: shapes
    must go in the order in which Megatron's unbatched messages do (its own exchange of shapes takes them for one another)."""

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        where = device.device()
        of_prev, of_next = (torch.zeros(3, dtype=torch.int64, device=where) for _ in range(2))
        to_prev, to_next = (
            None if tensor is None else torch.tensor(tensor.shape, device=where)
            for tensor in (tensor_send_prev, tensor_send_next)
        )
        requests = p2p_communication._p2p_ops(
            tensor_send_prev=to_prev,
            tensor_recv_prev=of_prev if recv_prev else None,
            tensor_send_next=to_next,
            tensor_recv_next=of_next if recv_next else None,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        return of_prev.tolist(), of_next.tolist()


def _on_device(batches: Sequence[MicroBatch]) -> Iterator[tuple[int, Batch]]:
    for number, batch in enumerate(batches):
        yield number, to_device(batch, parallel_state.get_tensor_model_parallel_world_size())
