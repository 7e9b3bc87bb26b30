"""The dispatcher, call by call."""

import json
from collections import Counter

import pytest

from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.events import LedgerEvent, from_discard_rows, from_rows, to_discard_rows, to_rows
from prl.flow.ids import Lease, RolloutId
from prl.flow.problems import DispatcherError
from prl.flow.versions import Version


def make(**changes) -> DispatcherSettings:
    base = {"weights": {"a": 1.0}, "steps": 100, "groups_per_step": 2, "rollouts_per_group": 3, "max_lag": 1, "seed": 5}
    return DispatcherSettings(**{**base, **changes})


def started(sizes=None, evaluation=None, **changes) -> Dispatcher:
    dispatcher = Dispatcher(make(**changes))
    dispatcher.problems(sizes or {"a": 10}, evaluation)
    dispatcher.committed(Version(0, 0))
    return dispatcher


def numbers(leases: list[Lease]) -> list[int]:
    return [lease.group for lease in leases]


def train(dispatcher: Dispatcher, step: int, leases: list[Lease]) -> list[LedgerEvent]:
    for lease in leases:
        assert dispatcher.result(lease.group, lease.issue)
    return dispatcher.trained(step, [i for lease in leases for i in lease.rollout_ids()])


def test_nothing_is_handed_out_before_a_version():
    dispatcher = Dispatcher(make())
    dispatcher.problems({"a": 10})
    assert dispatcher.lease(0, 4, 0.0).leases == []
    dispatcher.committed(Version(0, 0))
    leased = dispatcher.lease(0, 100, 0.0)
    assert numbers(leased.leases) == [0, 1, 2, 3]  # (max_lag 1 + 1) * 2 groups
    assert [e.rollout for e in leased.events] == [i for lease in leased.leases for i in lease.rollout_ids()]
    assert {(e.kind, e.version, e.step) for e in leased.events} == {("issued", Version(0, 0), -1)}


def test_every_problem_comes_once_an_epoch_in_an_order_of_the_seed():
    def problems(seed: int, count: int) -> list[tuple[int, int]]:
        dispatcher = started(max_lag=count, groups_per_step=1, seed=seed)
        return [(lease.epoch, lease.index) for lease in dispatcher.lease(0, count, 0.0).leases]

    order = problems(5, 30)
    for epoch in range(3):
        assert sorted(order[10 * epoch : 10 * epoch + 10]) == [(epoch, i) for i in range(10)]
    assert [i for _, i in order[:10]] != [i for _, i in order[10:20]]
    assert problems(5, 30) == order
    assert problems(6, 30) != order


def test_domains_are_mixed_by_weight():
    dispatcher = started(
        sizes={"a": 10, "b": 7, "c": 3}, weights={"a": 3.0, "b": 2.0, "c": 1.0}, max_lag=100, groups_per_step=12
    )
    domains = [lease.domain for lease in dispatcher.lease(0, 600, 0.0).leases]
    for end in range(1, 601):  # at every point no domain is a whole group away from its share
        count = Counter(domains[:end])
        for domain, share in {"a": 3 / 6, "b": 2 / 6, "c": 1 / 6}.items():
            assert abs(count[domain] - share * end) < 1
    assert domains[:6] == domains[6:12]


def test_pipeline_budget_comes_back_with_the_version_of_a_trained_step():
    dispatcher = started()
    first = dispatcher.lease(0, 100, 0.0).leases
    train(dispatcher, 1, first[:2])
    assert dispatcher.lease(0, 100, 0.0).leases == []  # version 1 is on its way: the samplers would still use version 0
    dispatcher.committed(Version(0, 1))
    assert numbers(dispatcher.lease(0, 100, 0.0).leases) == [4, 5]


def test_on_policy():
    dispatcher = started(max_lag=0)
    for step in range(1, 5):
        leases = dispatcher.lease(0, 100, 0.0).leases
        assert len(leases) == 2
        train(dispatcher, step, leases)
        assert dispatcher.lease(0, 100, 0.0).leases == []
        dispatcher.committed(Version(0, step))


