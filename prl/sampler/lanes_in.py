"""A worker's end of the lanes: it is sent what it holds, and nothing else."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prl.config.hf_config import read_model_config
from prl.config.layout import layout_of
from prl.control.child import Child
from prl.sampler.placement import Part, Placement
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.digest import MODULUS
from prl.weights.lane_deltas import Base, LegDigests, leg_digests
from prl.weights.lanes import LaneReceiver, Writing
from prl.weights.legs import version_digest
from prl.weights.plan import Tile
from prl.weights.shards import Shard, sampler_shards
from prl.weights.shipments import Route, Staging


@dataclass(frozen=True)
class LanesInfo:
    """Who takes part in an epoch of the lanes."""

    trainer_ranks: int
    samplers: tuple[int, ...]  # the numbers of the replicas

    @classmethod
    def from_json(cls, value: Any) -> "LanesInfo":
        """Raises ValueError."""
        match value:
            case {"trainer_ranks": int(ranks), "samplers": [*samplers]} if all(type(index) is int for index in samplers):
                return cls(ranks, tuple(samplers))
        raise ValueError(f"lanes: expected {{trainer_ranks, samplers: [number of a replica...]}}, not {value!r}")


def route_of(child: Child, trainer_ranks: int, dtype: str) -> Route:
    """From what this worker's own files say of the model and of both layouts. Raises ValueError where that cannot be."""
    config, model = child.config, read_model_config(child.model)
    workers = config.sample.tensor_parallel
    plan = compile_plan(model, layout_of(config.train), trainer_ranks, workers, dtype)
    return Route(plan, sampler_shards(model, workers), config.weights.bucket_mib * 2**20, config.weights.delta)


@dataclass(frozen=True)
class Received:
    shards: list[torch.Tensor]  # one for each part
    digest: int  # of all that this worker was sent
    counted: int  # of what it adds to the version's digest
    legs: LegDigests


class LaneEnd:
    """Of one worker in one epoch. The memory in which a version is staged stays for the next one: to have it anew takes a
    tenth of a transfer."""

    def __init__(
        self,
        route: Route,
        info: LanesInfo,
        epoch: int,
        replica: int,
        worker: int,
        address: str,
        port: int,
        *,
        group_s: float,
        device: torch.device | str,
        left: threading.Event,
    ) -> None:
        """Blocks until all are there or `group_s` is over; see `LaneReceiver`."""
        self.route, self._worker, self._device = route, worker, device
        crew = Crew(epoch, info.trainer_ranks, info.samplers, route.plan.lanes)
        place = replica, worker, address, port
        self._receiver = LaneReceiver(route, crew, *place, group_s=group_s, device=device, left=left)
        self._staging: Staging | None = None

    def receive(self, parts: Sequence[Part], update_s: float, writing: Writing | None, held: LegDigests) -> Received:
        """The next version, in the place of the last one received; with `writing` over the live one, within its context.
        `held`: the digests of the live one's legs, where it came over these lanes. Raises TransportError, DeltaError."""
        plan = self.route.plan
        live = live_staging(self.route, self._worker, parts) if writing or self.route.deltas else None
        staging = live if writing else self._staging
        if staging is None:
            staging = self._staging = Staging(plan, self.route.shards[self._worker], self._device)
        base = Base(held, live) if live and held else None
        report = self._receiver.receive(staging, update_s, writing, base)
        staged = {plan.tensors[tensor].name: shard for tensor, shard in staging.tensors.items()}
        shards = [_shard(staged, part, self._device) for part in parts]
        whole = sum(leg.digest for leg in report.legs) % MODULUS
        return Received(shards, whole, version_digest(report.legs), leg_digests(report.legs))

    def close(self) -> None:
        self._receiver.close()


def check_parts(route: Route, worker: int, parts: Sequence[Part]) -> None:
    """Whether the plan has this worker be sent what it takes. Raises ValueError with the first tensors that differ."""
    numbers = {spec.name: number for number, spec in enumerate(route.plan.tensors)}
    planned = {shard.tile.tensor: shard for shard in route.shards[worker]}
    found: dict[int, Shard] = {}
    wrong = []
    for part in parts:
        if not part.size:
            continue
        shard = _planned_as(part, numbers[part.spec.name])
        first = found.setdefault(shard.tile.tensor, shard)  # of an embedding's copy as the head the embedding counts
        if first.tile != shard.tile or (first is shard and planned.get(shard.tile.tensor) != shard):
            wrong.append(f"{part.spec.name} (here {shard}, planned {planned.get(shard.tile.tensor)})")
    wrong += [f"{route.plan.tensors[tensor].name} (not here)" for tensor in planned if tensor not in found]
    if wrong:
        raise ValueError(
            f"the plan of lanes does not fit what vLLM holds in worker {worker}: {'; '.join(wrong[:3])} ({len(wrong)} in all); "
            f"set weights.transport: gather"
        )


def live_staging(route: Route, worker: int, parts: Sequence[Part]) -> Staging:
    """Where what this worker is sent lies in its live parameters. Raises ValueError where that is not row by row."""
    numbers = {spec.name: number for number, spec in enumerate(route.plan.tensors)}
    shards = {shard.tile.tensor: shard for shard in route.shards[worker]}
    tensors: dict[int, torch.Tensor] = {}
    for part in parts:
        number = numbers[part.spec.name]
        if part.size and number not in tensors:
            if not isinstance(part, Placement):
                raise ValueError(f"{part.spec.name} cannot be read back, for a delta to it: set weights.delta: false")
            tile = shards[number].tile
            try:
                tensors[number] = part.live.view(tile.rows, tile.columns)
            except RuntimeError:
                words = (
                    f"{part.spec.name} lies in tiles, which no bucket can be written over nor a delta be applied to: set "
                    f"weights.staging: full and weights.delta: false"
                )
                raise ValueError(words) from None
    return Staging(route.plan, route.shards[worker], tensors=tensors)


def _planned_as(part: Part, tensor: int) -> Shard:
    rows = part.spec.shape[0]
    columns = part.spec.elements // rows
    tile = Tile(tensor, 0, rows, part.start, part.size) if part.dim else Tile(tensor, part.start, part.size, 0, columns)
    return Shard(tile, part.counted)


def _shard(staged: Mapping[str, torch.Tensor], part: Part, device: torch.device | str) -> torch.Tensor:
    """In the shape in which it is held; a worker may hold nothing of a vocabulary."""
    if not part.size:
        return torch.empty(part.held_shape, dtype=getattr(torch, part.spec.dtype), device=device)
    return staged[part.spec.name].reshape(part.held_shape)
