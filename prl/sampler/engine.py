"""The weight-transfer engine in each of vLLM's workers: receive in a thread, verify, then copy into the live parameters.

Tokens go on being sampled while a version arrives into staged tensors. What was staged is digested and reported to the
orchestrator; the commit then only copies, inside a pause, and compares the live parameters with what was digested, bit for
bit, before any token of the new version counts. Parameters keep their storage, so nothing has to be rebuilt.

With weights.staging: chunked nothing is staged: the sampler stands still, and what arrives is written over the last version,
which is digested before a token of it counts.

What cannot be written so is staged as whole tensors, which vLLM's loader takes at the commit (prl/sampler/reload.py). What it
makes of them cannot be digested: of those, what was given to it counts.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from prl.config.hf_config import read_model_config
from prl.config.tensors import tensor_shapes
from prl.control.child import Child, child_from_environment, say
from prl.flow.versions import Version
from prl.sampler.arrival import read_version, receive_version
from prl.sampler.lanes_in import LaneEnd, LanesInfo, check_parts, live_staging, route_of
from prl.sampler.link import End, Link, yield_to_sampling
from prl.sampler.live import LiveWeights, check_live
from prl.sampler.orders import ConnectInfo, LoadInfo, ReceiveInfo, StoreInfo
from prl.sampler.placement import Loaded, Part, Placement, direct_share, place, slab
from prl.sampler.reload import reload_modules
from prl.sampler.reports import report_version
from prl.sampler.staging import Staged, StagingArea
from prl.weights import digest
from prl.weights.agreement import Facts, check_agreement, facts
from prl.weights.folder import VersionReader, write_pieces
from prl.weights.group import TransportError
from prl.weights.lane_deltas import LegDigests
from prl.weights.lanes import Writing
from prl.weights.plan import TensorSpec, from_json
from prl.weights.shipments import Route
from prl.weights.transport import SamplerEnd, Whole, libraries

SHUTDOWN_S = 2.0  # that the transfer group has to end before the process does


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
        self._area = StagingArea()
        self._live = LiveWeights("nothing was stored yet")
        self._unusable = ""  # why the model cannot be used any more
        self._told: frozenset[str] | None = None  # the modules that were last told to be loaded

    # What vLLM's worker calls.

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        lanes = None if init_info.lanes is None else LanesInfo.from_json(init_info.lanes)
        route = None if lanes is None else self._route(lanes)
        ours = self._facts(route)
        if self._link is None:
            say(f"prl: {ours.in_words()}")
        try:
            harmless = check_agreement(Facts.from_json(init_info.facts), ours)
        except ValueError as error:
            raise ValueError(f"no weights can be taken from the trainer: {error}") from error
        if harmless:
            say(f"prl: differences from the trainer that do no harm: {harmless}")
        if init_info.tensors is not None:
            self._place(from_json(init_info.tensors))
        if route is not None:
            parts = self._place(list(route.plan.tensors))
            check_parts(route, self.parallel_config.rank, parts)
            if self._chunked or route.deltas:
                live_staging(route, self.parallel_config.rank, parts)  # refused now, if at all
        self._begin_order()
        self._area.held = None
        if self._link is not None:
            self._link.leave()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank

        def connect(left: threading.Event) -> End:
            yield_to_sampling(self.device)
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
        held, legs = self._area.held, self._area.live_legs
        order = self._begin_order()
        self._area.held = None  # used up by this version
        link.do(lambda: self._receive(link, order, update_info, specs, parts, held, legs))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Copy what was staged into the live parameters, and have vLLM load what goes to its loader."""
        staged = self._area.staged
        assert staged is not None, "commit without a staged version"
        self._live.end(f"version {staged.version} took its place")
        wholes: dict[str, torch.Tensor] = {}
        modules: dict[str, None] = {}
        for part, shard in zip(staged.parts, staged.shards, strict=True):
            match part:
                case Placement():
                    if shard.data_ptr() != part.live.data_ptr():
                        part.live.copy_(shard, non_blocking=True)
                case Loaded():
                    wholes[part.spec.name] = shard
                    modules[part.module] = None
        if wholes:
            self._unusable = f"vLLM could not load version {staged.version}, and has lost the one before"
            reload_modules(self.model, self.model_config, modules, wholes)
            self._unusable = ""

    def shutdown(self) -> None:
        self._begin_order()
        if self._link is not None:
            self._link.leave(SHUTDOWN_S)

    # What our worker extension calls.

    def load(self, info: LoadInfo) -> None:
        """Read this worker's part of a version from files, in a thread."""
        specs = from_json(info.tensors)
        parts = self._place(specs)
        order = self._begin_order()
        if not info.seed and self._link is not None:  # the whole group does without a transfer group now
            self._link.leave()
            self._link = self._area.held = None
        self._in_thread(lambda: self._load(order, info, specs, parts), f"load version {info.lineage}:{info.step}")

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
        self._in_thread(lambda: self._store(live, info, placements), "store the live version")

    def staged(self) -> Staged | None:
        """What was staged last; None while nothing is complete."""
        return self._area.staged

    def verify_live(self) -> tuple[int, bool]:
        """The digest of the live parameters, and whether it is this worker's share of the version's. They are compared with
        what was staged and digested, which takes a third of a digest's time; those that were written as they came are
        digested. Of whole tensors, what vLLM's loader was given counts. Raises ValueError where they differ. Frees what was
        staged, unless deltas need it."""
        staged, self._area.staged = self._area.staged, None
        assert staged is not None, "verification before a version was staged"
        placed = [(part, shard) for part, shard in zip(staged.parts, staged.shards, strict=True) if isinstance(part, Placement)]
        if self._chunked:
            self._area.live_legs = staged.legs
            return digest.total(part.digest_of(part.live) for part, _ in placed if part.counted), True
        for part, shard in placed:
            check_live(part, shard)
        self._area.live_legs = staged.legs
        return staged.digest, staged.share

    # What threads do.

    def _in_thread(self, work: Callable[[], None], name: str) -> None:
        def behind_sampling() -> None:
            yield_to_sampling(self.device)
            work()

        threading.Thread(target=behind_sampling, name=name, daemon=True).start()

    def _begin_order(self) -> int:
        order = self._area.begin()
        self._live.end("another version arrives")
        return order

    def _writing(self, order: int) -> Writing | None:
        """Over the live version, where that is to be done."""
        return partial(self._area.writing, order) if self._chunked else None

    def _receive(
        self,
        link: Link,
        order: int,
        info: ReceiveInfo,
        specs: list[TensorSpec],
        parts: list[Part],
        held: Whole | None,
        legs: LegDigests,
    ) -> None:
        """In the link's thread."""

        def take() -> Staged:
            version, options = Version(info.lineage, info.step), self._child.config.weights
            if link.end is None:
                raise TransportError(f"no group for version {version}: {link.no_group}", link.no_group.missing)
            sent = version, specs, parts, info.bucket_bytes
            return receive_version(link.end, *sent, options, self._writing(order), held, legs)

        failed = self._stage(order, take, {"lineage": info.lineage, "step": info.step, "epoch": info.epoch, "seed": 0})
        if failed and link.end is not None:
            link.close(f"the last transfer failed: {failed}")

    def _load(self, order: int, info: LoadInfo, specs: list[TensorSpec], parts: list[Part]) -> None:
        def take() -> Staged:
            version, wait_s = Version(info.lineage, info.step), self._child.config.weights.update_s
            reader = VersionReader(self._child.run.weights, version, specs, wait_s)
            wanted = partial(self._area.is_newest, order)
            return read_version(reader, version, parts, self.device, self._writing(order), wanted)

        report = {"lineage": info.lineage, "step": info.step, "epoch": info.epoch, "seed": info.seed, "share": True}
        self._stage(order, take, report)

    def _stage(self, order: int, take: Callable[[], Staged], report: dict[str, Any]) -> str:
        """Take a version and tell the orchestrator; why that failed, where it did and somebody still wants to know."""
        began = time.monotonic()
        failed = ""
        try:
            staged = take()
            report |= {"digest": str(staged.told), "receive_s": time.monotonic() - began}
            report["direct_share"] = direct_share(staged.parts)
            wanted = self._area.put(order, staged)
        except Exception as error:  # whatever it was, the orchestrator must hear of it: it waits for this report
            failed = report["error"] = f"{type(error).__name__}: {error}"
            halt = error.halt if isinstance(error, TransportError) else None
            report["missing"] = error.missing if isinstance(error, TransportError) else ()
            report["halt"] = None if halt is None else asdict(halt)
            wanted = self._area.is_newest(order)
            if wanted:
                traceback.print_exc()
        if not wanted:
            return ""
        report_version(self._child, self.parallel_config.rank, "staged", report)
        return failed

    def _store(self, live: LiveWeights, info: StoreInfo, placements: list[Placement]) -> None:
        report: dict[str, Any] = {"seed": info.seed}
        try:
            pieces = ((slab(placement), live.copy(placement)) for placement in placements)
            files = write_pieces(Path(info.folder), f"rank_{self.parallel_config.rank}", pieces)
            report["files"] = [file.to_json() for file in files]
        except Exception as error:  # the same
            report["error"] = f"{type(error).__name__}: {error}"
            if not live.ended:
                traceback.print_exc()
        report_version(self._child, self.parallel_config.rank, "stored", report)

    # What this worker is.

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
