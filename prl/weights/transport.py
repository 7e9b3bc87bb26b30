"""The way over rank 0: the trainer's sender is rank 0 of one group, the workers of all samplers are the others, and whole
tensors are broadcast to them."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prl.weights import group as groups
from prl.weights.digest import digest
from prl.weights.group import Group, Left, Meeting, StoreHost, TransportError
from prl.weights.options import WeightsOptions
from prl.weights.plan import Bucket, TensorSpec, pack


@dataclass(frozen=True)
class SendReport:
    bytes: int
    send_s: float  # without the digest
    digest: int


def libraries(device: torch.device | str) -> dict[str, str]:
    """torch and what carries tensors of this device, with their versions."""
    if torch.device(device).type != "cuda":
        return {"torch": torch.__version__, "library": "gloo"}  # which is a part of torch
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"torch": torch.__version__, "library": "NCCL", "NCCL": nccl}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class TrainerEnd:
    """The sending end. Hosts the store from the start; groups come and go with `join`."""

    def __init__(self, host: str, options: WeightsOptions, device: torch.device | str = "cpu") -> None:
        """`host`: the address of this node that the samplers' nodes reach."""
        self._options = options
        self._device = torch.device(device)
        self._host = StoreHost(host, options.group_s)
        self.master_address, self.master_port = self._host.address, self._host.port
        self._member: _Member | None = None
        self._epoch = -1
        self._left = threading.Event()

    def join(self, epoch: int, world_size: int) -> None:
        """Build the group of this epoch of 1 + samplers' workers; blocks until all are there or `group_s` is over
        (TransportError names who is missing)."""
        self.close()
        self._epoch, self._left = epoch, threading.Event()
        place = self._host.store, self.master_address, 0, world_size, epoch
        self._member = _Member(*place, self._options.group_s, self._device, self._left)

    def leave(self, epoch: int) -> None:
        """From any thread: end what waits in the group of this epoch, with a TransportError."""
        if epoch == self._epoch:
            self._left.set()

    def send(self, tensors: Mapping[str, torch.Tensor]) -> SendReport:
        """Send full tensors, in their order, to every worker; blocks until all have them or `update_s` is over."""
        if self._member is None:
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
        if self._member is not None:
            self._member.close()
            self._member = None

    def _broadcast(self, buffer: torch.Tensor, bucket: Bucket, what: str, end: float) -> None:
        assert self._member is not None
        try:
            self._member.broadcast(buffer[: bucket.bytes], f"{what} to be taken by the samplers", end)
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
        store = groups.connect_store(f"epoch {epoch}, rank {rank}", master_address, master_port, timeout_s)
        host = groups.own_address(master_address, master_port)
        place = store, host, rank, world_size, epoch
        self._member = _Member(*place, timeout_s, self._device, left or threading.Event())

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
            self._member.broadcast(buffer[: bucket.bytes], f"bucket {number + 1} of {len(buckets)} from the trainer", end)
            for piece in bucket.pieces:
                raw[piece.tensor][piece.start : piece.end].copy_(buffer[piece.at : piece.at + piece.end - piece.start])
        return tensors

    def close(self) -> None:
        self._member.close()


class _Member:
    """A rank's place in the group of an epoch."""

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
        self._title = f"weight group, epoch {epoch}, rank {rank} of {world_size}"
        self._reason = groups.told(left)
        names = ["the trainer", *(f"sampler worker of rank {other}" for other in range(1, world_size))]
        meeting = Meeting(self._title, groups.scope_of(store, epoch), names, rank, "", self._reason)
        self._group: Group | None = groups.assemble(meeting, {"all": range(world_size)}, host, device, timeout_s)["all"]

    def broadcast(self, buffer: torch.Tensor, what: str, end: float) -> None:
        """From rank 0 to all, until the monotonic time `end`. A group that failed must not be used again."""
        assert self._group is not None
        began = time.monotonic()
        try:
            self._group.finish(self._group.begin(buffer, end), end, self._reason)
        except (RuntimeError, Left) as error:
            words = f"{self._title}: waited {time.monotonic() - began:.1f} s for {what}: {groups.said(error)}"
            raise TransportError(words) from error

    def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            groups.close([group])
