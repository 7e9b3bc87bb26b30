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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from prl.config.hf_config import read_model_config
from prl.config.tensors import tensor_shapes
from prl.control.child import Child, child_from_environment, say
from prl.control.client import ControlClient
from prl.flow.versions import Version
from prl.runfolder.weights import StoredError
from prl.sampler.lanes_in import LaneEnd, LanesInfo, check_placements, route_of
from prl.sampler.link import End, Link
from prl.sampler.live import LiveWeights
from prl.sampler.placement import Placement, place
from prl.weights import digest
from prl.weights.agreement import Facts, check_agreement, facts
from prl.weights.folder import Slab, VersionReader, write_pieces
from prl.weights.group import TransportError
from prl.weights.lanes import Route
from prl.weights.plan import TensorSpec, from_json
from prl.weights.transport import SamplerEnd, Whole, libraries

SHUTDOWN_S = 2.0  # that the transfer group has to end before the process does


@dataclass(kw_only=True)
class ConnectInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the group of an epoch meets. The trainer's `facts` are compared with ours before, and `tensors`, where given,
    checked against the model. With `lanes` it has groups of those."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    epoch: int
    timeout_s: float
    facts: dict[str, Any]
    tensors: list[list[Any]] | None = None
    lanes: dict[str, Any] | None = None


@dataclass(kw_only=True)
class ReceiveInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that comes next over the group of `epoch`."""

    lineage: int
    step: int
    epoch: int
    tensors: list[list[Any]]
    bucket_bytes: int


@dataclass(frozen=True)
class LoadInfo:
    """The version that is to be read from files. `epoch` and `seed` (0: none) go back with the report."""

    lineage: int
    step: int
    epoch: int
    seed: int
    tensors: list[list[Any]]


@dataclass(frozen=True)
class StoreInfo:
    """Where this worker's part of the live version is to be written; `seed` goes back with the report."""

    seed: int
    folder: str
    tensors: list[list[Any]]