def test_conventional_alternates():
    dispatcher = started(mode="conventional", steps_per_generation=3)
    leases = dispatcher.lease(0, 100, 0.0).leases
    assert len(leases) == 6
    for step in (1, 2, 3):
        train(dispatcher, step, leases[2 * step - 2 : 2 * step])
        assert dispatcher.lease(0, 100, 0.0).leases == []
        if step < 3:
            dispatcher.committed(Version(0, step))
            assert dispatcher.lease(0, 100, 0.0).leases == []
    dispatcher.committed(Version(0, 3))
    assert len(dispatcher.lease(0, 100, 0.0).leases) == 6


def test_conventional_replaces_what_was_discarded():
    dispatcher = started(mode="conventional", steps_per_generation=2)
    leases = dispatcher.lease(0, 100, 0.0).leases
    dispatcher.result(leases[0].group, 0)
    events = dispatcher.discarded(leases[0].rollout_ids(), "all rewards equal")
    assert [e.kind for e in events] == ["discarded"] * 3
    assert numbers(dispatcher.lease(0, 100, 0.0).leases) == [4]


def test_a_generation_is_sampled_to_its_end_however_much_waits():
    """Its first step begins when all of it has come."""
    dispatcher = started(mode="conventional", steps_per_generation=3, max_waiting_bytes=100)
    for expected in ([0, 1, 2, 3], [4, 5]):
        assert not dispatcher.generation_sampled
        leases = dispatcher.lease(0, 4, 0.0).leases
        assert numbers(leases) == expected
        for lease in leases:
            assert dispatcher.result(lease.group, lease.issue, 100)
    assert dispatcher.generation_sampled


@pytest.mark.parametrize("end", ["trained", "discarded", "sampled again"])
def test_what_waits_no_more_makes_room(end):
    dispatcher = started(max_lag=9, max_waiting_bytes=200)
    leases = dispatcher.lease(0, 2, 0.0).leases
    for lease in leases:
        dispatcher.result(lease.group, lease.issue, 100)
    assert dispatcher.lease(0, 100, 0.0).leases == []  # 200 bytes wait, and step 1 lacks nothing
    if end == "trained":
        dispatcher.trained(1, [i for lease in leases for i in lease.rollout_ids()])
        dispatcher.committed(Version(0, 1))
        expected = 20  # (max_lag 9 + 1) * 2 groups
    elif end == "discarded":
        dispatcher.discarded(leases[0].rollout_ids(), "filtered")
        expected = 19
    else:
        dispatcher.failed(0, 0, "rollout file unreadable")
        expected = 19  # with that one
    assert len(dispatcher.lease(0, 100, 0.0).leases) == expected


def test_the_last_steps_ask_for_no_more_than_they_train():
    dispatcher = started(steps=3, max_lag=10)
    leases = dispatcher.lease(0, 100, 0.0).leases
    assert len(leases) == 6
    for step in (1, 2, 3):
        train(dispatcher, step, leases[2 * step - 2 : 2 * step])
        dispatcher.committed(Version(0, step))
        assert dispatcher.lease(0, 100, 0.0).leases == []


def test_a_failed_group_is_issued_again_and_then_discarded():
    dispatcher = started()
    dispatcher.lease(0, 4, 0.0)
    for issue in (0, 1):
        events = dispatcher.failed(1, issue, "no answer")
        assert [(e.rollout.issue, e.kind, e.reason) for e in events] == [(issue, "issued_again", "no answer")] * 3
        assert not dispatcher.result(1, issue)  # its late result
        again = dispatcher.lease(7, 4, 0.0)
        assert [(lease.group, lease.issue) for lease in again.leases] == [(1, issue + 1)]
        assert [(e.rollout.issue, e.kind) for e in again.events] == [(issue + 1, "issued")] * 3
        assert not dispatcher.result(1, issue)
        assert dispatcher.failed(1, issue, "told again") == []
    events = dispatcher.failed(1, 2, "no answer")
    assert [(e.rollout.issue, e.kind) for e in events] == [(2, "discarded")] * 3
    assert dispatcher.discard_reasons == {"no answer": 3}
    assert numbers(dispatcher.lease(0, 4, 0.0).leases) == [4]  # its place went to another


