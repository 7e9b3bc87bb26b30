"""The way over rank 0: the trainer's sender is rank 0 of one group, the workers of all samplers are the others, and whole
tensors are broadcast to them."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prl.weights import group as groups
from prl.weights.delta import HEADER_BYTES, Form, Message, Outgoing, apply, items_of, read_header
from prl.weights.digest import digest
from prl.weights.group import Group, Left, Lost, Meeting, StoreHost, TransportError
from prl.weights.options import WeightsOptions
from prl.weights.plan import Bucket, TensorSpec, item_bytes, pack


@dataclass(frozen=True)
class SendReport:
    bytes: int  # on the wire, or in files
    send_s: float  # without the digest
    digest: int
    changed_share: float | None = None  # of all values; None where all were sent, whether they had changed or not


@dataclass(frozen=True)
class Whole:
    """A version that a worker holds, as full tensors by name."""

    tensors: Mapping[str, torch.Tensor]
    digest: int


@dataclass(frozen=True)
class _Sent:
    """The version that was sent last."""

    specs: list[TensorSpec]
    buckets: list[torch.Tensor]
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
        self._sent: _Sent | None = None  # with `delta`, in the group that there is

    def join(self, epoch: int, world_size: int) -> None:
        """Build the group of this epoch of 1 + samplers' workers; blocks until all are there or `group_s` is over
        (TransportError names who is missing)."""
        self.close()
        self._epoch, self._left = epoch, threading.Event()
        place = self._host.store, self.master_address, 0, world_size, epoch
        self._member = _Member(*place, self._options.group_s, self._device, self._left)

    def leave(self, epoch: int | None = None) -> None:
        """From any thread: end what waits in the group, if it is of this epoch (None: of any), with a TransportError."""
        if epoch in (None, self._epoch):
            self._left.set()

    def send(self, tensors: Mapping[str, torch.Tensor], held: int | None = None) -> SendReport:
        """Send full tensors, in their order, to every worker; blocks until all have them or `update_s` is over. With `delta`
        only what differs from the version before goes, where `held` is the digest of that one: what all workers hold."""
        if self._member is None:
            raise TransportError("no transfer group: join an epoch before sending")
        started = time.monotonic()
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in whole.values()]
        buckets = pack(specs, self._options.bucket_mib * 2**20)
        buffer = torch.empty(max((b.bytes for b in buckets), default=0), dtype=torch.uint8, device=self._device)
        last, self._sent = self._sent, None  # until all is sent, nobody knows what the workers hold
        if last is not None and (last.digest, last.specs) != (held, specs):
            last = None
        outgoing = Outgoing(None) if last is None else Outgoing(last.buckets, last.digest)
        sent_bytes = 0
        for number, bucket in enumerate(buckets):
            packed = buffer[: bucket.bytes]
            _gather(raw, bucket, packed)
            parts = [packed]
            if self._options.delta:
                message = outgoing.message(packed, item_bytes(specs, bucket))
                parts = message.parts()
            for part in parts:
                self._broadcast(part, f"bucket {number + 1} of {len(buckets)}", started + self._options.update_s)
                sent_bytes += part.numel()
        report = SendReport(sent_bytes, time.monotonic() - started, digest(whole), outgoing.changed_share)
        if self._options.delta:
            self._sent = _Sent(specs, outgoing.buckets, report.digest)
        return report

    def close(self) -> None:
        if self._member is not None:
            self._member.close()
            self._member = self._sent = None

    def _broadcast(self, buffer: torch.Tensor, what: str, end: float) -> None:
        assert self._member is not None
        try:
            self._member.broadcast(buffer, f"{what} to be taken by the samplers", end)
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
        self,
        specs: Sequence[TensorSpec],
        bucket_bytes: int,
        deadline_s: float | None = None,
        *,
        deltas: bool = False,
        held: Whole | None = None,
    ) -> dict[str, torch.Tensor]:
        """The next version, as full tensors by name. `deadline_s` (default: the constructor's `timeout_s`) covers all of
        it, with the wait for the sender to begin. `deltas`: the sender's option `delta`. With it the tensors of `held` are
        used up: they become the new version, or something between the two where this raises, which it does with a DeltaError
        where the new version is told by its difference to another one."""
        end = time.monotonic() + (self._timeout_s if deadline_s is None else deadline_s)
        if held is not None and [spec_of(name, tensor) for name, tensor in held.tensors.items()] != list(specs):
            held = None
        if held is None:
            tensors = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=self._device) for s in specs}
        else:
            tensors = dict(held.tensors)
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
        buckets = pack(specs, bucket_bytes)
        largest = max((b.bytes for b in buckets), default=0)
        buffer = torch.empty(largest, dtype=torch.uint8, device=self._device)
        fields, state = (torch.empty(n * deltas, dtype=torch.uint8, device=self._device) for n in (HEADER_BYTES, largest))
        for number, bucket in enumerate(buckets):
            what, header = f"bucket {number + 1} of {len(buckets)} from the trainer", None
            if deltas:
                self._member.broadcast(fields, what, end)
                size = item_bytes(specs, bucket)
                header = read_header(fields, size, bucket.bytes // size, None if held is None else held.digest)
            body = buffer[: bucket.bytes if header is None else header.body_bytes]
            if body.numel():
                self._member.broadcast(body, what, end)
            if header is None or header.form is Form.DENSE:
                _scatter(body, bucket, raw)
            elif header.form is not Form.EMPTY:
                packed = state[: bucket.bytes]
                _gather(raw, bucket, packed)
                apply(items_of(packed, header.item_bytes), Message(header, body))
                _scatter(packed, bucket, raw)
        return tensors

    def arriving(
        self, specs: Sequence[TensorSpec], bucket_bytes: int, deadline_s: float
    ) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """The next version, tensor by tensor, each as soon as all of it is there, but for empty ones: it takes the memory of a
        bucket and of one tensor that lies in several. `deadline_s` covers all of it. Not for deltas."""
        end = time.monotonic() + deadline_s
        buckets = pack(specs, bucket_bytes)
        buffer = torch.empty(max((b.bytes for b in buckets), default=0), dtype=torch.uint8, device=self._device)
        begun: dict[int, torch.Tensor] = {}
        for number, bucket in enumerate(buckets):
            self._member.broadcast(buffer[: bucket.bytes], f"bucket {number + 1} of {len(buckets)} from the trainer", end)
            for piece in bucket.pieces:
                spec = specs[piece.tensor]
                if piece.start == 0:
                    begun[piece.tensor] = torch.empty(spec.bytes, dtype=torch.uint8, device=self._device)
                raw = begun[piece.tensor]
                raw[piece.start : piece.end].copy_(buffer[piece.at : piece.at + piece.end - piece.start])
                if piece.end == spec.bytes:
                    yield spec, begun.pop(piece.tensor).view(getattr(torch, spec.dtype)).view(spec.shape)

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
        self._done = 0  # broadcasts
        self._group: Group | None = groups.assemble(meeting, {"all": range(world_size)}, host, device, timeout_s)["all"]

    def broadcast(self, buffer: torch.Tensor, what: str, end: float) -> None:
        """From rank 0 to all, until the monotonic time `end`. A group that failed must not be used again."""
        assert self._group is not None
        began = time.monotonic()
        try:
            self._group.finish(self._group.begin(buffer, end), end, self._reason)
        except (RuntimeError, Left, Lost) as error:
            halt = groups.halt(self._done, began, end)
            words = f"{self._title}: waited {halt.waited_s:.1f} s for {what}: {groups.said(error)}"
            raise TransportError(words, halt=halt) from error
        self._done += 1

    def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            groups.close([group])


def _gather(raw: Sequence[torch.Tensor], bucket: Bucket, packed: torch.Tensor) -> None:
    """From the tensors' bytes into a bucket's."""
    for piece in bucket.pieces:
        packed[piece.at : piece.at + piece.end - piece.start].copy_(raw[piece.tensor][piece.start : piece.end])


def _scatter(packed: torch.Tensor, bucket: Bucket, raw: Sequence[torch.Tensor]) -> None:
    """From a bucket's bytes into the tensors'."""
    for piece in bucket.pieces:
        raw[piece.tensor][piece.start : piece.end].copy_(packed[piece.at : piece.at + piece.end - piece.start])
