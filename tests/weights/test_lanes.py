"""The lanes over gloo on this machine's loop-back interface, each rank a process, all of them started once."""

import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from lane_ranks import Fault, Rank, Result, full

from prl.config.hf_config import model_config
from prl.config.layout import Layout
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.digest import digest
from prl.weights.legs import LegReport, lane_digests, version_digest
from prl.weights.plan import LanePlan, Leg, TensorSpec, Tile
from prl.weights.shards import Shard, sampler_shards
from prl.weights.shipments import Route

TINY = model_config(
    {
        "model_type": "qwen2",
        "vocab_size": 99,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
)
MISSING = "sampler 1 worker 0"
LONG_S = 60.0  # a deadline that nothing may wait for
SOON_S = 30.0  # that is, well before it


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


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    for rank in stage.ranks:
        rank.end()


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


@pytest.mark.parametrize(
    ("tensor", "pipeline", "trainer_ranks", "lanes", "samplers"),
    [(1, 1, 1, 1, 1), (2, 1, 4, 2, 2), (1, 2, 4, 1, 3), (2, 2, 4, 4, 1), (4, 1, 4, 2, 1)],
)
def test_every_worker_gets_its_part_of_two_versions(stage, tensor, pipeline, trainer_ranks, lanes, samplers):
    plan = compile_plan(TINY, Layout(tensor, pipeline, 1, 1, 1), trainer_ranks, lanes, "bfloat16")
    route = Route(plan, sampler_shards(TINY, lanes), 4096)
    crew = stage.crew(trainer_ranks, range(samplers), lanes)
    stage.open(route, crew)
    for seed in (1, 2):
        results = stage.update(crew, seed)
        check(route, crew, results, seed)
    if trainer_ranks == 1:  # all of what a worker stages, one tile behind the other
        assert {results[number].report.buffer_bytes for number in range(trainer_ranks, len(crew.names))} == {0}


def test_tensors_of_several_dtypes_share_buckets(stage):
    tensors = (TensorSpec("a", "int8", (3, 5)), TensorSpec("b", "float32", (7,)), TensorSpec("c", "bfloat16", (2, 3, 2)))
    tiles = (Tile(0, 0, 3, 0, 5), Tile(1, 0, 7, 0, 1), Tile(2, 0, 2, 0, 6))
    plan = LanePlan(tensors, 1, 1, (Leg(0, 0, tiles),))
    route = Route(plan, [[Shard(tile, True) for tile in tiles]], 64)
    crew = stage.crew(1, [0], 1)
    stage.open(route, crew)
    results = stage.update(crew, 3)
    assert not [result.error for result in results.values() if result.error]
    assert results[1].exact
    assert results[0].report.legs[0].digest == results[1].report.legs[0].digest
    assert results[0].report.bytes == results[1].report.bytes >= 15 + 28 + 24


def pair() -> Route:
    """Two tensors of one shape from one root, in a bucket each."""
    tensors = (TensorSpec("one", "float32", (4, 6)), TensorSpec("other", "float32", (4, 6)))
    tiles = (Tile(0, 0, 4, 0, 6), Tile(1, 0, 4, 0, 6))
    return Route(LanePlan(tensors, 1, 1, (Leg(0, 0, tiles),)), [[Shard(tile, True) for tile in tiles]], 96)


@pytest.mark.parametrize("kind", ["flip", "swap"])
def test_what_changes_on_its_way_is_noticed(stage, kind):
    crew = stage.crew(1, [0, 1], 1)
    stage.open(pair(), crew)
    stage.begin(crew, 1, faults={2: Fault(kind, 1)})
    sent, right, wrong = (lane_digests(result.report.legs) for result in stage.results(crew).values())
    assert sent == right != wrong


# 16 MiB a bucket, more than the sockets between two processes hold: who sends cannot have ended before it is taken.
ROW = 2**17


def large(roots: int = 2) -> Route:
    """From each root two buckets to one lane; a worker unpacks a tile a bucket, the roots taking turns."""
    tiles = [Tile(0, 64 * root, 64, 0, ROW) for root in range(roots)]
    plan = LanePlan(
        (TensorSpec("w", "float32", (64 * roots, ROW)),), roots, 1, tuple(Leg(r, 0, (t,)) for r, t in enumerate(tiles))
    )
    return Route(plan, [[Shard(Tile(0, 0, 64 * roots, 0, ROW), True)]], 32 * ROW * 4)


SHORT_S = 6.0  # a deadline that is waited for; without faults an update takes a tenth
BUCKETS = [pytest.param(bucket, marks=[pytest.mark.slow] * (bucket > 0)) for bucket in range(4)]  # that a worker gets
VICTIM = 3  # the rank of sampler 1 worker 0 behind two trainer ranks and sampler 0


def check_ends(results: Mapping[int, Result], within_s: float, who: str = MISSING) -> list[str]:
    """Each has ended well or says who was waited for."""
    assert all(result.seconds < within_s for result in results.values())
    errors = [result.error for result in results.values() if result.error]
    assert all(who in error for error in errors), errors
    return errors


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_killed_worker_is_named_at_once_and_left_out(stage, bucket):
    crew = stage.crew(2, [0, 1], 1)
    stage.open(large(), crew)
    stage.begin(crew, 1, faults={VICTIM: Fault("kill", bucket)})
    results = stage.results(crew, [VICTIM])
    errors = check_ends(results, SOON_S)
    if bucket == 0:
        assert errors
    stage.begin(stage.crew(2, [], 1), 2)  # a broken end says so, instead of waiting
    again = {number: stage.ranks[number].answer() for number in (0, 1)}
    assert all("cannot be used again" in again[n].error for n in (0, 1) if results[n].error)
    stage.replace(VICTIM)
    left = stage.crew(2, [0], 1)
    stage.open(large(), left)
    check(large(), left, stage.update(left, 2), 2)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_worker_that_stands_still_is_named_at_the_deadline(stage, bucket):
    crew = stage.crew(2, [0, 1], 1)
    stage.open(large(), crew)
    stage.begin(crew, 1, SHORT_S, {VICTIM: Fault("stop", bucket)})
    try:
        assert check_ends(stage.results(crew, [VICTIM]), SHORT_S + SOON_S) or bucket > 0
    finally:
        stage.ranks[VICTIM].go_on()
    result = stage.ranks[VICTIM].answer()
    assert result.error or result.exact  # what was on its way to it may have been all


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_late_worker_is_named_at_the_deadline(stage, bucket):
    crew = stage.crew(2, [0, 1], 1)
    stage.open(large(), crew)
    stage.begin(crew, 1, SHORT_S, {VICTIM: Fault("late", bucket, SHORT_S + 1.0)})
    results = stage.results(crew)
    assert check_ends({n: r for n, r in results.items() if n != VICTIM}, SHORT_S + SOON_S) or bucket > 0
    assert results[VICTIM].error or results[VICTIM].exact


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_connection_that_is_cut_ends_the_update_for_all(stage, bucket):
    crew = stage.crew(2, [0, 1], 1)
    stage.open(large(), crew)
    stage.begin(crew, 1, faults={VICTIM: Fault("cut", bucket)})
    results = stage.results(crew)
    assert all(result.seconds < SOON_S for result in results.values())
    errors = [result.error for result in results.values() if result.error]
    assert all(any(name in error for name in crew.names) for error in errors)
    if bucket < 2:  # something is still to come
        assert len(errors) >= 3


def test_whoever_is_told_to_leave_leaves_at_once_and_takes_the_others_along(stage):
    crew = stage.crew(2, [0, 1], 1)
    stage.open(large(), crew)
    stage.begin(crew, 1, faults={VICTIM: Fault("stop", 0)})
    try:
        time.sleep(1.0)
        stage.ranks[0].tell("leave")
        results = stage.results(crew, [VICTIM])
        assert all(result.seconds < SOON_S for result in results.values())
        assert "left in bucket" in results[0].error
        assert "this rank was told to leave" in results[0].error
        assert "trainer rank 0 gave up: " in results[1].error
    finally:
        stage.replace(VICTIM)


@pytest.mark.parametrize("victim", [0, 1])
def test_trainer_ranks_die_and_stand_still_also_the_one_with_the_store(stage, victim):
    for kind, update_s in (("stop", SHORT_S), ("kill", LONG_S)):
        crew = stage.crew(2, [0, 1], 1)
        stage.open(large(), crew)
        stage.begin(crew, 1, update_s, {victim: Fault(kind, 1)})
        results = stage.results(crew, [victim])
        assert all(result.seconds < SOON_S for result in results.values())
        for worker in (2, 3):
            assert f"trainer rank {victim}" in results[worker].error
        stage.replace(victim)


def test_workers_notice_that_a_trainer_rank_dies_in_the_midst_of_a_bucket(stage):
    """It sends what the sockets hold of its first bucket to workers that take nothing, and is gone once they go on."""
    crew = stage.crew(2, [0, 1], 1)
    stage.open(large(), crew)
    stage.begin(crew, 1, faults={1: Fault("late", 0, 1.5)})
    workers = [stage.ranks[number].process.pid for number in (2, 3)]
    time.sleep(0.7)  # they have begun to wait for it
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    stage.ranks[1].end()
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    results = stage.results(crew, [1])
    assert all(result.seconds < SOON_S for result in results.values())
    assert all("trainer rank 1" in results[worker].error for worker in (2, 3))
    stage.replace(1)


def test_who_does_not_come_to_the_building_is_named(stage):
    crew = stage.crew(2, [0, 1], 1)
    for result in stage.join(large(), crew, 3.0, [1, VICTIM]).values():
        assert f"waited 3 s for trainer rank 1, {MISSING}" in result.error
        assert result.missing == (1, VICTIM)
        assert result.seconds < SOON_S


def test_who_waits_for_others_to_come_can_be_told_to_leave(stage):
    crew = stage.crew(2, [0, 1], 1)
    for number in (0, 1, 2):
        stage.ranks[number].tell("join", large(), crew, number, stage.port, LONG_S)
    time.sleep(0.5)
    for number in (0, 1, 2):
        stage.ranks[number].tell("leave")
        result = stage.ranks[number].answer()
        assert "it was left while it was built" in result.error
        assert result.seconds < SOON_S


def test_a_store_that_stands_still_is_named(stage):
    crew = stage.crew(2, [0, 1], 1)
    os.kill(stage.ranks[0].process.pid, signal.SIGSTOP)
    try:
        for result in stage.join(large(), crew, 3.0, [0]).values():
            assert "store" in result.error
            assert result.seconds < 3.0 + SOON_S
    finally:
        os.kill(stage.ranks[0].process.pid, signal.SIGCONT)


def test_ranks_with_other_plans_do_not_meet(stage):
    crew = stage.crew(1, [0], 1)
    stage.ranks[0].tell("join", pair(), crew, 0, stage.port, 5.0)
    stage.ranks[1].tell("join", large(1), crew, 1, stage.port, 5.0)
    assert stage.ranks[0].answer().error
    words = stage.ranks[1].answer().error
    assert f"it comes with {large(1).terms}, trainer rank 0 with {pair().terms}" in words
