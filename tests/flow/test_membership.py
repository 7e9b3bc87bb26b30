"""The samplers' membership against a model of it that only remembers what happened, over random histories."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prl.flow.membership import Membership, MembershipError, MembershipSettings

SETTINGS = MembershipSettings(replicas=2, restarts=2, pause_s=1.0, start_s=60.0)


@dataclass
class Life:
    """What happened to one replica."""

    process: str = "starting"  # starting, ready, untrusted, none
    committed: bool = False  # since its process came, and nothing was wrong with it since
    wrong: int = 0  # digests in a row
    late: int = 0  # transfers in a row that others left since it held them up
    held_up: bool = False  # others, since it committed
    starts: int = 1
    given_up: bool = False  # others could not give it their weights
    deaths: list[float] = field(default_factory=list)
    due_s: float | None = None


class Histories(RuleBasedStateMachine):
    replica = st.integers(0, 3)

    @initialize(replicas=st.integers(1, 4), restarts=st.integers(0, 3))
    def begin(self, replicas, restarts):
        self.options = MembershipSettings(replicas=replicas, restarts=restarts, pause_s=2.0, start_s=50.0)
        self.membership = Membership(self.options)
        self.lives = [Life() for _ in range(replicas)]
        self.now = 0.0
        self.epoch, self.group = 0, set()
        self.empty_since = None

    def life(self, replica):
        number = replica % len(self.lives)
        return number, self.lives[number]

    def observe(self):
        """The epoch has risen if and only if somebody came or went."""
        group = {i for i, life in enumerate(self.lives) if life.process == "ready"}
        assert (self.membership.epoch > self.epoch) == (group != self.group)
        if group:
            self.empty_since = None
        elif self.group:
            self.empty_since = self.now
        self.epoch, self.group = self.membership.epoch, group

    @rule(seconds=st.floats(0.1, 40))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(replica=replica)
    def joins(self, replica):
        number, life = self.life(replica)
        wanted = life.process == "starting"
        assert self.membership.join(number) == wanted
        if wanted:
            life.process, life.committed, life.given_up = "ready", False, False
        self.observe()

    @rule(replicas=st.sets(replica))
    def commit(self, replicas):
        chosen = {self.life(replica)[0] for replica in replicas}
        chosen = sorted(number for number in chosen if self.lives[number].process == "ready")
        self.membership.admit(chosen)
        for number in chosen:
            life = self.lives[number]
            life.committed, life.wrong, life.given_up = True, 0, False
            life.late, life.held_up = life.late if life.held_up else 0, False
        self.observe()

    @rule(replica=replica, succeeds=st.booleans())
    def is_given_weights(self, replica, succeeds):
        number, life = self.life(replica)
        waits = life.process == "ready" and not life.committed
        if not succeeds:
            self.membership.not_seeded(number, "a torn file")
            life.given_up = life.given_up or waits
        elif waits:
            self.membership.seed(number)
            life.committed, life.wrong = True, 0
        else:
            with pytest.raises(MembershipError):
                self.membership.seed(number)
        self.observe()

    @rule(replica=replica)
    def mismatches(self, replica):
        number, life = self.life(replica)
        if life.process != "ready":
            with pytest.raises(MembershipError):
                self.membership.mismatch(number, "other weights", self.now)
            return
        self.membership.mismatch(number, "other weights", self.now)
        life.committed = False
        life.wrong += 1
        if life.wrong == 2:
            life.process = "untrusted"
        self.observe()

    @rule(replica=replica)
    def holds_up_a_transfer(self, replica):
        number, life = self.life(replica)
        if life.process != "ready":
            with pytest.raises(MembershipError):
                self.membership.held_up(number, "others waited", self.now)
            return
        life.late, life.held_up = life.late + 1, True
        assert self.membership.held_up(number, "others waited", self.now) == (life.late == 2)
        if life.late == 2:
            life.process, life.committed = "untrusted", False
        self.observe()

    @rule(replica=replica)
    def is_fenced(self, replica):
        number, life = self.life(replica)
        trusted = life.process == "ready" or (life.process == "starting" and life.starts > 1)
        assert self.membership.fence(number, "silent", f"sampler {number} is silent", self.now) == trusted
        if trusted:
            life.process, life.committed = "untrusted", False
        self.observe()

    @rule(replica=replica)
    def dies(self, replica):
        number, life = self.life(replica)
        if life.process == "none":
            with pytest.raises(MembershipError):
                self.membership.died(number, "again", self.now)
            return
        pause_s = self.membership.died(number, f"sampler {number} died", self.now)
        first = life.process == "starting" and life.starts == 1
        life.committed, life.wrong, life.late, life.held_up = False, 0, 0, False
        if first or life.starts > self.options.restarts:
            assert pause_s is None
            life.process = "none"
        else:
            assert pause_s == 2.0 * 2 ** (life.starts - 1)
            life.process, life.due_s = "starting", self.now + pause_s + 50.0
            life.starts += 1
        self.observe()

    @invariant()
    def everyone_is_where_the_history_says(self):
        lives = list(enumerate(self.lives))
        assert set(self.membership.group) == self.group
        assert set(self.membership.serving) == {i for i, life in lives if life.process == "ready" and life.committed}
        assert dict(self.membership.to_end) == {i: life.starts - 1 for i, life in lives if life.process == "untrusted"}
        waiting = {i for i, life in lives if life.process == "ready" and not life.committed}
        to_seed = {i for i in waiting if not self.lives[i].given_up} if self.membership.serving else set()
        assert set(self.membership.to_seed) == to_seed
        assert set(self.membership.to_send) == waiting - to_seed
        awaited = [(i, life) for i, life in lives if life.process == "starting" and life.starts > 1]
        assert set(self.membership.late(self.now)) == {i for i, life in awaited if self.now > life.due_s}
        assert self.membership.restarts == sum(life.starts - 1 for life in self.lives)

    @invariant()
    def the_run_ends_where_nobody_can_or_does_come_back(self):
        none_left = all(life.process == "none" for life in self.lives)
        waited = self.empty_since is not None and self.now - self.empty_since > 50.0
        assert (self.membership.over(self.now) is not None) == (none_left or waited)

    @precondition(lambda self: self.group)
    @rule()
    def breaks(self):
        self.membership.broke("a cable")
        assert self.membership.epoch > self.epoch
        self.epoch = self.membership.epoch


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


def ready(*replicas, options=SETTINGS):
    membership = Membership(options)
    for replica in replicas:
        assert membership.join(replica)
    return membership


def test_a_group_that_breaks_without_anyone_to_blame_is_built_anew_a_few_times():
    membership = ready(0, 1)
    assert [membership.broke("x"), membership.broke("x"), membership.broke("x")] == [True, True, False]
    membership = ready(0, 1)
    membership.broke("x")
    membership.broke("x")
    membership.admit([0, 1])  # a version came through: it counts from the beginning
    assert membership.broke("x")
    assert membership.broke("x")
    assert membership.fence(0, "late", "it did not answer", 1.0)  # now somebody is known to be at fault
    assert membership.broke("x")


def test_a_replica_whose_weights_were_wrong_once_is_sent_them_again_and_serves():
    membership = ready(0, 1)
    membership.admit([0, 1])
    epoch = membership.epoch
    membership.mismatch(1, "digest 7, not 8", 1.0)
    assert (membership.group, membership.serving) == ((0, 1), (0,))
    assert membership.epoch == epoch  # the group works
    membership.admit([0, 1])
    membership.mismatch(1, "digest 7, not 8", 2.0)  # not in a row
    assert membership.state(1) == "joined"
    assert membership.reasons == {"mismatch": 2}


@pytest.mark.parametrize("again", ["the same version", "the next one"])
def test_a_replica_that_holds_up_a_transfer_again_and_again_has_to_end(again):
    membership = ready(0, 1)
    membership.admit([0, 1])
    assert not membership.held_up(1, "others waited", 1.0)
    assert membership.serving == (0, 1)  # what it has is right
    if again == "the next one":
        membership.admit([0, 1])  # it was there in time when it was sent again
    assert membership.held_up(1, "others waited again", 2.0)
    assert (membership.to_end, membership.reasons, membership.last) == (((1, 0),), {"late": 1}, "others waited again")


def test_a_replica_that_held_up_a_transfer_once_is_trusted_after_another_version():
    membership = ready(0, 1)
    for now_s in (1.0, 2.0, 3.0):
        assert not membership.held_up(1, "others waited", now_s)
        membership.admit([0, 1])
        membership.admit([0, 1])


def test_the_cause_is_the_last_trouble():
    membership = ready(0, options=MembershipSettings(replicas=1, restarts=0, pause_s=1.0, start_s=60.0))
    membership.admit([0])
    assert membership.over(1000.0) is None
    membership.fence(0, "silent", "sampler 0 was silent for 30 s", 1000.0)
    assert membership.over(1000.0) is None  # its process lives
    assert membership.died(0, "sampler 0 was ended by SIGKILL", 1001.0) is None
    assert membership.over(1001.0) == "sampler 0 was silent for 30 s"


def test_pauses_do_not_grow_for_ever():
    membership = ready(0, options=MembershipSettings(replicas=1, restarts=2000, pause_s=1.0, start_s=60.0))
    pauses = []
    for _ in range(1500):
        pauses.append(membership.died(0, "it died", 0.0))
        membership.join(0)
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 64, 64]
    assert pauses[-1] == 64


def test_the_last_try_of_a_group_that_breaks_goes_through_files_until_somebody_comes_or_goes():
    membership = ready(0, 1)
    assert membership.broke("no route")
    assert not membership.by_files
    assert membership.broke("no route")
    assert membership.by_files
    membership.admit([0, 1])
    assert membership.by_files  # it works, and a group would not
    membership.died(1, "sampler 1 died", 1.0)
    assert not membership.by_files
    assert [membership.broke("no route") for _ in range(3)] == [True, True, False]
