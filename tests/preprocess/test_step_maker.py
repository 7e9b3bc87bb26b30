"""From arriving groups to orders of steps: order, drops, memory, and an end for every rollout."""

import tracemalloc
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from preprocess_data import entry, group, small, turn

from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.versions import Version
from prl.preprocess.assemble import CUT, EQUAL, TOO_OLD, Moment, Step, build_step
from prl.preprocess.builder import read_members
from prl.preprocess.options import PreprocessOptions
from prl.preprocess.steps import Arrival, StepMaker
from prl.streams.contract import Published
from prl.streams.records import Group

ROOM = 2**20


def options_of(**changes) -> PreprocessOptions:
    return replace(PreprocessOptions(pack_tokens=16), **changes)


def maker(order="arrival", memory_bytes=ROOM, **options) -> StepMaker:
    return StepMaker(options_of(**options), 2, order, memory_bytes)


def add(steps: StepMaker, *groups: Group) -> None:
    for made in groups:
        steps.add(made, entry(made.group), Arrival(1.0 * made.group, made.group + 0.25, made.group + 0.5))


def at(step: int, max_lag: int = 1) -> Moment:
    return Moment(step, 0, {}, max_lag)


def test_arrival_takes_what_comes_first():
    steps = maker()
    add(steps, small(3), small(0), small(2))
    assert steps.choose(at(1)) == [3, 0]
    order = steps.take([3, 0], at(1))
    assert [(m.group, m.issue, m.entry.name) for m in order.members] == [(3, 0, "entry-3"), (0, 0, "entry-0")]
    assert order.last == Arrival(3.0, 3.25, 3.5)
    assert steps.choose(at(2)) is None


def test_dispatch_waits_for_what_was_handed_out_first():
    steps = maker("dispatch")
    add(steps, small(3), small(0), small(2))
    assert steps.choose(at(1), awaited_from=1) is None
    add(steps, small(1))
    assert steps.choose(at(1), awaited_from=4) == [0, 1]


@pytest.mark.parametrize("too_old", ["drop", "mask"])
def test_old_groups_are_dropped_whole_and_reported_once(too_old):
    steps = maker(too_old=too_old)
    for number, version in enumerate((0, 2, 0, 1)):
        add(steps, small(number, version))
    assert steps.choose(at(3)) == [1, 3]
    dropped = steps.take_discarded()
    assert [(i.group, i.rollout, reason) for i, reason in dropped] == [(g, k, TOO_OLD) for g in (0, 2) for k in (0, 1)]
    assert steps.take_discarded() == []
    assert len(steps) == 2
    assert steps.knows(0, 0)


def test_old_groups_are_kept_where_they_train():
    steps = maker(too_old="train")
    add(steps, small(0, 0), small(1, 0))
    assert steps.choose(at(9)) == [0, 1]


def test_filtered_groups_and_rollouts_have_their_reasons():
    steps = maker(drop_equal_groups=True, mask_cut=True)
    add(steps, small(0, rewards=(1.0, 1.0)), small(1, finish="length"))
    assert len(steps) == 0
    assert [reason for _, reason in steps.take_discarded()] == [EQUAL, EQUAL, CUT, CUT]
    add(steps, small(0, rewards=(1.0, 1.0)))  # announced again
    assert steps.take_discarded() == []


def test_repeated_announcements_are_known():
    steps = maker()
    add(steps, small(0), small(1))
    assert steps.knows(0, 0)
    assert not steps.knows(0, 1)
    steps.take([0, 1], at(1))
    assert steps.knows(0, 0)
    steps.trained(0)
    assert steps.knows(0, 0)
    steps.trained(1)  # from here on the dispatcher itself refuses them
    assert not steps.knows(0, 0)


def test_a_new_issue_takes_the_place_of_the_old_one():
    steps = maker()
    add(steps, small(0), small(0, issue=1), small(0), small(1))
    assert steps.choose(at(1)) == [0, 1]
    assert [(m.group, m.issue) for m in steps.take([0, 1], at(1)).members] == [(0, 1), (1, 0)]


def test_groups_beyond_the_memory_are_read_again():
    size = 100 + 2 * 2048  # of an entry and its group's objects
    steps = maker(memory_bytes=2 * size)
    groups = {number: small(number) for number in range(4)}
    add(steps, *groups.values())
    assert steps.held_bytes == 2 * size
    first = steps.take([1, 2], at(1))
    assert [m.prepared is None for m in first.members] == [False, True]
    assert steps.held_bytes == size
    read: list[str] = []

    def read_entry(found: Published) -> list[Group]:
        read.append(found.name)
        return list(groups.values())

    prepared = read_members(first, read_entry, options_of())
    assert read == ["entry-2"]
    assert [p.ids for p in prepared] == [groups[1].rollout_ids(), groups[2].rollout_ids()]
    steps.take([0, 3], at(2))
    assert steps.held_bytes == 0


