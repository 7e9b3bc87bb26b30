"""Restarts of processes: pauses that double, a limit, and who has to end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.flow.restarts import RestartError, RestartRule, Restarts

RULE = RestartRule(limit=3, pause_s=2.0, start_s=60.0)


def test_pauses_double_up_to_64_fold_and_the_limit_ends_them():
    restarts = Restarts(RestartRule(limit=9, pause_s=0.5, start_s=60.0), ["actor 0"])
    restarts.join("actor 0")
    assert [restarts.died("actor 0", 0.0) for _ in range(10)] == [0.5, 1, 2, 4, 8, 16, 32, 32, 32, None]
    assert (restarts.granted, restarts.again("actor 0"), restarts.state("actor 0")) == (9, 9, "lost")
    with pytest.raises(RestartError, match="actor 0 has no process"):
        restarts.died("actor 0", 0.0)


def test_what_never_joined_is_not_started_again():
    restarts = Restarts(RULE, ["actor 0", "actor 1"])
    restarts.join("actor 1")
    assert restarts.died("actor 0", 0.0) is None
    assert restarts.died("actor 1", 0.0) == 2.0
    assert restarts.died("actor 1", 0.0) == 4.0  # before the second one had joined


def test_one_that_is_fenced_has_to_end_once_and_one_that_does_not_come_back_is_late():
    restarts = Restarts(RULE, ["verifier 0"])
    assert not restarts.fence("verifier 0")  # it has not joined: its end is awaited by the start's deadline
    restarts.join("verifier 0")
    assert restarts.fence("verifier 0")
    assert not restarts.fence("verifier 0")
    assert restarts.to_end == [("verifier 0", 0)]
    assert restarts.died("verifier 0", 100.0) == 2.0
    assert restarts.to_end == []
    assert restarts.late(162.0) == []
    assert restarts.late(162.1) == ["verifier 0"]
    assert restarts.fence("verifier 0")
    assert restarts.to_end == [("verifier 0", 1)]
    restarts.join("verifier 0")  # too late: it stays given up
    assert restarts.state("verifier 0") == "fenced"


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["join", "fence", "die"]))))
def test_no_process_is_started_more_often_than_the_limit_and_each_by_itself(events):
    restarts, deaths, joined = Restarts(RULE, ["a", "b"]), {"a": 0, "b": 0}, set()
    for name, what in events:
        if what == "join":
            restarts.join(name)
            joined.add(name)
        elif what == "fence":
            restarts.fence(name)
        elif restarts.state(name) != "lost":
            granted = restarts.died(name, 0.0)
            assert granted == (2.0 * 2 ** deaths[name] if name in joined and deaths[name] < 3 else None)
            deaths[name] += granted is not None
    assert restarts.granted == deaths["a"] + deaths["b"]
    assert {name for name, _ in restarts.to_end} == {name for name in "ab" if restarts.state(name) == "fenced"}
