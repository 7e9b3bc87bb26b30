"""The group that carries the weights: the trainer's sender is rank 0, the workers of all samplers are the others.

It lives outside of torch's default group, so that neither side's own communicators know of it, over gloo where tensors are on
CPUs and over NCCL on GPUs (NCCL's path was never run). The trainer's process hosts the store for the rendezvous. A group
belongs to one epoch of the membership; a group that failed is thrown away, and the next epoch builds another.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed does not export them to type checkers

from prl.weights.digest import digest
from prl.weights.options import WeightsOptions
from prl.weights.plan import Bucket, TensorSpec, pack


class TransportError(Exception):
    """A group could not be built, or a transfer did not end in time; says what was waited for."""


@dataclass(frozen=True)
class SendReport:
    bytes: int
    send_s: float  # without the digest
    digest: int


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class TrainerEnd:
    """The sending end. Hosts the store from the start; groups come and go with `join`."""

    def __init__(self, host: str, options: WeightsOptions, device: torch.device | str = "cpu") -> None:
        """`host`: the address of this node that the samplers' nodes reach; the store listens there and nowhere else."""
        self.master_address = host
        self._options = options
        self._device = torch.device(device)
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.master_port: int = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            self.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=options.group_s),
            master_listen_fd=listener.detach(),  # the store owns the socket from here on
        )
        self._group: _Group | None = None

    def join(self, epoch: int, world_size: int) -> None:
        """Build the group of this epoch of 1 + samplers' workers; blocks until all are there or `group_s` is over
        (TransportError names who is missing)."""
        self.close()
        self._group = _Group(self._store, self.master_address, 0, world_size, epoch, self._options.group_s, self._device)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> SendReport:
        """Send full tensors, in their order, to every worker; blocks until all have them or `update_s` is over."""
        if self._group is None:
            raise TransportError("no transfer group: join an epoch before sending")
        started = time.monotonic()
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in whole.values()]
        buckets = pack(specs, self._options.bucket_mib * 2**20)
        buffer = torch.empty(max((b.bytes for b in buckets), default=0), dtype=torch.uint8, device=self._device)
        for number, bucket in enumerate(buckets):
            for piece in bucket.pieces:
                buffer[piece.at : piece.at + piece.end - piece.start].copy_(raw[piece.tensor][piece.start : piece.end])
            self._broadcast(buffer, bucket, f"bucket {number + 1} of {len(buckets)}", started + self._options.update_s)
        return SendReport(sum(b.bytes for b in buckets), time.monotonic() - started, digest(whole))

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _broadcast(self, buffer: torch.Tensor, bucket: Bucket, what: str, end: float) -> None:
        assert self._group is not None
        try:
            self._group.broadcast(buffer[: bucket.bytes], f"{what} to be taken by the samplers", end)
        except TransportError:
            self.close()  # what a peer got is unknown now
            raise


class SamplerEnd:
    """The receiving end of one sampler worker."""

    def __init__(
        self,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        epoch: int,
        timeout_s: float,
        device: torch.device | str = "cpu",
    ) -> None:
        """Join the group of this epoch; blocks until all are there or `timeout_s` is over."""
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        limit = timedelta(seconds=timeout_s)
        where = f"{master_address}:{master_port}"
        try:
            store = TCPStore(master_address, master_port, is_master=False, timeout=limit, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"epoch {epoch}, rank {rank}: the trainer's store at {where} did not answer within "
                f"{timeout_s:.0f} s: {_said(error)}"
            ) from error
        host = _own_address(master_address, master_port)
        self._group = _Group(store, host, rank, world_size, epoch, timeout_s, self._device)

    def receive(
        self, specs: Sequence[TensorSpec], bucket_bytes: int, deadline_s: float | None = None
    ) -> dict[str, torch.Tensor]:
        """The next version, as full tensors by name. `deadline_s` (default: the constructor's `timeout_s`) covers all of
        it, with the wait for the sender to begin."""
        end = time.monotonic() + (self._timeout_s if deadline_s is None else deadline_s)
        tensors = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=self._device) for s in specs}
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
        buckets = pack(specs, bucket_bytes)
        buffer = torch.empty(max((b.bytes for b in buckets), default=0), dtype=torch.uint8, device=self._device)
        for number, bucket in enumerate(buckets):
            self._group.broadcast(buffer[: bucket.bytes], f"bucket {number + 1} of {len(buckets)} from the trainer", end)
            for piece in bucket.pieces:
                raw[piece.tensor][piece.start : piece.end].copy_(buffer[piece.at : piece.at + piece.end - piece.start])
        return tensors

    def close(self) -> None:
        self._group.abort()