def test_a_lost_actor_gives_back_what_it_held_and_no_more():
    dispatcher = started()
    dispatcher.lease(0, 2, 3.0)
    other = dispatcher.lease(1, 2, 4.0).leases
    dispatcher.result(0, 0)
    events = dispatcher.lost(0)
    assert {(e.rollout.group, e.kind, e.reason) for e in events} == {(1, "issued_again", "actor 0 lost")}
    assert dispatcher.result(other[0].group, 0)
    assert dispatcher.lost(0) == []


def test_repeated_calls_change_nothing():
    dispatcher = started()
    leases = dispatcher.lease(0, 4, 0.0).leases
    ids = [i for lease in leases[:2] for i in lease.rollout_ids()]
    assert dispatcher.result(0, 0)
    assert dispatcher.result(0, 0)
    dispatcher.result(1, 0)
    assert len(dispatcher.trained(1, ids + ids)) == 6
    assert dispatcher.trained(1, ids) == []
    assert dispatcher.discarded(ids, "too old") == []
    assert not dispatcher.result(0, 0)
    assert len(dispatcher.discarded(leases[2].rollout_ids() * 2, "too old")) == 3


def test_single_rollouts_may_end_before_their_group():
    dispatcher = started()
    ids = dispatcher.lease(0, 1, 0.0).leases[0].rollout_ids()
    dispatcher.result(0, 0)
    assert [e.rollout for e in dispatcher.discarded([ids[1]], "cut")] == [ids[1]]
    assert dispatcher.in_flight == 1
    assert [e.rollout for e in dispatcher.trained(1, [ids[0], ids[2]])] == [ids[0], ids[2]]
    assert dispatcher.in_flight == 0


def test_awaited_from_holds_back_what_was_overtaken():
    dispatcher = started()
    dispatcher.lease(0, 4, 0.0)
    assert dispatcher.awaited_from == 0
    dispatcher.result(0, 0)
    dispatcher.result(2, 0)
    assert dispatcher.awaited_from == 1
    dispatcher.failed(1, 0, "x")
    assert dispatcher.awaited_from == 1
    dispatcher.lease(0, 4, 0.0)
    dispatcher.result(1, 1)
    assert dispatcher.awaited_from == 3
    dispatcher.result(3, 0)
    assert dispatcher.awaited_from == 4


def test_evaluations_come_first_and_once():
    dispatcher = started(
        sizes={"a": 10, "b": 10}, weights={"a": 3.0, "b": 1.0}, evaluation={"a": 100, "b": 2},
        evaluate_every_steps=2, evaluate_problems=16, steps=5,
    )  # fmt: skip
    leased = dispatcher.lease(3, 3, 0.0)
    assert leased.leases[:2] == [Lease("evaluate", "a", 0, 0, -1, 0, 12), Lease("evaluate", "b", 0, 0, -2, 0, 2)]
    assert leased.leases[2].kind == "train"
    assert {e.rollout.group for e in leased.events} == {0}
    assert dispatcher.evaluations_pending == 2
    found = dispatcher.evaluated(-1, 0)
    assert found is not None
    assert (found.step, found.domain) == (0, "a")
    assert dispatcher.evaluated(-1, 0) is None
    assert dispatcher.lost(3)[0].rollout.group == 0  # the evaluation of b is handed out again, without a word in the ledger
    assert dispatcher.lease(4, 1, 0.0).leases == [Lease("evaluate", "b", 0, 0, -2, 1, 2)]
    assert dispatcher.evaluated(-2, 0) is None
    assert dispatcher.evaluated(-2, 1) is not None
    due = []
    for step in range(1, 6):
        dispatcher.committed(Version(0, step))
        dispatcher.committed(Version(0, step))
        due += [lease.epoch for lease in dispatcher.lease(4, 2, 0.0).leases if lease.kind == "evaluate"]
    assert due == [2, 2, 4, 4, 5, 5]


