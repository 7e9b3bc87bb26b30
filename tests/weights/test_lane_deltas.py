"""Versions that come by lanes as differences to the one before: two roots and the workers of two samplers, each in a thread."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from lane_cases import MODELS

from prl.config.layout import Layout
from prl.config.tensors import tensor_shapes
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.delta import HEADER_BYTES, DeltaError
from prl.weights.digest import digest
from prl.weights.group import StoreHost, TransportError
from prl.weights.lane_deltas import Base, leg_digests
from prl.weights.lanes import LaneReceiver, LaneSender
from prl.weights.legs import LaneReport, changed_share, lane_digests, version_digest
from prl.weights.plan import Tile, schedule
from prl.weights.shards import sampler_shards
from prl.weights.shipments import Route, Staging

HOST, LONG_S = "127.0.0.1", 60.0
MODEL = MODELS["biases_tied"]
ROOTS, WORKERS, SAMPLERS = 2, 2, (0, 1)
Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in tensor_shapes(MODEL).items()}


def changed(before: Weights, share: float) -> tuple[Weights, float]:
    """With another value at each place with this probability; and the share of values that are others."""
    found, count = {}, 0
    for seed, (name, tensor) in enumerate(before.items()):
        where = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < share
        found[name] = torch.where(where, -tensor, tensor)
        count += int((found[name] != tensor).sum())
    return found, count / sum(tensor.numel() for tensor in before.values())


class Worker:
    """What it holds, and where the next version goes."""

    def __init__(self, route: Route, lane: int) -> None:
        self.shards = route.shards[lane]
        self.spare, self.live = Staging(route.plan, self.shards), Staging(route.plan, self.shards)
        self.base: Base | None = None

    def take(self, end: LaneReceiver, in_place: bool) -> LaneReport:
        """The next version, into other memory than that of the one before, or over it."""
        base, self.base = self.base, None
        target = self.live if in_place else self.spare
        report = end.receive(target, LONG_S, nullcontext if in_place else None, base)
        if not in_place:
            self.live, self.spare = self.spare, self.live
        self.base = Base(leg_digests(report.legs), self.live)
        return report

    def unlike(self, route: Route, version: Weights) -> list[Tile]:
        wholes = [version[spec.name].reshape(spec.shape[0], -1) for spec in route.plan.tensors]
        return [
            shard.tile
            for shard in self.shards
            if not torch.equal(
                self.live.tensors[shard.tile.tensor].view(torch.int16), part(wholes, shard.tile).view(torch.int16)
            )
        ]


def part(wholes: Sequence[torch.Tensor], tile: Tile) -> torch.Tensor:
    return wholes[tile.tensor][tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns].contiguous()


class Stage:
    """All ends of an epoch."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        plan = compile_plan(MODEL, Layout(2, 1, 1, 1, 1), ROOTS, WORKERS, "bfloat16")
        self.route = Route(plan, sampler_shards(MODEL, WORKERS), 4096, deltas=True)
        self.headers = HEADER_BYTES * len(schedule(plan, 4096))
        self._host, self._pool = StoreHost(HOST, LONG_S), pool
        self.workers = [Worker(self.route, lane) for _ in SAMPLERS for lane in range(WORKERS)]
        crew, place = Crew(1, ROOTS, SAMPLERS, WORKERS), (HOST, self._host.port)
        senders = [pool.submit(LaneSender, self.route, crew, root, *place, group_s=LONG_S) for root in range(ROOTS)]
        receivers = [
            pool.submit(LaneReceiver, self.route, crew, *which, *place, group_s=LONG_S)
            for which in itertools.product(SAMPLERS, range(WORKERS))
        ]
        self.senders = [sender.result(LONG_S) for sender in senders]
        self.receivers = [receiver.result(LONG_S) for receiver in receivers]

    def begin(self, version: Weights, held: bool, in_place: bool) -> tuple[list[Future[LaneReport]], list[Future[LaneReport]]]:
        wholes = [version[spec.name].reshape(spec.shape[0], -1) for spec in self.route.plan.tensors]
        taking = [
            self._pool.submit(worker.take, end, in_place) for worker, end in zip(self.workers, self.receivers, strict=True)
        ]
        sending = [
            self._pool.submit(sender.send, lambda tile: part(wholes, tile), LONG_S, held=held) for sender in self.senders
        ]
        return sending, taking

    def update(self, version: Weights, *, held: bool, in_place: bool = False) -> tuple[int, float | None]:
        """Bytes on the wire to one sampler, and the share of values that had changed, as the roots know it."""
        sending, taking = self.begin(version, held, in_place)
        reports, got = ([one.result(LONG_S) for one in some] for some in (sending, taking))
        legs = [leg for report in reports for leg in report.legs]
        assert version_digest(legs) == digest(version)
        assert [worker.unlike(self.route, version) for worker in self.workers] == [[]] * len(self.workers)
        for report, lane in zip(got, itertools.cycle(range(WORKERS)), strict=False):
            assert lane_digests(report.legs) == {lane: lane_digests(legs)[lane]}
            assert {leg.bytes for leg in legs if leg.lane == lane} >= {leg.bytes for leg in report.legs}
        return sum(leg.bytes for leg in legs), changed_share(legs)

    def close(self) -> None:
        for end in (*self.receivers, *self.senders):
            end.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with ThreadPoolExecutor(ROOTS + len(SAMPLERS) * WORKERS) as pool:
        stage = Stage(pool)
        yield stage
        stage.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_each_version_is_whole_however_much_of_it_has_changed(stage, in_place):
    version = weights(0)
    whole, share = stage.update(version, held=False)
    dense = sum(map(stage.route.plan.leg_bytes, stage.route.plan.legs))
    assert (whole, share) == (dense + stage.headers, None)
    for probability, most in ((0.02, 0.06), (0.0, 0.0), (0.4, 0.5), (1.0, 1.0), (0.001, 0.02), (0.02, 0.06)):
        version, expected = changed(version, probability)
        sent, share = stage.update(version, held=True, in_place=in_place)
        assert sent <= most * dense + stage.headers
        assert share == pytest.approx(expected, abs=0.005)  # the samplers hold some values twice
        assert (share > 0) == (probability > 0)


