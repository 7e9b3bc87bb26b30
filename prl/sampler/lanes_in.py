"""A worker's end of the lanes: it is sent what it holds, and nothing else."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prl.config.hf_config import read_model_config
from prl.config.layout import layout_of
from prl.control.child import Child
from prl.sampler.placement import Placement
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.digest import MODULUS
from prl.weights.lanes import LaneReceiver, Route, Staging
from prl.weights.plan import Tile
from prl.weights.shards import Shard, sampler_shards


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
    config, model = child.config, read_model_config(child.run.model)
    workers = config.sample.tensor_parallel
    plan = compile_plan(model, layout_of(config.train), trainer_ranks, workers, dtype)
    return Route(plan, sampler_shards(model, workers), config.weights.bucket_mib * 2**20)


@dataclass(frozen=True)
class Received:
    shards: list[torch.Tensor]  # one for each placement
    digest: int  # of all that this worker was sent
    counted: int  # of what it adds to the version's digest


class LaneEnd:
    """Of one worker in one epoch."""

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
        self._route, self._worker, self._device = route, worker, device
        crew = Crew(epoch, info.trainer_ranks, info.samplers, route.plan.lanes)
        place = replica, worker, address, port
        self._receiver = LaneReceiver(route, crew, *place, group_s=group_s, device=device, left=left)

    def receive(self, placements: Sequence[Placement], update_s: float) -> Received:
        """The next version. Raises TransportError."""
        plan = self._route.plan
        staging = Staging(plan, self._route.shards[self._worker], self._device)
        report = self._receiver.receive(staging, update_s)
        staged = {plan.tensors[tensor].name: shard for tensor, shard in staging.tensors.items()}
        shards = [_shard(staged, placement) for placement in placements]
        digests = sum(leg.digest for leg in report.legs), sum(leg.counted for leg in report.legs)
        return Received(shards, *(value % MODULUS for value in digests))

    def close(self) -> None:
        self._receiver.close()


def check_placements(route: Route, worker: int, placements: Sequence[Placement]) -> None:
    """Whether the plan has this worker hold what it holds. Raises ValueError with the first tensors that differ."""
    numbers = {spec.name: number for number, spec in enumerate(route.plan.tensors)}
    planned = {shard.tile.tensor: shard for shard in route.shards[worker]}
    found: dict[int, Shard] = {}
    wrong = []
    for placement in placements:
        if not placement.live.numel():
            continue
        shard = _planned_as(placement, numbers[placement.spec.name])
        first = found.setdefault(shard.tile.tensor, shard)  # of an embedding's copy as the head the embedding counts
        if first.tile != shard.tile or (first is shard and planned.get(shard.tile.tensor) != shard):
            wrong.append(f"{placement.spec.name} (here {shard}, planned {planned.get(shard.tile.tensor)})")
    wrong += [f"{route.plan.tensors[tensor].name} (not here)" for tensor in planned if tensor not in found]
    if wrong:
        raise ValueError(
            f"the plan of lanes does not fit what vLLM holds in worker {worker}: {'; '.join(wrong[:3])} ({len(wrong)} in all); "
            f"set weights.transport: gather"
        )


def _planned_as(placement: Placement, tensor: int) -> Shard:
    rows = placement.spec.shape[0]
    columns = placement.spec.elements // rows
    start, size = placement.start, placement.size
    tile = Tile(tensor, 0, rows, start, size) if placement.dim else Tile(tensor, start, size, 0, columns)
    return Shard(tile, placement.counted)


def _shard(staged: Mapping[str, torch.Tensor], placement: Placement) -> torch.Tensor:
    """In the shape of the live one; a worker may hold nothing of a vocabulary."""
    if not placement.live.numel():
        return torch.empty_like(placement.live)
    return staged[placement.spec.name].reshape(placement.live.shape)
