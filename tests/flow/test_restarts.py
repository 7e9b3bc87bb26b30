"""Restarts of processes: pauses that double, a limit, and who has to end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.flow.restarts import RestartError, RestartRule, Restarts, Together

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


def test_what_had_to_end_because_of_another_is_not_counted():
    restarts = Restarts(RestartRule(limit=1, pause_s=2.0, start_s=60.0), ["preprocess 0"])
    restarts.renew("preprocess 0")
    assert restarts.to_end == []  # it has not joined: there is nothing that it could know
    restarts.join("preprocess 0")
    for number in range(3):
        restarts.renew("preprocess 0")
        assert restarts.to_end == [("preprocess 0", number)]
        assert restarts.died("preprocess 0", 0.0) == 2.0
        restarts.join("preprocess 0")
    assert (restarts.granted, restarts.again("preprocess 0")) == (0, 0)
    assert restarts.died("preprocess 0", 0.0) == 2.0
    restarts.join("preprocess 0")
    assert restarts.died("preprocess 0", 0.0) is None
    assert (restarts.granted, restarts.again("preprocess 0")) == (1, 1)


def began(limit=3):
    trainers = Together(RestartRule(limit, pause_s=2.0, start_s=60.0), ["t0", "t1", "t2"])
    for name in ("t0", "t1", "t2"):
        trainers.join(name)
    return trainers


def test_where_one_of_a_crew_dies_the_others_have_to_end_and_all_begin_again_together():
    trainers = began()
    assert (trainers.complete, trainers.to_end) == (True, [])
    assert trainers.died("t1", 0.0) == 2.0
    assert trainers.to_end == [("t0", 0), ("t2", 0)]
    assert not trainers.complete
    assert trainers.died("t0", 0.0) == 2.0  # of the same failure
    trainers.join("t1")
    assert trainers.to_end == [("t2", 0)]
    assert trainers.died("t1", 0.0) == 4.0  # another failure, before the first was over
    assert trainers.to_end == [("t0", 1), ("t2", 0)]
    assert trainers.died("t2", 0.0) == 4.0
    assert trainers.died("t0", 0.0) == 4.0
    assert (trainers.to_end, trainers.again) == ([], 2)
    for name in ("t0", "t1", "t2"):
        assert not trainers.complete
        trainers.join(name)
    assert trainers.complete


def test_a_crew_that_stands_still_ends_as_a_whole_up_to_the_limit():
    trainers = began(limit=1)
    assert trainers.may_restart
    assert trainers.renew(0.0)
    assert trainers.to_end == [("t0", 0), ("t1", 0), ("t2", 0)]
    assert not trainers.renew(0.0)  # that is known
    assert [trainers.died(name, 0.0) for name in ("t0", "t1", "t2")] == [2.0] * 3
    assert not trainers.may_restart
    assert not trainers.late(62.0)
    assert trainers.late(62.1)
    for name in ("t0", "t1", "t2"):
        trainers.join(name)
    assert not trainers.late(100.0)
    assert not trainers.renew(0.0)
    assert trainers.died("t0", 0.0) is None


def test_a_crew_that_never_was_whole_is_not_started_again():
    trainers = Together(RULE, ["t0", "t1"])
    trainers.join("t0")
    assert not trainers.may_restart
    assert trainers.died("t0", 0.0) is None
    assert trainers.to_end == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["t0", "t1", "t2"]), st.sampled_from(["join", "die", "die", "renew"]))))
def test_no_successor_is_whole_before_all_of_the_failed_crew_have_ended(events):
    """Each process is alive from its start to its death; who is alive when the crew fails is told to end."""
    trainers, number = began(limit=4), dict.fromkeys(["t0", "t1", "t2"], 0)
    doomed: set[tuple[str, int]] = set()
    for name, what in events:
        before = trainers.again
        if what == "join" and (name, number[name]) not in doomed:
            trainers.join(name)
        elif what == "die":
            if trainers.died(name, 0.0) is None:
                break
            number[name] += 1
        elif what == "renew":
            trainers.renew(0.0)
        if trainers.again > before:  # all that were alive then, but for the one that had died
            doomed |= {(one, number[one]) for one in number if not (what == "die" and one == name)}
        assert set(trainers.to_end) == {(one, n) for one, n in doomed if n == number[one]}
        assert not (trainers.complete and trainers.to_end)
        assert trainers.again <= 4