@dataclass(frozen=True)
class Staged:
    version: Version
    shards: list[torch.Tensor]  # one for each placement
    placements: list[Placement]
    digest: int
    share: bool  # the digest is of what this worker counts; those of all workers add up to the version's
    told: int  # the digest that the orchestrator compares
    whole: Whole | None = None  # with weights.delta: all of it, where it came over the group


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
        self._held: Whole | None = (
            None  # with weights.delta: what the group brought last; the next version may be a delta to it
        )
        self._staging = 0  # number of the newest thing to be staged; whatever else still arrives is nobody's
        self._live = LiveWeights("nothing was stored yet")

    # What vLLM's worker calls.

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        lanes = None if init_info.lanes is None else LanesInfo.from_json(init_info.lanes)
        route = None if lanes is None else self._route(lanes)
        harmless = check_agreement(Facts.from_json(init_info.facts), self._facts(route))
        if harmless:
            say(f"prl: differences from the trainer that do no harm: {harmless}")
        if init_info.tensors is not None:
            self._place(from_json(init_info.tensors))
        if route is not None:
            check_placements(route, self.parallel_config.rank, self._place(list(route.plan.tensors)))
        self._begin_staging()
        self._held = None
        if self._link is not None:
            self._link.leave()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank

        def connect(left: threading.Event) -> End:
            info = init_info
            if route is not None and lanes is not None:
                ours = info.epoch, self._child.index, parallel.rank, info.master_address, info.master_port
                return LaneEnd(route, lanes, *ours, group_s=info.timeout_s, device=self.device, left=left)
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
        held = self._held
        staging = self._begin_staging()
        self._held = None  # used up by this version
        link.do(lambda: self._receive(link, staging, update_info, specs, placements, held))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Copy what was staged into the live parameters."""
        assert self._staged is not None, "commit without a staged version"
        self._live.end(f"version {self._staged.version} took its place")
        for placement, shard in zip(self._staged.placements, self._staged.shards, strict=True):
            placement.live.copy_(shard, non_blocking=True)

    def shutdown(self) -> None:
        self._begin_staging()
        if self._link is not None:
            self._link.leave(SHUTDOWN_S)

    # What our worker extension calls.

    def load(self, info: LoadInfo) -> None:
        """Read this worker's part of a version from files, in a thread."""
        specs = from_json(info.tensors)
        placements = self._place(specs)
        staging = self._begin_staging()
        if not info.seed and self._link is not None:  # the whole group does without a transfer group now
            self._link.leave()
            self._link = self._held = None
        _in_thread(lambda: self._load(staging, info, specs, placements), f"load version {info.lineage}:{info.step}")

    def store(self, info: StoreInfo) -> None:
        """Write what this worker counts of the live version to files, in a thread; a newer version ends it."""
        placements = [placement for placement in self._place(from_json(info.tensors)) if placement.counted]
        self._live.end("it was asked for again")
        self._live = live = LiveWeights()
        _in_thread(lambda: self._store(live, info, placements), "store the live version")

    def staged(self) -> Staged | None:
        """What was staged last; None while nothing is complete."""
        return self._staged

    def live_digest(self) -> int:
        """Recomputed from the live parameters: this worker's share of the version's digest. Raises ValueError where the
        shards that another worker counts differ from what was staged. Frees what was staged, unless deltas need it."""
        assert self._staged is not None, "live digest before a version was staged"
        staged, self._staged = self._staged, None
        for placement, shard in zip(staged.placements, staged.shards, strict=True):
            if not placement.counted and not _same_bits(placement.live, shard):
                raise ValueError(f"{placement.spec.name}: the live copy differs from what was received")
        return digest.total(placement.digest() for placement in staged.placements if placement.counted)

    # What threads do.

    def _begin_staging(self) -> int:
        self._staging += 1
        self._staged = None
        self._live.end("another version arrives")
        return self._staging

    def _receive(
        self,
        link: Link,
        staging: int,
        info: ReceiveInfo,
        specs: list[TensorSpec],
        placements: list[Placement],
        held: Whole | None,
    ) -> None:
        """In the link's thread."""
        options = self._child.config.weights

        def take() -> Staged:
            version = Version(info.lineage, info.step)
            if link.end is None:
                raise TransportError(f"no group for version {version}: {link.no_group}")
            if isinstance(link.end, LaneEnd):
                got = link.end.receive(placements, options.update_s)
                return Staged(version, got.shards, placements, got.counted, share=True, told=got.digest)
            tensors = link.end.receive(specs, info.bucket_bytes, options.update_s, deltas=options.delta, held=held)
            shards = [placement.shard(tensors[placement.spec.name]) for placement in placements]
            whole = Whole(tensors, digest.digest(tensors))
            kept = whole if options.delta else None
            return Staged(version, shards, placements, whole.digest, share=False, told=whole.digest, whole=kept)

        failed = self._stage(staging, take, {"lineage": info.lineage, "step": info.step, "epoch": info.epoch, "seed": 0})
        if failed and link.end is not None:
            link.close(f"the last transfer failed: {failed}")

    def _load(self, staging: int, info: LoadInfo, specs: list[TensorSpec], placements: list[Placement]) -> None:
        def take() -> Staged:
            version, wait_s = Version(info.lineage, info.step), self._child.config.weights.update_s
            reader = VersionReader(self._child.run.weights, version, specs, wait_s)
            shards, parts = [], []
            for placement in placements:
                if staging != self._staging:
                    raise StoredError(f"version {version} is not wanted any more")
                slab = _slab(placement)
                shard = reader.read(slab, self.device, verify=not placement.counted).reshape(placement.live.shape)
                shards.append(shard)
                if placement.counted:
                    parts.append(placement.digest_of(shard))
            own = digest.total(parts)
            return Staged(version, shards, placements, own, share=True, told=own)

        self._stage(
            staging, take, {"lineage": info.lineage, "step": info.step, "epoch": info.epoch, "seed": info.seed, "share": True}
        )

    def _stage(self, staging: int, take: Callable[[], Staged], report: dict[str, Any]) -> str:
        """Take a version and tell the orchestrator; why that failed, where it did and somebody still wants to know."""
        began = time.monotonic()
        failed = ""
        try:
            staged = take()
            report |= {"digest": str(staged.told), "receive_s": time.monotonic() - began}
        except Exception as error:  # whatever it was, the orchestrator must hear of it: it waits for this report
            failed = report["error"] = f"{type(error).__name__}: {error}"
            if staging == self._staging:
                traceback.print_exc()
        if staging != self._staging:
            return ""  # another one comes, perhaps this one again
        if not failed:
            self._staged = staged
            if staged.whole is not None:  # a seed goes past the group: what that holds stays
                self._held = staged.whole
        self._tell("staged", report)
        return failed

    def _store(self, live: LiveWeights, info: StoreInfo, placements: list[Placement]) -> None:
        report: dict[str, Any] = {"seed": info.seed}
        try:
            pieces = ((_slab(placement), live.copy(placement)) for placement in placements)
            files = write_pieces(Path(info.folder), f"rank_{self.parallel_config.rank}", pieces)
            report["files"] = [file.to_json() for file in files]
        except Exception as error:  # the same
            report["error"] = f"{type(error).__name__}: {error}"
            if not live.ended:
                traceback.print_exc()
        self._tell("stored", report)

    def _tell(self, call: str, report: dict[str, Any]) -> None:
        try:
            asyncio.run(self._report(call, report))
        except Exception:  # the orchestrator's deadline tells of the loss
            traceback.print_exc()

    async def _report(self, call: str, body: dict[str, Any]) -> None:
        child = self._child
        where = {"replica": child.index, "worker": self.parallel_config.rank}
        async with ControlClient(child.control_url, child.token, child.role, child.index, child.config.control) as client:
            await client.call(
                call, where | body, deadline_s=child.config.weights.update_s, reason=f"reporting a {call} version"
            )

    def _route(self, lanes: LanesInfo) -> Route:
        parallel, workers = self.parallel_config, self._child.config.sample.tensor_parallel
        if parallel.world_size != workers or parallel.data_parallel_size > 1:
            raise ValueError("lanes lead to samplers that are tensor-parallel and nothing else: set weights.transport: gather")
        return route_of(self._child, lanes.trainer_ranks, self._dtype)

    @property
    def _dtype(self) -> str:
        return str(self.model_config.dtype).removeprefix("torch.")

    def _facts(self, route: Route | None) -> Facts:
        """Each from where this worker has it, not from the trainer."""
        child, dtype = self._child, self._dtype
        shapes = tensor_shapes(read_model_config(child.run.model))
        return facts(
            f"sampler {child.index}, worker {self.parallel_config.rank},",
            os.uname().nodename,
            libraries=libraries(self.device),
            dtype=dtype,
            tensors=[TensorSpec(name, dtype, shape) for name, shape in shapes.items()],
            bucket_bytes=child.config.weights.bucket_mib * 2**20,
            environment=os.environ,
            plan="" if route is None else route.plan.digest(),
        )

    def _place(self, specs: list[TensorSpec]) -> list[Placement]:
        return place(self.model, bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False)), specs)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]  # of larger items faster
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def _slab(placement: Placement) -> Slab:
    return Slab(placement.spec, placement.dim, placement.start, placement.size)


