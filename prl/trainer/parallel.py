"""The trainer's process groups, and small messages from rank 0 to all ranks."""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

from prl.trainer import device
from prl.trainer.options import TrainOptions

LOOK_S = 0.002  # between two looks of a second thread at what it waits for


def start_groups(
    options: TrainOptions,
    *,
    timeout_s: float,
    port: int | None = None,
    before_collectives: Callable[[TCPStore], None] = lambda store: None,
) -> None:
    """Join the trainer's group (rank, size and address come from the environment, as torchrun sets them; so does the port where
    none is given) and split it for Megatron: neighbouring ranks are tensor-parallel, neighbouring such groups context-parallel,
    pipeline stages lie farthest apart, the rest is data parallelism. No collective waits longer than `timeout_s`;
    `before_collectives` is called with the store that all ranks have, before they connect to each other."""
    if not dist.is_initialized():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        port = int(os.environ["MASTER_PORT"]) if port is None else port
        store = _store(os.environ["MASTER_ADDR"], port, rank, timeout_s)
        before_collectives(store)
        dist.init_process_group(device.backend(), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline if options.virtual_pipeline > 1 else None,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=1,  # an expert is whole on one rank
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)  # Megatron asks for one; nothing is drawn from it


def _store(address: str, port: int, rank: int, timeout_s: float) -> TCPStore:
    """The rendezvous; rank 0 hosts it, on the one address that the others are told and on no other."""
    timeout = timedelta(seconds=timeout_s)
    if rank != 0:
        return TCPStore(address, port, is_master=False, timeout=timeout)
    listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach())


def stop_groups() -> None:
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def shares_weights() -> bool:
    """Whether this rank takes part in gathering the whole model: one of each tensor-parallel shard and pipeline stage does, and
    every rank where experts are spread over the data-parallel ones."""
    first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return bool(first or parallel_state.get_expert_model_parallel_world_size() > 1)


def broadcast_json(
    message: Mapping[str, Any] | None,
    source: int,
    group: dist.ProcessGroup,
    where: torch.device,
    finish: Callable[[Any], None] = lambda work: work.wait(),
) -> dict[str, Any]:
    """Rank `source` of the group gives the message, the others None; all get it. It travels in tensors on `where`; `finish`
    waits for each of them."""
    data = json.dumps(message).encode() if group.rank() == source else b""
    size = torch.tensor([len(data)], device=where)
    finish(dist.broadcast(size, group=group, group_src=source, async_op=True))
    content = torch.frombuffer(bytearray(data.ljust(int(size))), dtype=torch.uint8).to(where)
    finish(dist.broadcast(content, group=group, group_src=source, async_op=True))
    received: dict[str, Any] = json.loads(content.cpu().numpy().tobytes())
    return received


class Channel:
    """Messages between rank 0 and all ranks, in a gloo group of their own (NCCL takes no CPU tensors)."""

    def __init__(self, timeout_s: float, *, in_python: bool = False) -> None:
        """`in_python`: for a thread that may be left behind at the process's end; one that comes back out of torch then has the
        process abort (see prl/weights/group.py)."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._in_python = in_python

    def broadcast(self, message: Mapping[str, Any] | None) -> dict[str, Any]:
        """Rank 0 gives the message, the others None; all get it. Anything that JSON holds."""
        return broadcast_json(message, 0, self._group, torch.device("cpu"), self._finish)

    def gather(self, message: Any) -> list[Any]:
        """The messages of all ranks, in their order, for every rank. Anything that JSON holds."""
        data = json.dumps(message).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        self._finish(dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group, async_op=True))
        width = int(max(sizes))
        contents = [torch.empty(width, dtype=torch.uint8) for _ in sizes]
        content = torch.frombuffer(bytearray(data.ljust(width)), dtype=torch.uint8)
        self._finish(dist.all_gather(contents, content, group=self._group, async_op=True))
        return [json.loads(content.numpy().tobytes()) for content in contents]

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def _finish(self, work: Any) -> None:
        while self._in_python and not work.is_completed():
            time.sleep(LOOK_S)
        work.wait()  # raises what went wrong
