"""The weight-transfer engine in each of vLLM's workers: receive in a thread, verify, then copy into the live parameters.

Tokens go on being sampled while a version arrives into staged tensors. What was staged is digested and reported to the
orchestrator; the commit then only copies, inside a pause, and compares the live parameters with what was digested, bit for
bit, before any token of the new version counts. Parameters keep their storage, so nothing has to be rebuilt.

With weights.staging: chunked nothing is staged: the sampler stands still, and what arrives is written over the last version,
which is digested before a token of it counts.

What cannot be written so is staged as whole tensors, which vLLM's loader takes at the commit (prl/sampler/reload.py). What it
makes of them cannot be digested: of those, what was given to it counts.
"""

import asyncio
import os
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
from prl.sampler.lanes_in import LaneEnd, LanesInfo, check_parts, live_staging, route_of
from prl.sampler.link import End, Link
from prl.sampler.live import LiveWeights
from prl.sampler.placement import Loaded, Part, Placement, direct_share, place
from prl.sampler.reload import reload_modules
from prl.weights import digest
from prl.weights.agreement import Facts, check_agreement, facts
from prl.weights.folder import Slab, VersionReader, write_pieces
from prl.weights.group import TransportError
from prl.weights.lane_deltas import LegDigests
from prl.weights.plan import TensorSpec, from_json
from prl.weights.shipments import Route
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
    shards: list[torch.Tensor]  # one for each part; with weights.staging: chunked where they are live already
    parts: list[Part]
    digest: int
    share: bool  # the digest is of what this worker counts; those of all workers add up to the version's
    told: int  # the digest that the orchestrator compares
    whole: Whole | None = None  # with weights.delta: all of it, where it came over the group
    legs: LegDigests = field(default_factory=dict)  # by lanes


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
        # With weights.delta: what the group brought last; the next version may be a delta to it.
        self._held: Whole | None = None
        self._live_legs: LegDigests = {}  # by lanes: of the live version, while it is whole
        self._staging = 0  # number of the newest thing to be staged; whatever else still arrives is nobody's
        self._lock = threading.Lock()  # of that number, for who does what the newest alone may do
        self._live = LiveWeights("nothing was stored yet")
        self._unusable = ""  # why the model cannot be used any more
        self._told: frozenset[str] | None = None  # the modules that were last told to be loaded

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
            parts = self._place(list(route.plan.tensors))
            check_parts(route, self.parallel_config.rank, parts)
            if self._chunked or route.deltas:
                live_staging(route, self.parallel_config.rank, parts)  # refused now, if at all
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
        parts = self._place(specs)
        held, legs = self._held, self._live_legs
        staging = self._begin_staging()
        self._held = None  # used up by this version
        link.do(lambda: self._receive(link, staging, update_info, specs, parts, held, legs))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Copy what was staged into the live parameters, and have vLLM load what goes to its loader."""
        assert self._staged is not None, "commit without a staged version"
        self._live.end(f"version {self._staged.version} took its place")
        wholes: dict[str, torch.Tensor] = {}
        modules: dict[str, None] = {}
        for part, shard in zip(self._staged.parts, self._staged.shards, strict=True):
            match part:
                case Placement():
                    if shard.data_ptr() != part.live.data_ptr():
                        part.live.copy_(shard, non_blocking=True)
                case Loaded():
                    wholes[part.spec.name] = shard
                    modules[part.module] = None
        if wholes:
            self._unusable = f"vLLM could not load version {self._staged.version}, and has lost the one before"
            reload_modules(self.model, self.model_config, modules, wholes)
            self._unusable = ""

    def shutdown(self) -> None:
        self._begin_staging()
        if self._link is not None:
            self._link.leave(SHUTDOWN_S)

    # What our worker extension calls.

    def load(self, info: LoadInfo) -> None:
        """Read this worker's part of a version from files, in a thread."""
        specs = from_json(info.tensors)
        parts = self._place(specs)
        staging = self._begin_staging()
        if not info.seed and self._link is not None:  # the whole group does without a transfer group now
            self._link.leave()
            self._link = self._held = None
        _in_thread(lambda: self._load(staging, info, specs, parts), f"load version {info.lineage}:{info.step}")

    def store(self, info: StoreInfo) -> None:
        """Write what this worker counts of the live version to files, in a thread; a newer version ends it. Raises ValueError
        where vLLM's loader has made something else of it."""
        placements = []
        for part in self._place(from_json(info.tensors)):
            if isinstance(part, Placement) and part.counted:
                placements.append(part)
            elif isinstance(part, Loaded):
                raise ValueError(f"the live version cannot be stored: {part.spec.name} cannot be read back")
        self._live.end("it was asked for again")
        self._live = live = LiveWeights()
        _in_thread(lambda: self._store(live, info, placements), "store the live version")

    def staged(self) -> Staged | None:
        """What was staged last; None while nothing is complete."""
        return self._staged

    def verify_live(self) -> tuple[int, bool]:
        """The digest of the live parameters, and whether it is this worker's share of the version's. They are compared with
        what was staged and digested, which takes a third of a digest's time; those that were written as they came are
        digested. Of whole tensors, what vLLM's loader was given counts. Raises ValueError where they differ. Frees what was
        staged, unless deltas need it."""
        assert self._staged is not None, "verification before a version was staged"
        staged, self._staged = self._staged, None
        placed = [(part, shard) for part, shard in zip(staged.parts, staged.shards, strict=True) if isinstance(part, Placement)]
        if self._chunked:
            self._live_legs = staged.legs
            return digest.total(part.digest_of(part.live) for part, _ in placed if part.counted), True
        for part, shard in placed:
            if not _same_bits(part.live, shard):
                raise ValueError(f"{part.spec.name}: the live copy differs from what was received")
        self._live_legs = staged.legs
        return staged.digest, staged.share

    # What threads do.

    def _begin_staging(self) -> int:
        with self._lock:  # who writes over the live version ends with the tensor that it is at
            self._staging += 1
            self._staged, self._live_legs = None, {}
        self._live.end("another version arrives")
        return self._staging

    def _receive(
        self,
        link: Link,
        staging: int,
        info: ReceiveInfo,
        specs: list[TensorSpec],
        parts: list[Part],
        held: Whole | None,
        legs: LegDigests,
    ) -> None:
        """In the link's thread."""
        options = self._child.config.weights

        def take() -> Staged:
            version = Version(info.lineage, info.step)
            if link.end is None:
                raise TransportError(f"no group for version {version}: {link.no_group}", link.no_group.missing)
            if isinstance(link.end, LaneEnd):
                writing = partial(self._writing, staging) if self._chunked else None
                got = link.end.receive(parts, options.update_s, writing, legs)
                return Staged(version, got.shards, parts, got.counted, share=True, told=got.digest, legs=got.legs)
            if self._chunked:
                arriving = link.end.arriving(specs, info.bucket_bytes, options.update_s)
                total = self._write(staging, arriving, parts)
                return Staged(version, _live(parts), parts, total, share=False, told=total)
            tensors = link.end.receive(specs, info.bucket_bytes, options.update_s, deltas=options.delta, held=held)
            shards = [part.of(tensors[part.spec.name]) for part in parts]
            whole = Whole(tensors, digest.digest(tensors))
            kept = whole if options.delta else None
            return Staged(version, shards, parts, whole.digest, share=False, told=whole.digest, whole=kept)

        failed = self._stage(staging, take, {"lineage": info.lineage, "step": info.step, "epoch": info.epoch, "seed": 0})
        if failed and link.end is not None:
            link.close(f"the last transfer failed: {failed}")

    def _write(self, staging: int, arriving: Iterable[tuple[TensorSpec, torch.Tensor]], parts: Sequence[Part]) -> int:
        """Over the live version, tensor by tensor; the digest of what has arrived."""
        of: dict[str, list[Part]] = defaultdict(list)
        for part in parts:
            of[part.spec.name].append(part)
        digests = []
        for spec, tensor in arriving:
            digests.append(digest.part(spec.name, tensor))
            with self._writing(staging):
                for part in of[spec.name]:
                    _copy(part, part.of(tensor))
        return digest.total(digests)

    @contextmanager
    def _writing(self, staging: int) -> Iterator[None]:
        """Over the live version. Raises TransportError where a newer one is ordered: nothing older is written any more."""
        with self._lock:
            if staging != self._staging:
                raise TransportError("another version is written over the live one by now")
            yield

    def _load(self, staging: int, info: LoadInfo, specs: list[TensorSpec], parts: list[Part]) -> None:
        def take() -> Staged:
            version, wait_s = Version(info.lineage, info.step), self._child.config.weights.update_s
            reader = VersionReader(self._child.run.weights, version, specs, wait_s)
            shards, counted = [], []
            for part in parts:
                if staging != self._staging:
                    raise StoredError(f"version {version} is not wanted any more")
                shard = reader.read(_slab(part), self.device, verify=not part.counted).reshape(part.held_shape)
                if part.counted:
                    counted.append(part.digest_of(shard))
                if self._chunked:
                    with self._writing(staging):  # reading may have taken longer than it was wanted
                        _copy(part, shard)
                    (shard,) = _live([part])
                shards.append(shard)
            own = digest.total(counted)
            return Staged(version, shards, parts, own, share=True, told=own)

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
            report["direct_share"] = direct_share(staged.parts)
        except Exception as error:  # whatever it was, the orchestrator must hear of it: it waits for this report
            failed = report["error"] = f"{type(error).__name__}: {error}"
            report["missing"] = error.missing if isinstance(error, TransportError) else ()
            if staging == self._staging:
                traceback.print_exc()
        with self._lock:
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
        async with ControlClient(
            child.control_url, child.token, child.role, child.index, child.config.control, start=child.start
        ) as client:
            await client.call(
                call, where | body, deadline_s=child.config.weights.update_s, reason=f"reporting a {call} version"
            )

    def _route(self, lanes: LanesInfo) -> Route:
        parallel, workers = self.parallel_config, self._child.config.sample.tensor_parallel
        if parallel.world_size != workers or parallel.data_parallel_size > 1:
            raise ValueError("lanes lead to samplers that are tensor-parallel and nothing else: set weights.transport: gather")
        return route_of(self._child, lanes.trainer_ranks, self._dtype)

    @property
    def _chunked(self) -> bool:
        return self._child.config.weights.staging == "chunked"

    @property
    def _dtype(self) -> str:
        return str(self.model_config.dtype).removeprefix("torch.")

    def _facts(self, route: Route | None) -> Facts:
        """Each from where this worker has it, not from the trainer."""
        child, dtype = self._child, self._dtype
        shapes = tensor_shapes(read_model_config(child.model))
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

    def _place(self, specs: list[TensorSpec]) -> list[Part]:
        """Raises ValueError where this sampler cannot take them."""
        if self._unusable:
            raise ValueError(self._unusable)
        parts = place(self.model, bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False)), specs)
        why = {part.module: part.why for part in parts if isinstance(part, Loaded)}
        if frozenset(why) != self._told:
            self._told = frozenset(why)
            words = f"; whole tensors go to vLLM's loader for {len(why)} modules: {'; '.join(sorted(set(why.values())))}"
            say(f"prl: {direct_share(parts):.1%} of a version's bytes are written directly{words if why else ''}")
        if why and self._chunked:
            raise ValueError(f"weights.staging = chunked: vLLM's loader takes whole versions, and {next(iter(why.values()))}")
        return parts


