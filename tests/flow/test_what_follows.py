"""What follows an attempt's end."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.flow.ending import Means, Reason, decide, fruitless

FREE = Means(requeue=True, chain=2, fruitless=2)


@pytest.mark.parametrize(
    ("reason", "then"),
    [
        ("done", "stop"),
        ("stopped", "stop"),
        ("cancelled", "stop"),
        ("quota", "stop"),
        ("out of memory", "stop"),
        ("error", "stop"),
        ("bad node", "stop"),
        ("time limit", "requeue"),
        ("preempted", "requeue"),
        ("requeued", "requeue"),
        ("node failure", "requeue"),
        ("killed", "requeue"),
    ],
)
def test_only_what_came_from_outside_goes_on(reason, then):
    assert decide(reason, [7], FREE).next == then


def test_every_reason_has_a_line_in_the_table_above():
    (table,) = [mark for mark in test_only_what_came_from_outside_goes_on.pytestmark if mark.name == "parametrize"]
    assert {reason for reason, _ in table.args[1]} == set(get_args(Reason))


def test_a_chain_goes_on_where_nothing_may_be_queued_again():
    assert decide("preempted", [7], Means(requeue=False, chain=1, fruitless=2)).next == "chain"
    stopped = decide("preempted", [7], Means(requeue=False, chain=0, fruitless=2))
    assert stopped.next == "stop"
    assert "cluster.requeue" in stopped.words


@pytest.mark.parametrize(
    ("attempts", "count"),
    [([5], 0), ([0], 1), ([5, 5], 1), ([5, 3], 1), ([5, 3, 4], 2), ([5, 5, 6], 0), ([0, 0, 0], 3), ([5, 9, 2], 1), ([], 0)],
)
def test_attempts_are_fruitless_that_get_no_further_than_those_before(attempts, count):
    assert fruitless(attempts) == count


@given(st.lists(st.integers(0, 5)), st.integers(1, 4), st.sampled_from(get_args(Reason)))
def test_so_many_fruitless_attempts_in_a_row_end_the_run(attempts, limit, reason):
    decision = decide(reason, [*attempts, *[0] * limit], Means(requeue=True, chain=0, fruitless=limit))
    assert decision.next == "stop"
    if reason == "time limit":
        assert "trained no step" in decision.words
