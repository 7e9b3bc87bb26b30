"""The lanes over gloo on this machine's loop-back interface, each rank a process, all of them started once."""

import os
import signal
import time
from collections.abc import Iterator, Mapping

import pytest
from lane_ranks import Fault, Result
from lane_stage import LONG_S, Stage, check, large

from prl.config.hf_config import model_config
from prl.config.layout import Layout
from prl.weights.compile import compile_plan
from prl.weights.legs import lane_digests
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
SOON_S = 30.0  # that is, well before it


@pytest.fixture(scope="module")
def stages() -> Iterator[list[Stage]]:
    """One at most: that of the tests so far."""
    stages: list[Stage] = []
    yield stages
    for stage in stages:
        stage.end()


@pytest.fixture
def stage(stages: list[Stage], request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The ranks of the test before, or others where that failed: what it left unanswered would be taken for answers to this
    one."""
    if not stages:
        stages.append(Stage())
    failed = request.session.testsfailed
    yield stages[-1]
    if request.session.testsfailed > failed:
        stages.pop().end()


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


@pytest.mark.parametrize(("kind", "bucket"), [("flip", 0), ("flip", 1), ("swap", 1)])
def test_what_changes_on_its_way_is_noticed(stage, kind, bucket):
    crew = stage.crew(1, [0, 1], 1)
    stage.open(pair(), crew)
    stage.begin(crew, 1, faults={2: Fault(kind, bucket)})
    sent, right, wrong = (lane_digests(result.report.legs) for result in stage.results(crew).values())
    assert sent == right != wrong


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