def _copy(part: Part, shard: torch.Tensor) -> None:
    """Over the live version. Raises ValueError where a part that another worker counts is not there afterwards."""
    assert isinstance(part, Placement)
    part.live.copy_(shard)
    if not part.counted and not _same_bits(part.live, shard):
        raise ValueError(f"{part.spec.name}: the live copy differs from what was received")


def _live(parts: Iterable[Part]) -> list[torch.Tensor]:
    return [part.live for part in parts if isinstance(part, Placement)]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    for bits in (torch.int64, torch.int32, torch.int16):  # the larger the faster
        if not any(number % bits.itemsize for t in (one, other) for number in (t.storage_offset(), t.numel())):
            return torch.equal(one.view(bits), other.view(bits))
    return torch.equal(one, other)


def _slab(part: Part) -> Slab:
    return Slab(part.spec, part.dim, part.start, part.size)


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

    def prl_commit(self) -> dict[str, str | bool]:
        """Copy, then verify the live parameters: {"digest": ..., "share": ...} or {"error": ...}."""
        try:
            self.finish_weight_update()  # type: ignore[attr-defined]
            value, share = self.weight_transfer_engine.verify_live()
            return {"digest": str(value), "share": share}
        except Exception as error:  # whatever vLLM's loader failed at, nothing must be sampled from what it left
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
