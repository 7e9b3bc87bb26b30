"""Dispatchers in random runs: every id ends once, the budget and the lag hold, crashes lose nothing, no run stands still."""

import json

import hypothesis.strategies as st
import pytest
from dispatcher_run import Run
from hypothesis import HealthCheck, given, settings

from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.problems import ProblemOrder

WORK = ["lease", "result", "make", "train", "commit", "advance", "advance"]
MISHAPS = ["fail", "unreadable", "lose", "wait", "late", "drop"]
CRASHES = ["checkpoint", "resume", "restart"]
VALUES = st.integers(0, 30)
SETTINGS = st.builds(
    DispatcherSettings,
    mode=st.sampled_from(["pipeline", "pipeline", "conventional"]),
    max_lag=st.integers(0, 3),
    steps_per_generation=st.integers(1, 3),
    order=st.sampled_from(["arrival", "dispatch"]),
    groups_per_step=st.integers(1, 3),
    rollouts_per_group=st.integers(1, 3),
    steps=st.integers(1, 12),
    weights=st.sampled_from([{"a": 1.0}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 5.0, "c": 0.5}]),
    epochs=st.sampled_from([None, None, 1, 2]),
    group_deadline_s=st.sampled_from([None, 20.0]),
    max_waiting_bytes=st.sampled_from([None, 1, 500]),
    seed=st.integers(0, 3),
)
quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def operations(*names: str):
    """Many, since hypothesis takes few where it may."""
    return st.lists(st.tuples(st.sampled_from([*WORK, *WORK, *names]), VALUES), min_size=20, max_size=80)


@quick
@given(SETTINGS, operations(*MISHAPS))
def test_every_id_ends_once_within_the_budget_and_every_run_ends(chosen, todo):
    run = Run(chosen)
    for operation in todo:
        run.do(operation)
    run.finish()


@quick
@given(SETTINGS, operations(*MISHAPS, *CRASHES))
def test_crashes_lose_and_double_nothing(chosen, todo):
    """In the order of dispatch no group is ever too old (the run looks at that), whatever fails and however often."""
    run = Run(chosen)
    for operation in todo:
        run.do(operation)
    run.finish()


@quick
@given(SETTINGS, operations(*MISHAPS), operations(*MISHAPS))
def test_a_saved_state_goes_on_alike(chosen, before, after):
    run, twin = Run(chosen), Run(chosen)
    for operation in before:
        run.do(operation)
        twin.do(operation)
    twin.dispatcher = Dispatcher(chosen, json.loads(json.dumps(run.dispatcher.state())))
    for operation in after:
        run.do(operation)
        twin.do(operation)
    assert run.ledger == twin.ledger
    assert run.dispatcher.state() == twin.dispatcher.state()


@quick
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 200))
def test_shares_are_within_one_problem_of_the_weights(weights, draws):
    order = ProblemOrder({str(k): w for k, w in enumerate(weights)}, seed=1)
    order.set_sizes({str(k): 5 for k in range(len(weights))})
    drawn = [0] * len(weights)
    for total in range(1, draws + 1):
        drawn[int(order.draw().domain)] += 1
        for count, weight in zip(drawn, weights, strict=True):
            assert abs(count - total * weight / sum(weights)) <= 1 + 1e-9


@pytest.mark.parametrize("epochs", [1, 3])
def test_each_problem_comes_once_an_epoch_until_there_are_none(epochs):
    order = ProblemOrder({"a": 1.0, "b": 1.0}, seed=1, epochs=epochs)
    order.set_sizes({"a": 2, "b": 6})
    draws = [order.draw() for _ in range(order.left())]
    assert sorted((d.domain, d.epoch, d.index) for d in draws) == [
        (domain, epoch, index) for domain, size in (("a", 2), ("b", 6)) for epoch in range(epochs) for index in range(size)
    ]
    assert [d.domain for d in draws[: 4 * epochs]].count("a") == 2 * epochs  # equal shares, then b alone
    assert order.left() == 0