def test_all_is_sent_where_the_workers_may_not_hold_the_version_before(stage):
    whole, _ = stage.update(weights(0), held=True)  # nothing was sent yet
    nearly, _ = changed(weights(0), 0.02)
    assert stage.update(nearly, held=False) == (whole, None)
    again, _ = changed(nearly, 0.02)
    assert stage.update(again, held=True)[0] < 0.2 * whole


@pytest.mark.parametrize("other", [False, True])
def test_a_difference_to_what_a_worker_does_not_hold_is_refused_and_all_others_leave(stage, other):
    version = weights(0)
    stage.update(version, held=False)
    worker = stage.workers[0]
    if other:
        worker.base = Base({leg: value ^ 1 for leg, value in worker.base.digests.items()}, worker.live)
    else:
        worker.base = None
    before = {tensor: content.clone() for tensor, content in worker.live.tensors.items()}
    sending, taking = stage.begin(changed(version, 0.02)[0], held=True, in_place=True)
    words = "those with digest" if other else "nothing to apply it to is held"
    with pytest.raises(DeltaError, match=words):
        taking[0].result(LONG_S)
    for end in (*sending, *taking[1:]):
        if (error := end.exception(LONG_S)) is not None:  # what was through before has not heard of it
            assert isinstance(error, TransportError)
    assert all(torch.equal(content, worker.live.tensors[tensor]) for tensor, content in before.items())


def test_a_bit_of_the_version_before_that_has_changed_shows_in_the_digest(stage):
    version = weights(0)
    stage.update(version, held=False)
    held = stage.workers[0].live.tensors
    held[max(held)].view(torch.int16)[0, 0] ^= 1
    version, _ = changed(version, 0.02)
    sending, taking = stage.begin(version, held=True, in_place=False)
    legs = [leg for one in sending for leg in one.result(LONG_S).legs]
    digests = [lane_digests(one.result(LONG_S).legs)[lane] for one, lane in zip(taking, (0, 1, 0, 1), strict=True)]
    assert [digests[k] == lane_digests(legs)[lane] for k, lane in enumerate((0, 1, 0, 1))] == [False, True, True, True]