def _in_thread(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


class WorkerExtension:
    """Mixed into vLLM's worker, so that each step of an update is one call."""

    weight_transfer_engine: InPlaceEngine

    def prl_receive(self, update_info: dict[str, Any]) -> None:
        """Arm the receiver; a version that was staged or is on its way and was never committed is given up."""
        if not self._weight_update_active:  # type: ignore[attr-defined]  # the worker's own flag
            self.start_weight_update()  # type: ignore[attr-defined]
        self.update_weights(update_info)  # type: ignore[attr-defined]

    def prl_load(self, info: dict[str, Any]) -> None:
        """Arm the reading of a version from files, with the same effect."""
        if not self._weight_update_active:  # type: ignore[attr-defined]
            self.start_weight_update()  # type: ignore[attr-defined]
        self.weight_transfer_engine.load(LoadInfo(**info))

    def prl_store(self, info: dict[str, Any]) -> None:
        """Arm the writing of the live version to files."""
        self.weight_transfer_engine.store(StoreInfo(**info))

    def prl_staged(self) -> dict[str, str | bool]:
        staged = self.weight_transfer_engine.staged()
        if staged is None:
            return {}
        return {"version": str(staged.version), "digest": str(staged.digest), "share": staged.share}

    def prl_commit(self) -> dict[str, str]:
        """Copy, then digest the live parameters: {"digest": ...} or {"error": ...}."""
        self.finish_weight_update()  # type: ignore[attr-defined]
        try:
            return {"digest": str(self.weight_transfer_engine.live_digest())}
        except ValueError as error:
            return {"error": str(error)}
