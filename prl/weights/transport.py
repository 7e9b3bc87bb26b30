"""The group that carries the weights: the trainer's sender is rank 0, the workers of all samplers are the others.

It lives outside of torch's default group, so that neither side's own communicators know of it, over gloo where tensors are on
CPUs and over NCCL on GPUs (NCCL's path was never run). The trainer's process hosts the store for the rendezvous. A group
belongs to one epoch of the membership; a group that failed is thrown away, and the next epoch builds another.

A rank that is gone or stands still holds up the others in a collective until their deadline, and gloo can end no operation
before that. So every wait here looks at an event by which another thread has this rank leave: the operation is left behind in
a thread of its own.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed does not export them to type checkers

from prl.weights.digest import digest
from prl.weights.options import WeightsOptions
from prl.weights.plan import Bucket, TensorSpec, pack

LOOK_S = 0.1  # between two looks of a wait at whether this rank is to leave
CLOSE_S = 1.0  # that a group without anything under way has to end: a process that exits meanwhile would abort
FIRST_LOOK_S, LONGEST_LOOK_S = 0.001, 0.02  # between two looks at who is there


class TransportError(Exception):
    """A group could not be built, or a transfer did not end in time; says what was waited for. `missing`: the ranks that did
    not come to the building."""

    def __init__(self, words: str, missing: Sequence[int] = ()) -> None:
        super().__init__(words)
        self.missing = tuple(missing)


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
        self._epoch = -1
        self._left = threading.Event()

    def join(self, epoch: int, world_size: int) -> None:
        """Build the group of this epoch of 1 + samplers' workers; blocks until all are there or `group_s` is over
        (TransportError names who is missing)."""
        self.close()
        self._epoch, self._left = epoch, threading.Event()
        limit_s = self._options.group_s
        self._group = _Group(self._store, self.master_address, 0, world_size, epoch, limit_s, self._device, self._left)

    def leave(self, epoch: int) -> None:
        """From any thread: end what waits in the group of this epoch, with a TransportError."""
        if epoch == self._epoch:
            self._left.set()

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
            self._group.close()
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
        left: threading.Event | None = None,
    ) -> None:
        """Join the group of this epoch; blocks until all are there or `timeout_s` is over. Once `left` is set, whatever waits
        here ends with a TransportError."""
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
        self._group = _Group(store, host, rank, world_size, epoch, timeout_s, self._device, left or threading.Event())

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
        self._group.close()


class _Group:
    """A process group that torch's default group knows nothing of, with a deadline on everything."""

    def __init__(
        self,
        store: Any,
        host: str,
        rank: int,
        world_size: int,
        epoch: int,
        timeout_s: float,
        device: torch.device,
        left: threading.Event,
    ) -> None:
        self._name = f"weight group, epoch {epoch}, rank {rank} of {world_size}"
        self._device = device
        self._left = left
        end = time.monotonic() + timeout_s
        scope = PrefixStore(f"weights/{epoch}", store)
        self._meet(scope, rank, world_size, timeout_s)
        limit = timedelta(seconds=max(end - time.monotonic(), 1.0))

        def build() -> Any:
            on_gpu = device.type == "cuda"
            return _nccl(scope, rank, world_size, limit) if on_gpu else _gloo(scope, host, rank, world_size, limit)

        try:
            self._group: Any = self._unless_left(_in_thread(build, "weight group"))
        except RuntimeError as error:
            raise TransportError(f"{self._name}: not built within {timeout_s:.0f} s: {_said(error)}") from error

    def _meet(self, scope: Any, rank: int, world_size: int, timeout_s: float) -> None:
        """Wait until every rank is known to be there, because a collective only ever says that it waited."""
        keys = [f"here/{other}" for other in range(world_size)]
        end = time.monotonic() + timeout_s
        look_s = FIRST_LOOK_S
        try:
            scope.set(keys[rank], "")
            while not scope.check(keys):
                if time.monotonic() > end:
                    missing = [other for other, key in enumerate(keys) if not scope.check([key])]
                    who = ", ".join("the trainer" if other == 0 else f"sampler worker of rank {other}" for other in missing)
                    raise TransportError(f"{self._name}: waited {timeout_s:.0f} s for {who or 'the store'}", missing)
                if self._left.wait(look_s):
                    raise TransportError(f"{self._name}: it was left while it was built")
                look_s = min(2 * look_s, LONGEST_LOOK_S)
        except RuntimeError as error:
            raise TransportError(f"{self._name}: the trainer's store is gone: {_said(error)}") from error

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
                self._finish_on_gpu(work, end)
            else:
                self._finish_on_cpu(work)
        except RuntimeError as error:
            raise TransportError(f"{self._name}: waited {time.monotonic() - began:.1f} s for {what}: {_said(error)}") from error

    def close(self) -> None:
        """Leave the group. What is still under way in it holds up a thread of its own until its deadline, and nobody else."""
        group, self._group = [self._group], None
        closing = threading.Thread(target=_close, args=(group,), name="leave weight group", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _unless_left(self, result: "Future[Any]") -> Any:
        while True:
            try:
                return result.result(LOOK_S)
            except TimeoutError:
                if self._left.is_set():
                    raise TransportError(f"{self._name}: it was left while it was built") from None

    def _finish_on_cpu(self, work: Any) -> None:
        """The operation has a deadline of its own."""
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # its own error, or none: it ended just now
                    return
                if self._left.is_set():
                    raise RuntimeError("this rank was told to leave") from None

    def _finish_on_gpu(self, work: Any, end: float) -> None:
        """Wait for a collective on the GPU with a deadline; NCCL's own wait only orders streams."""
        pause_s = 1e-4
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError("deadline passed")
            if self._left.wait(pause_s):
                raise RuntimeError("this rank was told to leave")
            pause_s = min(pause_s * 2, 0.01)
        work.wait()


def _in_thread(work: Callable[[], Any], name: str) -> "Future[Any]":
    """Its result; nothing waits for the thread at the end of the process."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def _close(groups: list[Any]) -> None:
    """End the group in the list. Its destructor waits for what is under way, so the last reference has to go here."""
    groups.pop().abort()


def _gloo(scope: Any, host: str, rank: int, world_size: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]  # this interface and no other
    options._timeout = limit
    return dist.ProcessGroupGloo(scope, rank, world_size, options)


def _nccl(scope: Any, rank: int, world_size: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(scope, rank, world_size, options)


def _own_address(master_address: str, master_port: int) -> str:
    """The address of this node on the interface that leads to the trainer."""
    family = socket.AF_INET6 if ":" in master_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master_address, master_port))
        return str(probe.getsockname()[0])


def _said(error: Exception) -> str:
    """What torch said, without its stack of C++ frames."""
    return str(error).split("\n", maxsplit=1)[0]