class _Group:
    """A process group that torch's default group knows nothing of, with a deadline on everything."""

    def __init__(
        self, store: Any, host: str, rank: int, world_size: int, epoch: int, timeout_s: float, device: torch.device
    ) -> None:
        self._name = f"weight group, epoch {epoch}, rank {rank} of {world_size}"
        end = time.monotonic() + timeout_s
        scope = PrefixStore(f"weights/{epoch}", store)
        self._meet(scope, rank, world_size, timeout_s)
        limit = timedelta(seconds=max(end - time.monotonic(), 1.0))
        try:
            self._group = (
                _nccl(scope, rank, world_size, limit) if device.type == "cuda" else _gloo(scope, host, rank, world_size, limit)
            )
        except RuntimeError as error:
            raise TransportError(f"{self._name}: not built within {timeout_s:.0f} s: {_said(error)}") from error
        self._device = device

    def _meet(self, scope: Any, rank: int, world_size: int, timeout_s: float) -> None:
        """Wait until every rank is known to be there, because a collective only ever says that it waited."""
        keys = [f"here/{other}" for other in range(world_size)]
        try:
            scope.set(keys[rank], "")
            scope.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            try:
                missing = [other for other, key in enumerate(keys) if not scope.check([key])]
            except RuntimeError:
                raise TransportError(f"{self._name}: the trainer's store is gone: {_said(error)}") from error
            who = ", ".join("the trainer" if other == 0 else f"sampler worker of rank {other}" for other in missing)
            raise TransportError(f"{self._name}: waited {timeout_s:.0f} s for {who or 'the store'}") from error

    def broadcast(self, buffer: torch.Tensor, what: str, end: float) -> None:
        """From rank 0 to all, until the monotonic time `end`. A group that failed must not be used again."""
        left_s = end - time.monotonic()
        began = time.monotonic()
        try:
            if left_s <= 0:
                raise RuntimeError("no time left")
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = timedelta(seconds=left_s)
            work = self._group.broadcast([buffer], options)
            if self._device.type == "cuda":
                _finish_on_gpu(work, end)
            else:
                work.wait()
        except RuntimeError as error:
            raise TransportError(f"{self._name}: waited {time.monotonic() - began:.1f} s for {what}: {_said(error)}") from error

    def abort(self) -> None:
        """Leave the group; peers that still wait for this rank get an error or their deadline."""
        self._group.abort()


def _gloo(scope: Any, host: str, rank: int, world_size: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]  # this interface and no other
    options._timeout = limit
    return dist.ProcessGroupGloo(scope, rank, world_size, options)


def _nccl(scope: Any, rank: int, world_size: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(scope, rank, world_size, options)


def _finish_on_gpu(work: Any, end: float) -> None:
    """Wait for a collective on the GPU with a deadline; NCCL's own wait only orders streams."""
    pause_s = 1e-4
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError("deadline passed")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.01)
    work.wait()


def _own_address(master_address: str, master_port: int) -> str:
    """The address of this node on the interface that leads to the trainer."""
    family = socket.AF_INET6 if ":" in master_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master_address, master_port))
        return str(probe.getsockname()[0])


def _said(error: Exception) -> str:
    """What torch said, without its stack of C++ frames."""
    return str(error).split("\n", maxsplit=1)[0]