def test_a_resumed_run_evaluates_only_what_is_new():
    settings = make(evaluate_every_steps=2, evaluate_problems=1)
    dispatcher = Dispatcher(settings)
    dispatcher.problems({"a": 10}, {"a": 1})
    for step in range(5):
        dispatcher.committed(Version(0, step))
    dispatcher.lease(0, 3, 0.0)
    for number in (-1, -2, -3):
        assert dispatcher.evaluated(number, 0)
    dispatcher.went_back(Version(1, 2), "attempt ended")  # whose version has been looked at
    dispatcher.committed(Version(1, 2))
    assert dispatcher.evaluations_pending == 0
    dispatcher.committed(Version(1, 4))
    assert dispatcher.evaluations_pending == 1


def test_an_evaluation_of_a_version_that_was_left_is_made_anew():
    dispatcher = Dispatcher(make(evaluate_every_steps=2, evaluate_problems=1))
    dispatcher.problems({"a": 10}, {"a": 1})
    for step in range(5):
        dispatcher.committed(Version(0, step))
    (first, second) = dispatcher.lease(0, 2, 0.0).leases  # of steps 0 and 2; that of step 4 waits
    dispatcher.went_back(Version(1, 3), "trainer restarted")
    dispatcher.committed(Version(0, 6))  # was on its way to the samplers
    dispatcher.committed(Version(1, 3))
    assert [dispatcher.evaluated(lease.group, lease.issue) for lease in (first, second)] == [None, None]
    again = dispatcher.lease(0, 9, 0.0).leases
    assert [(lease.kind, lease.group, lease.epoch, lease.issue) for lease in again[:2]] == [
        ("evaluate", first.group, 0, 1),
        ("evaluate", second.group, 2, 1),
    ]
    assert {lease.kind for lease in again[2:]} == {"train"}
    dispatcher.committed(Version(1, 4))
    (lease,) = [lease for lease in dispatcher.lease(0, 9, 0.0).leases if lease.kind == "evaluate"]
    assert (lease.epoch, lease.issue) == (4, 0)
    assert lease.group not in (first.group, second.group)


def test_what_is_trained_before_the_samplers_have_the_new_lineage_belongs_to_it():
    dispatcher = started()
    leases = dispatcher.lease(0, 4, 0.0).leases
    train(dispatcher, 1, leases[:2])
    dispatcher.committed(Version(0, 1))
    dispatcher.went_back(Version(1, 0), "trainer restarted")
    again = dispatcher.trained(1, [i for lease in leases[:2] for i in lease.rollout_ids()])
    assert {event.version for event in again} == {Version(1, 1)}
    assert len(again) == 2 * len(leases[0].rollout_ids())


def test_a_step_lacks_what_has_not_come_back():
    dispatcher = started(groups_per_step=3, max_lag=2)
    assert dispatcher.lacking([]) == 3  # may be handed out
    dispatcher.lease(0, 9, 0.0)
    for group, lacking in [(4, 2), (5, 1), (6, 0), (7, 0)]:
        dispatcher.result(group, 0)
        assert dispatcher.lacking([]) == lacking
    assert dispatcher.lacking([], steps=2) == 2  # the second step has group 7
    assert dispatcher.lacking([4, 5, 6]) == 2  # they are in a file
    assert [dispatcher.lacking([], steps) for steps in (3, 1)] == [2, 0]


def test_in_the_order_of_dispatch_a_step_lacks_the_earliest():
    dispatcher = started(groups_per_step=3, max_lag=2, order="dispatch")
    dispatcher.lease(0, 9, 0.0)
    for group, lacking in [(4, 3), (1, 2), (6, 2), (0, 1), (2, 0)]:
        dispatcher.result(group, 0)
        assert dispatcher.lacking([]) == lacking
    assert dispatcher.lacking([], steps=2) == 2  # 3 and 5; 4 has come
    assert dispatcher.lacking([0, 1, 2]) == 2


