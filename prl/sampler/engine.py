"""The weight-transfer engine in each of vLLM's workers: receive in a thread, verify, then copy into the live parameters.

Tokens go on being sampled while a version arrives into staged tensors. What was staged is digested and reported to the
orchestrator; the commit then only copies, inside a pause, and digests the live parameters before any token of the new
version counts. Parameters keep their storage, so nothing has to be rebuilt.
"""

import asyncio
import os
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from prl.config.hf_config import read_model_config
from prl.config.tensors import tensor_shapes
from prl.control.child import Child, child_from_environment, say
from prl.control.client import ControlClient
from prl.flow.versions import Version
from prl.sampler.link import Link
from prl.sampler.placement import Placement, place
from prl.weights import digest
from prl.weights.agreement import Facts, check_agreement, facts
from prl.weights.group import TransportError
from prl.weights.plan import TensorSpec, from_json
from prl.weights.transport import SamplerEnd, libraries

SHUTDOWN_S = 2.0  # that the transfer group has to end before the process does


@dataclass(kw_only=True)
class ConnectInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the group of an epoch meets. The trainer's `facts` are compared with ours before, and `tensors`, where given,
    checked against the model."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    epoch: int
    timeout_s: float
    facts: dict[str, Any]
    tensors: list[list[Any]] | None = None