def test_groups_of_one_entry_share_its_bytes():
    steps = maker()
    for number in range(2):
        steps.add(small(number), entry(7, 5000), Arrival(0, 0, 0))
    assert steps.held_bytes == 5000 + 4 * 2048
    steps.take([0], at(1))
    assert steps.held_bytes == 5000 + 2 * 2048


def test_an_order_that_cannot_be_read_any_more_is_undone():
    steps = maker()
    add(steps, small(0), small(1), small(2), small(3))
    first, second = steps.take([0, 1], at(1)), steps.take([2, 3], at(2))
    lost = [lost for order in (first, second) for lost in steps.give_back(order, "entry-1")]
    assert lost == [(1, 0)]
    assert not steps.knows(1, 0)
    assert steps.choose(at(1)) == [0, 2]
    assert steps.held_bytes == 0  # they are read again
    add(steps, small(1, issue=1))
    assert len(steps) == 4


def test_memory_does_not_grow_with_the_run():
    """Three thousand groups of many entries, some dropped, with more waiting than there is room for."""
    steps = StepMaker(options_of(drop_equal_groups=True, pack_tokens=4096), 8, "arrival", 2**20)
    tracemalloc.start()
    try:
        used = []
        step = 0
        for number in range(3_000):
            rewards = (1.0, 1.0) if number % 10 == 9 else (0.0, 1.0)
            output = np.full(2000, number)
            made = group(*(([turn([1, 2], output, ((step, None),))], r) for r in rewards), number=number)
            steps.add(made, entry(number // 4, 4 * 2 * 8 * 2000), Arrival(0, 0, 0))
            if len(steps) == 64:
                while len(steps) > 32:
                    step += 1
                    steps.take(steps.choose(at(step, 100)), at(step, 100))
                    steps.trained(step - 2)
                steps.take_discarded()
                used.append(tracemalloc.get_traced_memory()[0])
        assert steps.held_bytes <= 2**20
    finally:
        tracemalloc.stop()
    assert len(used) > 60
    assert max(used[30:]) < 1.1 * max(used[:30])
    assert max(used) < 2 * 2**20


def test_with_the_dispatcher_every_rollout_ends_once():
    """Both machines in a loop with slow groups, filters and late versions: nothing is lost, nothing too old is trained."""
    world = World(np.random.default_rng(0), steps=30)
    for _ in range(1000):
        world.lease(2)
        while world.held and world.rng.random() < 0.7:
            world.come(int(world.rng.integers(len(world.held))))
        world.order()
        if world.waiting and world.rng.random() < 0.5:
            world.train()
        world.commit()
        if world.dispatcher.version.step == 30:
            break
    assert world.dispatcher.version.step == 30
    world.check()
    assert world.trained_rollouts == 30 * 4
    assert {TOO_OLD, EQUAL, "failed"} <= set(world.dispatcher.discard_reasons) | {"failed"}


class World:
    """A dispatcher, a step maker and whatever the caller lets happen between them."""

    def __init__(self, rng, steps: int, **options) -> None:
        self.rng = rng
        limits = DispatcherSettings(
            weights={"d": 1.0}, steps=steps, groups_per_step=2, rollouts_per_group=2, max_lag=2, max_issues=2
        )
        self.max_lag = limits.max_lag
        self.dispatcher = Dispatcher(limits)
        self.dispatcher.problems({"d": 50})
        self.dispatcher.committed(Version(0, 0))
        self.options = options_of(**{"drop_equal_groups": True, **options})
        self.maker = StepMaker(self.options, 2, "arrival", 3 * 10_000)
        self.stored: dict[str, Group] = {}
        self.events, self.held, self.again = [], [], []
        self.waiting: list[Step] = []
        self.step = self.trained_rollouts = 0

    def lease(self, groups: int) -> None:
        leased = self.dispatcher.lease(0, groups, 0.0)
        self.events += leased.events
        self.held += [(lease, self.dispatcher.version.step) for lease in leased.leases]

    def come(self, which: int, fate: int | None = None) -> None:
        """A group fails, or comes whole or in part, once or twice, with equal rewards or not."""
        lease, version = self.held.pop(which)
        fate = int(self.rng.integers(10)) if fate is None else fate
        if fate == 0:
            self.events += self.dispatcher.failed(lease.group, lease.issue, "failed")
            fate = 9  # and its result comes all the same
        rewards = {1: (0.0, 0.0), 2: (0.0, 0.0), 3: (1.0,)}.get(fate, (0.0, 1.0))
        made = small(lease.group, version, rewards, issue=lease.issue, numbers=(1,) if fate == 3 else ())
        made = replace(made, epoch=lease.epoch, problem=lease.problem)
        name = f"{lease.group}-{lease.issue}"
        self.stored[name] = made
        for _ in range(2 if fate == 4 else 1):
            self.announce(name)
        if fate == 5:
            self.again.append(name)

    def announce(self, name: str) -> None:
        made = self.stored[name]
        accepted = self.dispatcher.result(made.group, made.issue)
        if not accepted or self.maker.knows(made.group, made.issue):
            return
        if made.numbers:  # the part that was given up
            rest = [replace(i, rollout=0) for i in made.rollout_ids()]
            self.events += self.dispatcher.discarded(rest, "given up")
        self.maker.add(made, Published(name, "actor-000", 1, 0, 1000, ""), Arrival(0, 0, 0))

    def order(self, spoiled: bool = False) -> None:
        """A step is built, at most two ahead of the trained one; where its first entry is spoiled, it is given up."""
        moment = at(self.step + len(self.waiting) + 1, self.max_lag)
        chosen = self.maker.choose(moment) if len(self.waiting) < 2 else None
        if chosen:
            order = self.maker.take(chosen, moment)
            if spoiled:
                for lost, issue in self.maker.give_back(order, order.members[0].entry.name):
                    self.events += self.dispatcher.failed(lost, issue, "unreadable")
                return
            groups = read_members(order, lambda e: [self.stored[e.name]], self.options)
            self.waiting.append(self.built(build_step(groups, moment, self.options, 1)))
        for rollout, reason in self.maker.take_discarded():
            self.events += self.dispatcher.discarded([rollout], reason)

    def built(self, step: Step) -> Step:
        for rollout, reason in step.discarded:
            self.events += self.dispatcher.discarded([rollout], reason)
        facts = step.facts
        total = 0.0
        for m in step.microbatches:
            assert m.loss_weights.dtype == m.old_logprobs.dtype == np.float32
            trained = m.loss_weights > 0
            assert (m.lags[trained] >= 0).all()
            assert (m.lags[~trained] == -1).all()
            if self.options.too_old != "train":
                assert m.lags.max() <= self.max_lag
            outputs = m.old_logprobs != 0
            np.testing.assert_allclose(m.old_logprobs[outputs], -m.tokens[outputs] / 10, rtol=1e-6)
            assert outputs[trained].all()
            total += m.loss_weights.sum(dtype=np.float64)
        assert facts.denominator == pytest.approx(total)
        assert facts.samples == len(step.trained) == len({i for m in step.microbatches for i in m.rollouts})
        return step

    def train(self) -> None:
        self.step += 1
        step = self.waiting.pop(0)
        events = self.dispatcher.trained(self.step, step.trained)
        assert {e.rollout for e in events} == set(step.trained)
        self.trained_rollouts += len(events)
        self.events += events
        self.maker.trained(self.step)
        for name in self.again:
            self.announce(name)

    def commit(self) -> None:
        if self.step > self.dispatcher.version.step:
            self.dispatcher.committed(Version(0, self.dispatcher.version.step + 1))

    def check(self) -> None:
        """Every id that was issued ends exactly once."""
        self.events += self.dispatcher.close("run ended")
        begun = Counter(e.rollout for e in self.events if e.kind == "issued")
        ended = Counter(e.rollout for e in self.events if e.kind != "issued")
        assert begun == ended
        assert set(begun.values()) <= {1}


HAPPENINGS = ["lease", "come", "come", "come", "order", "order", "train", "commit"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 9)), max_size=150),
    st.sampled_from(["drop", "mask", "train"]),
    st.sampled_from(["token", "sample"]),
)
def test_whatever_comes_in_whatever_order_every_rollout_ends_once(happenings, too_old, token_weight):
    world = World(np.random.default_rng(0), steps=1000, too_old=too_old, token_weight=token_weight)
    world.lease(6)
    for what, number in happenings:
        if what == "lease":
            world.lease(1 + number % 3)
        elif what == "come" and world.held:
            world.come(number % len(world.held), number)
        elif what == "order":
            world.order(spoiled=number == 0)
        elif what == "train" and world.waiting:
            world.train()
        elif what == "commit":
            world.commit()
    world.check()