def test_a_step_lacks_no_more_than_is_out():
    dispatcher = started(sizes={"a": 4}, epochs=1, groups_per_step=3)
    leases = dispatcher.lease(0, 9, 0.0).leases
    train(dispatcher, 1, leases[:3])
    assert dispatcher.lacking([]) == 1  # the last problem of the run
    dispatcher.result(3, 0)
    assert dispatcher.lacking([]) == 0


def test_a_generation_lacks_all_that_is_out():
    dispatcher = started(mode="conventional", steps_per_generation=3)
    leases = dispatcher.lease(0, 4, 0.0).leases
    assert dispatcher.lacking([]) == 6
    dispatcher.result(leases[0].group, 0)
    dispatcher.lease(0, 2, 0.0)
    assert dispatcher.lacking([leases[0].group]) == 5


def test_mistakes_are_named():
    with pytest.raises(DispatcherError, match="weight above 0"):
        Dispatcher(make(weights={"a": 0.0}))
    dispatcher = Dispatcher(make())
    with pytest.raises(DispatcherError, match="no problems to train on in domain a"):
        dispatcher.problems({"b": 3})
    dispatcher.problems({"a": 3})
    with pytest.raises(DispatcherError, match="problems have changed"):
        dispatcher.problems({"a": 4})
    dispatcher.committed(Version(0, 3))
    with pytest.raises(DispatcherError, match="0:2 was committed after 0:3"):
        dispatcher.committed(Version(0, 2))
    with pytest.raises(DispatcherError, match="domains have changed"):
        Dispatcher(make(weights={"z": 1.0}), dispatcher.state())
    with pytest.raises(DispatcherError, match="held-out"):
        Dispatcher(make(evaluate_every_steps=1)).problems({"a": 3})


def test_ids_on_the_wire():
    ids = [RolloutId(0, "a/1", 4, k, 1) for k in (0, 2)] + [RolloutId(1, "a/2", 5, 0, 0)]
    assert to_rows(ids) == [[0, "a/1", 4, 1, [0, 2]], [1, "a/2", 5, 0, [0]]]
    assert from_rows(json.loads(json.dumps(to_rows(ids)))) == ids
    rows = to_discard_rows([(ids[0], "cut"), (ids[1], "cut"), (ids[2], "too old")])
    assert rows == [[0, "a/1", 4, 1, [0, 2], "cut"], [1, "a/2", 5, 0, [0], "too old"]]
    assert from_discard_rows(rows) == {"cut": ids[:2], "too old": ids[2:]}


def test_after_a_rollback_groups_wait_until_they_will_not_be_too_old():
    """Back to step 1: step 2 was trained, step 3's file was durable, groups 6 and 7 were sampled for step 4."""
    dispatcher = started()
    leases = {lease.group: lease for lease in dispatcher.lease(0, 4, 0.0).leases}
    events = train(dispatcher, 1, [leases[0], leases[1]])
    dispatcher.committed(Version(0, 1))
    state = dispatcher.state()
    for step in (2, 3):
        leased = dispatcher.lease(0, 2, 0.0)
        leases |= {lease.group: lease for lease in leased.leases}
        events = events + leased.events
        if step == 2:
            events += train(dispatcher, 2, [leases[2], leases[3]])
            dispatcher.committed(Version(0, 2))
    resumed = Dispatcher(dispatcher.settings, state)
    resumed.replay(events[6:])
    resumed.went_back(Version(1, 1), "attempt ended", keep={4, 5})
    resumed.committed(Version(1, 1))
    assert resumed.lease(0, 9, 0.0).leases == []  # trained in step 4, tokens of version 1 would be 2 steps old
    resumed.trained(2, [i for n in (2, 3) for i in leases[n].rollout_ids()])
    resumed.committed(Version(1, 2))
    assert [(lease.group, lease.issue) for lease in resumed.lease(0, 9, 0.0).leases] == [(6, 1), (7, 1)]


def test_replay_refuses_another_runs_ledger():
    dispatcher = started()
    stranger = started(seed=77, sizes={"a": 10})
    events = stranger.lease(0, 4, 0.0).events
    with pytest.raises(DispatcherError, match="another run"):
        dispatcher.replay(events)