@dataclass(kw_only=True)
class ReceiveInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that comes next over the group of `epoch`."""

    lineage: int
    step: int
    epoch: int
    tensors: list[list[Any]]
    bucket_bytes: int


@dataclass(frozen=True)
class Staged:
    version: Version
    tensors: dict[str, torch.Tensor]
    placements: list[Placement]
    digest: int


class InPlaceEngine(WeightTransferEngine[ConnectInfo, ReceiveInfo]):  # type: ignore[misc]
    """The link's thread owns everything that waits for the trainer; vLLM's own thread only arms it and copies. A new epoch has
    a new link: whatever the one before it still waits for is left behind with it."""

    init_info_cls = ConnectInfo
    update_info_cls = ReceiveInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("in-flight weight updates with pipeline parallelism give wrong log-probs: set it to 1")
        self._child: Child = child_from_environment()
        self._link: Link | None = None
        self._staged: Staged | None = None

    # What vLLM's worker calls.

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        harmless = check_agreement(Facts.from_json(init_info.facts), self._facts())
        if harmless:
            say(f"prl: differences from the trainer that do no harm: {harmless}")
        if init_info.tensors is not None:
            self._place(from_json(init_info.tensors))
        if self._link is not None:
            self._link.leave()
        self._staged = None
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank

        def connect(left: threading.Event) -> SamplerEnd:
            info = init_info
            place = info.master_address, info.master_port, rank, info.world_size, info.epoch, info.timeout_s
            return SamplerEnd(*place, self.device, left)

        self._link = Link(init_info.epoch, connect)

    def start_weight_update(self) -> None:
        """Nothing: the parameters stay as they are until the commit."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Arm the receiver and return; the base class would wait for an accelerator here."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        link = self._link
        if link is None or update_info.epoch != link.epoch:
            connected = "was never connected" if link is None else f"was connected in epoch {link.epoch}"
            raise ValueError(f"receive in epoch {update_info.epoch}, but this sampler {connected}")
        specs = from_json(update_info.tensors)
        placements = self._place(specs)
        self._staged = None
        link.do(lambda: self._receive(link, update_info, specs, placements))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Copy what was staged into the live parameters."""
        assert self._staged is not None, "commit without a staged version"
        for placement in self._staged.placements:
            placement.live.copy_(placement.shard(self._staged.tensors[placement.spec.name]), non_blocking=True)

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.leave(SHUTDOWN_S)

    # What our worker extension calls.

    def staged(self) -> tuple[str, int] | None:
        """Label and digest of what was received last; None while nothing is complete."""
        return None if self._staged is None else (str(self._staged.version), self._staged.digest)

    def live_digest(self) -> int:
        """Recomputed from the live parameters: this worker's share of the version's digest. Raises ValueError where the
        shards that another worker counts differ from what was staged. Frees what was staged."""
        assert self._staged is not None, "live digest before a version was staged"
        staged, self._staged = self._staged, None
        for placement in staged.placements:
            if not placement.counted and not _same_bits(placement.live, placement.shard(staged.tensors[placement.spec.name])):
                raise ValueError(f"{placement.spec.name}: the live copy differs from what was received")
        return digest.total(placement.digest() for placement in staged.placements if placement.counted)

    # What the link's thread does.

    def _receive(self, link: Link, info: ReceiveInfo, specs: list[TensorSpec], placements: list[Placement]) -> None:
        version = Version(info.lineage, info.step)
        began = time.monotonic()
        report: dict[str, Any] = {"lineage": info.lineage, "step": info.step, "epoch": info.epoch}
        failed = ""
        try:
            if link.end is None:
                raise TransportError(f"no group for version {version}: {link.no_group}")
            tensors = link.end.receive(specs, info.bucket_bytes, self._child.config.weights.update_s)
            receive_s = time.monotonic() - began
            staged = Staged(version, tensors, placements, digest.digest(tensors))
            report |= {"digest": str(staged.digest), "receive_s": receive_s}
        except Exception as error:  # whatever it was, the orchestrator must hear of it: it waits for this report
            failed = report["error"] = f"{type(error).__name__}: {error}"
            if not link.left:
                traceback.print_exc()
        if link.left:
            return  # for another group, in which this version comes again
        if not failed:
            self._staged = staged
        try:
            asyncio.run(self._report(report))
        except Exception:  # the orchestrator's deadline for `staged` tells of the loss
            traceback.print_exc()
        if failed and link.end is not None:
            link.close(f"the last transfer failed: {failed}")

    async def _report(self, body: dict[str, Any]) -> None:
        child = self._child
        where = {"replica": child.index, "worker": self.parallel_config.rank}
        async with ControlClient(child.control_url, child.token, child.role, child.index, child.config.control) as client:
            await client.call(
                "staged", where | body, deadline_s=child.config.weights.update_s, reason="reporting a staged version"
            )

    def _facts(self) -> Facts:
        """Each from where this worker has it, not from the trainer."""
        child, dtype = self._child, str(self.model_config.dtype).removeprefix("torch.")
        shapes = tensor_shapes(read_model_config(child.run.model))
        return facts(
            f"sampler {child.index}, worker {self.parallel_config.rank},",
            os.uname().nodename,
            libraries=libraries(self.device),
            dtype=dtype,
            tensors=[TensorSpec(name, dtype, shape) for name, shape in shapes.items()],
            bucket_bytes=child.config.weights.bucket_mib * 2**20,
            environment=os.environ,
        )

    def _place(self, specs: list[TensorSpec]) -> list[Placement]:
        return place(self.model, bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False)), specs)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class WorkerExtension:
    """Mixed into vLLM's worker, so that each step of an update is one call."""

    weight_transfer_engine: InPlaceEngine

    def prl_receive(self, update_info: dict[str, Any]) -> None:
        """Arm the receiver; a version that was staged or is on its way and was never committed is given up."""
        if not self._weight_update_active:  # type: ignore[attr-defined]  # the worker's own flag
            self.start_weight_update()  # type: ignore[attr-defined]
        self.update_weights(update_info)  # type: ignore[attr-defined]

    def prl_staged(self) -> dict[str, str]:
        staged = self.weight_transfer_engine.staged()
        return {} if staged is None else {"version": staged[0], "digest": str(staged[1])}

    def prl_commit(self) -> dict[str, str]:
        """Copy, then digest the live parameters: {"digest": ...} or {"error": ...}."""
        self.finish_weight_update()  # type: ignore[attr-defined]
        try:
            return {"digest": str(self.weight_transfer_engine.live_digest())}
        except ValueError as error:
            return {"error": str(error)}
