"""From arriving groups to steps: order, drops, and an end for every rollout."""

from dataclasses import replace

import numpy as np

from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.versions import Version
from prl.preprocess.assemble import CUT, EQUAL, TOO_OLD, Moment
from prl.preprocess.options import PreprocessOptions
from prl.preprocess.steps import StepMaker
from prl.streams.records import Group, Rollout, Turn, VersionSpan


def make(number: int, version: int = 0, rewards=(0.0, 1.0), finish="stop", issue=0) -> Group:
    def rollout(reward: float) -> Rollout:
        span = VersionSpan(Version(0, version), 0, 2)
        return Rollout(
            (Turn(np.ones(2, np.int32), np.ones(2, np.int32), np.zeros(2, np.float32), (span,), finish, 0, 0, 0),), reward
        )

    return Group(0, "d", "", f"d/{number}", number, issue, tuple(map(rollout, rewards)))


def maker(order="arrival", **options) -> StepMaker:
    return StepMaker(replace(PreprocessOptions(pack_tokens=16), **options), 2, order, 1)


def at(step: int, max_lag: int = 1) -> Moment:
    return Moment(step, 0, {}, max_lag)


def test_arrival_takes_what_comes_first():
    steps = maker()
    for number in (3, 0, 2):
        steps.add(make(number))
    assert steps.choose(at(1)) == [3, 0]
    made = steps.make([3, 0], at(1))
    assert [i.group for i in made.trained] == [3, 3, 0, 0]
    assert made.discarded == []
    assert steps.choose(at(2)) is None


def test_dispatch_waits_for_what_was_handed_out_first():
    steps = maker("dispatch")
    for number in (3, 0, 2):
        steps.add(make(number))
    assert steps.choose(at(1), awaited_from=1) is None
    steps.add(make(1))
    assert steps.choose(at(1), awaited_from=4) == [0, 1]


def test_old_groups_are_dropped_whole_and_reported_once():
    steps = maker()
    for number, version in enumerate((0, 2, 0, 1)):
        steps.add(make(number, version))
    assert steps.choose(at(3)) == [1, 3]
    dropped = steps.take_discarded()
    assert [(i.group, i.rollout, reason) for i, reason in dropped] == [(g, k, TOO_OLD) for g in (0, 2) for k in (0, 1)]
    assert steps.take_discarded() == []
    assert len(steps) == 2


def test_filtered_groups_and_rollouts_have_their_reasons():
    steps = maker(drop_equal_groups=True, mask_cut=True)
    steps.add(make(0, rewards=(1.0, 1.0)))
    steps.add(make(1, finish="length"))
    assert len(steps) == 0
    assert [reason for _, reason in steps.take_discarded()] == [EQUAL, EQUAL, CUT, CUT]


def test_repeated_announcements_are_known():
    steps = maker()
    steps.add(make(0))
    steps.add(make(1))
    assert steps.knows(0, 0)
    assert not steps.knows(0, 1)
    steps.make([0, 1], at(1))
    assert steps.knows(0, 0)
    steps.trained(0)
    assert steps.knows(0, 0)
    steps.trained(1)  # from here on the dispatcher itself refuses them
    assert not steps.knows(0, 0)


def test_a_new_issue_takes_the_place_of_the_old_one():
    steps = maker()
    steps.add(make(0))
    steps.add(make(0, issue=1))
    steps.add(make(1))
    chosen = steps.choose(at(1))
    assert chosen == [0, 1]
    assert [i.issue for i in steps.make(chosen, at(1)).trained] == [1, 1, 0, 0]


def test_with_the_dispatcher_every_rollout_ends_once():
    """Both machines in a loop with slow groups, filters and late versions: nothing is lost, nothing too old is trained."""
    settings = DispatcherSettings(
        weights={"d": 1.0}, steps=30, groups_per_step=2, rollouts_per_group=2, max_lag=2, max_issues=2
    )
    dispatcher = Dispatcher(settings)
    dispatcher.problems({"d": 50})
    dispatcher.committed(Version(0, 0))
    steps = maker(drop_equal_groups=True)
    rng = np.random.default_rng(0)
    events, held, waiting, trained = [], [], [], 0
    for turn in range(1000):
        leased = dispatcher.lease(0, 2, float(turn))
        events += leased.events
        assert dispatcher.version is not None
        held += [(lease, dispatcher.version.step) for lease in leased.leases]
        rng.shuffle(held)
        while held and rng.random() < 0.7:
            lease, version = held.pop()
            if rng.random() < 0.1:
                events += dispatcher.failed(lease.group, lease.issue, "failed")
            elif dispatcher.result(lease.group, lease.issue):
                rewards = (0.0, 0.0) if rng.random() < 0.2 else (0.0, 1.0)
                steps.add(make(lease.group, version, rewards, issue=lease.issue))
        moment = at(trained + len(waiting) + 1, settings.max_lag)
        chosen = steps.choose(moment)
        if chosen and len(waiting) < 2:
            made = steps.make(chosen, moment)
            assert made.step.metrics["lag_max"] <= settings.max_lag
            waiting.append(made)
        for rollout, reason in steps.take_discarded():
            events += dispatcher.discarded([rollout], reason)
        if waiting and rng.random() < 0.5:
            trained += 1
            events += dispatcher.trained(trained, waiting.pop(0).trained)
        if trained > dispatcher.version.step and rng.random() < 0.5:
            dispatcher.committed(Version(0, dispatcher.version.step + 1))
        if dispatcher.version.step == settings.steps:
            break
    assert dispatcher.version.step == settings.steps
    events += dispatcher.close("run ended")
    begun = [(e.rollout.group, e.rollout.rollout, e.rollout.issue) for e in events if e.kind == "issued"]
    ended = [(e.rollout.group, e.rollout.rollout, e.rollout.issue) for e in events if e.kind != "issued"]
    assert len(set(begun)) == len(begun)
    assert sorted(ended) == sorted(begun)
    assert sum(e.kind == "trained" for e in events) == 30 * 4
    assert {TOO_OLD, EQUAL, "failed"} & set(dispatcher.discard_reasons) == set(dispatcher.discard_reasons) - {"run ended"}
