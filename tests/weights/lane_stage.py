"""All ranks of lanes over gloo on this machine's loop-back interface, each a process, and what an update must have brought."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from lane_ranks import Fault, Rank, Result, full

from prl.weights.crew import Crew
from prl.weights.digest import digest
from prl.weights.legs import LegReport, lane_digests, version_digest
from prl.weights.plan import LanePlan, Leg, TensorSpec, Tile
from prl.weights.shards import Shard
from prl.weights.shipments import Route

LONG_S = 60.0  # a deadline that nothing may wait for


class Stage:
    """All ranks there are, and the epochs that they go through."""

    def __init__(self, ranks: int = 8) -> None:
        self._epochs = itertools.count(1)
        self.ranks: list[Rank] = []
        self.port = 0
        self.cast(ranks)

    def cast(self, count: int) -> None:
        """Have so many ranks, of which the first hosts a store."""
        self.ranks += [Rank(f"rank {number}") for number in range(len(self.ranks), count)]
        if not self.port:
            self.ranks[0].tell("host")
            self.port = self.ranks[0].answer()

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()

    def replace(self, number: int) -> None:
        self.ranks[number].end()
        self.ranks[number] = Rank(f"rank {number}")
        if number == 0:
            self.port = 0
            self.cast(8)

    def crew(self, trainer_ranks: int, samplers: Sequence[int], lanes: int) -> Crew:
        return Crew(next(self._epochs), trainer_ranks, tuple(samplers), lanes)

    def join(self, route: Route, crew: Crew, group_s: float = LONG_S, absent: Sequence[int] = ()) -> dict[int, Result]:
        coming = [number for number in range(len(crew.names)) if number not in absent]
        for number in coming:
            self.ranks[number].tell("join", route, crew, number, self.port, group_s)
        return {number: self.ranks[number].answer() for number in coming}

    def open(self, route: Route, crew: Crew) -> None:
        assert all(not result.error for result in self.join(route, crew).values())

    def begin(self, crew: Crew, seed: int, update_s: float = LONG_S, faults: Mapping[int, Fault] | None = None) -> None:
        for number in range(len(crew.names)):
            self.ranks[number].tell("update", seed, update_s, (faults or {}).get(number))

    def results(self, crew: Crew, without: Sequence[int] = ()) -> dict[int, Result]:
        return {number: self.ranks[number].answer() for number in range(len(crew.names)) if number not in without}

    def update(self, crew: Crew, seed: int) -> dict[int, Result]:
        self.begin(crew, seed)
        return self.results(crew)


def legs_of(crew: Crew, results: Mapping[int, Result], numbers: Sequence[int]) -> list[LegReport]:
    return [leg for number in numbers for leg in results[number].report.legs]


def check(route: Route, crew: Crew, results: Mapping[int, Result], seed: int) -> None:
    """Everything arrived, and all digests say so."""
    assert not [result.error for result in results.values() if result.error]
    sent = legs_of(crew, results, range(crew.trainer_ranks))
    specs = route.plan.tensors
    whole = digest({spec.name: full(spec, seed).to(getattr(torch, spec.dtype)) for spec in specs})
    assert version_digest(sent) == whole
    for sampler in crew.samplers:
        workers = [crew.worker(sampler, lane) for lane in range(crew.lanes)]
        assert all(results[number].exact for number in workers)
        got = legs_of(crew, results, workers)
        assert lane_digests(got) == lane_digests(sent)
        assert version_digest(got) == whole
        assert {(leg.root, leg.lane): (leg.bytes, leg.digest) for leg in got} == {
            (leg.root, leg.lane): (leg.bytes, leg.digest) for leg in sent
        }
    for result in results.values():
        assert result.report.buffer_bytes <= 2 * route.bucket_bytes
        assert all(leg.leg_s <= result.report.transfer_s for leg in result.report.legs)


# 16 MiB a bucket, more than the sockets between two processes hold: who sends cannot have ended before it is taken.
ROW = 2**17


def large(roots: int = 2) -> Route:
    """From each root two buckets to one lane; a worker unpacks a tile a bucket, the roots taking turns."""
    tiles = [Tile(0, 64 * root, 64, 0, ROW) for root in range(roots)]
    plan = LanePlan(
        (TensorSpec("w", "float32", (64 * roots, ROW)),), roots, 1, tuple(Leg(r, 0, (t,)) for r, t in enumerate(tiles))
    )
    return Route(plan, [[Shard(Tile(0, 0, 64 * roots, 0, ROW), True)]], 32 * ROW * 4)
