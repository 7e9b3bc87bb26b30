"""A trainer rank's part of each version, sent from its own parameters to the workers that hold it: no tensor is gathered."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prl.config.layout import layout_of
from prl.config.tensors import EMBEDDING, OUTPUT
from prl.control.child import say
from prl.trainer import device
from prl.trainer.engine import Engine
from prl.trainer.lora import merged
from prl.trainer.mapping import named_parameters
from prl.trainer.parallel import Channel
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.group import TransportError
from prl.weights.lanes import LaneSender
from prl.weights.legs import LegReport, version_digest
from prl.weights.options import WeightsOptions
from prl.weights.plan import LanePlan, Tile
from prl.weights.shards import Held, sampler_shards, trainer_shards
from prl.weights.shipments import Route, View


@dataclass(frozen=True)
class Part:
    """What a rank says of its part of a version: what it sent, or why it did not. `missing`: ranks of the groups that did not
    come to their building; `overdue`: the deadline of the transfer had passed."""

    legs: tuple[LegReport, ...] = ()
    transfer_s: float = 0.0
    error: str = ""
    missing: tuple[int, ...] = ()
    overdue: bool = False

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Part":
        legs = tuple(LegReport(**leg) for leg in row["legs"])
        return cls(legs, row["transfer_s"], row["error"], tuple(row["missing"]), row["overdue"])


def failures(parts: Sequence[Part]) -> list[tuple[str, tuple[int, ...]]]:
    """Why parts were not sent, and who was missing; first what names somebody."""
    failed = [(part.error, part.missing) for part in parts if part.error]
    return sorted(failed, key=lambda one: not one[1])


class LanesOut:
    """One on every trainer rank, also on one that the plan has nothing sent by: an epoch's ranks meet as a whole."""

    def __init__(self, engine: Engine, options: WeightsOptions, workers: int, dtype: str) -> None:
        """To samplers of `workers` tensor-parallel workers that hold the model in `dtype`. Raises ValueError where they cannot
        share it so, or where this rank's parameters are not those of the plan."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        layout = layout_of(engine.options)
        plan = compile_plan(engine.config, layout, ranks, workers, dtype)
        self.plan = plan
        self._route = Route(plan, sampler_shards(engine.config, workers), options.bucket_mib * 2**20, options.delta)
        self._parameters: Mapping[str, Tensor] = named_parameters(engine.chunks)
        self._held = _by_tensor(trainer_shards(engine.config, layout, ranks)[rank], self._parameters, rank)
        self._rank = rank
        self._options = options
        self._sender: LaneSender | None = None
        self._sent_digest: int | None = None  # of the version that all have sent last, in these groups
        self._epoch = -1
        self._left = threading.Event()
        if rank == 0:
            say(f"prl: {_in_words(plan)}")

    def send(
        self, channel: Channel, epoch: int, samplers: Sequence[int], address: str, port: int, held: int | None = None
    ) -> list[Part]:
        """All trainer ranks at once, to these replicas, in the groups of this epoch, which are built where they are new, by the
        store at `address` and `port`. Blocks until all have sent their part or have failed to, each within its deadlines; gives
        what each says of it, to each. Where one has failed all leave the groups. With weights.delta only what differs from the
        version before goes, where `held` is the digest of that one: what all workers hold."""
        crew = Crew(epoch, self.plan.trainer_ranks, tuple(samplers), self.plan.lanes)
        try:
            self._join(crew, address, port)
            assert self._sender is not None
            last, self._sent_digest = self._sent_digest, None
            with torch.no_grad():
                report = self._sender.send(self._source(), self._options.update_s, held=held is not None and held == last)
            part = Part(report.legs, report.transfer_s)
        except TransportError as error:
            part = Part(error=str(error), missing=error.missing, overdue=error.overdue)
        parts = [Part.from_json(row) for row in channel.gather(asdict(part))]
        if failures(parts):
            self.close()
        else:
            self._sent_digest = version_digest(leg for one in parts for leg in one.legs)
        return parts

    def leave(self, epoch: int | None = None) -> None:
        """From any thread: have all ranks leave the groups, if they are of this epoch (None: of any)."""
        if epoch in (None, self._epoch):
            self._left.set()
            sender = self._sender
            if sender is not None:  # this rank may be done, and wait for others
                sender.call_off("this update was given up")

    def _join(self, crew: Crew, address: str, port: int) -> None:
        if crew.epoch == self._epoch and self._sender is not None:
            return
        self.close()
        self._epoch, self._left = crew.epoch, threading.Event()
        place = self._rank, address, port
        self._sender = LaneSender(
            self._route, crew, *place, group_s=self._options.group_s, device=device.device(), left=self._left
        )

    def close(self) -> None:
        """Leave the groups, if there are any."""
        sender, self._sender, self._sent_digest = self._sender, None, None
        if sender is not None:
            sender.close()

    def _source(self) -> View:
        """Where tiles of the present weights are. Merging an adapter makes a copy of its weight, so one is kept at a time:
        tiles of a parameter come one after another."""
        matrix = lru_cache(maxsize=1)(self._matrix)

        def view(tile: Tile) -> Tensor:
            name, held = next(one for one in self._held[tile.tensor] if tile.within(one[1].tile) == tile)
            return matrix(name)[held.index(tile)]

        return view

    def _matrix(self, name: str) -> Tensor:
        return _as_matrix(merged(self._parameters[name]).detach())


def _in_words(plan: LanePlan) -> str:
    """How a version goes."""
    sent = sum(map(plan.leg_bytes, plan.legs))
    roots = {leg.root for leg in plan.legs}
    return (
        f"lanes: all {sent} bytes of a version go straight from {len(roots)} of {plan.trainer_ranks} trainer ranks to "
        f"{plan.lanes} workers of each sampler, over {len(plan.legs)} groups (plan {plan.digest()})"
    )


def _by_tensor(held: tuple[Held, ...], parameters: Mapping[str, Tensor], rank: int) -> dict[int, list[tuple[str, Held]]]:
    """What the rank holds of each tensor, with the names of its parameters. Raises ValueError where the plan's are others."""
    found: dict[int, list[tuple[str, Held]]] = {}
    rows = dict.fromkeys(parameters, 0)
    for one in held:
        names = [name for name in one.parameters if name in parameters]
        if len(names) != 1:
            raise ValueError(f"the plan of lanes has trainer rank {rank} hold {' or '.join(one.parameters)}, which it does not")
        (name,), tile = names, one.tile
        have, width = _as_matrix(parameters[name]).shape
        if width != tile.columns or one.at_row != rows[name] or one.at_row + tile.rows > have:
            raise ValueError(
                f"the plan of lanes has rows {one.at_row} to {one.at_row + tile.rows} of {tile.columns} elements in {name} of "
                f"trainer rank {rank}, which is {tuple(parameters[name].shape)}"
            )
        rows[name] = one.at_row + tile.rows
        found.setdefault(tile.tensor, []).append((name, one))
    padded = (EMBEDDING, OUTPUT)
    more = [name for name, count in rows.items() if count < len(parameters[name]) and name not in padded]
    if more:
        raise ValueError(f"the plan of lanes lacks rows of these parameters of trainer rank {rank}: {', '.join(more)}")
    return found


def _as_matrix(parameter: Tensor) -> Tensor:
    return parameter.reshape(len(parameter), -1)
