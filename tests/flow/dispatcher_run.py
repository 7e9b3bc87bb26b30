"""A run around a dispatcher, without any process: actors, a preprocessor, a trainer and crashes do what a test says, and what
must always hold is looked at after every operation."""

import json
from collections import Counter
from dataclasses import dataclass

from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.events import LedgerEvent
from prl.flow.ids import Lease, RolloutId
from prl.flow.versions import Version, is_ancestor, lag

SIZES = {"a": 3, "b": 4, "c": 2}
ACTORS = 3
ROLLOUT_BYTES = 100
ENDS = ("trained", "discarded", "issued_again")


@dataclass
class Received:
    ids: list[RolloutId]
    version: Version  # that sampled it
    announced: bool = True  # in this attempt: of what was before, the dispatcher need not know the bytes


class Run:
    def __init__(self, settings: DispatcherSettings) -> None:
        self.settings = settings
        self.in_order = settings.order == "dispatch"
        self.dispatcher = Dispatcher(settings)
        self.dispatcher.problems(SIZES)
        self.dispatcher.committed(Version(0, 0))
        self.ledger: list[LedgerEvent] = []
        self.held: dict[int, tuple[int, Lease, Version, float]] = {}  # group -> actor, lease, version, time
        self.received: dict[int, Received] = {}  # in order of arrival
        self.files: dict[int, list[Received]] = {}  # durable step files
        self.over: list[Lease] = []  # that came to nothing
        self.step = 0
        self.forks: dict[int, int] = {}
        self.clock = 0.0
        self.checkpoint_now()

    @property
    def version(self) -> Version:
        assert self.dispatcher.version is not None
        return self.dispatcher.version

    @property
    def max_lag(self) -> int:
        return self.settings.max_lag if self.settings.mode == "pipeline" else self.settings.steps_per_generation - 1

    def do(self, operation: tuple[str, int]) -> None:
        name, value = operation
        getattr(self, name)(value)
        self.check()

    # Actors

    def lease(self, value: int) -> None:
        d, s = self.dispatcher, self.settings
        before, budget = d.in_flight, d.budget()
        waiting = sum(len(g.ids) for g in self.waiting_groups() if g.announced) * ROLLOUT_BYTES
        leased = d.lease(value % ACTORS, 1 + value % 5, self.clock)
        for lease in leased.leases:
            self.held[lease.group] = (value % ACTORS, lease, self.version, self.clock)
        self.ledger += leased.events
        new = d.in_flight - before
        assert new <= max(budget, 0)
        if s.mode == "pipeline" and s.max_waiting_bytes is not None and waiting >= s.max_waiting_bytes:
            assert d.in_flight <= max(before, s.groups_per_step)
        if leased.leases:
            allowed = s.max_lag + 1 if s.mode == "pipeline" else s.steps_per_generation
            ahead = max(max((e.step for e in self.ledger if e.kind == "trained"), default=0) - self.version.step, 0)
            working = len(self.held) + len(self.waiting_groups())
            assert working <= (min(allowed, s.steps - self.version.step) - ahead) * s.groups_per_step

    def result(self, value: int) -> None:
        """Whole or, now and then, without one of its rollouts."""
        group = self.pick(self.held, value)
        if group is None:
            return
        _, lease, version, _ = self.held.pop(group)
        ids = lease.rollout_ids()
        if value % 3 == 0 and len(ids) > 1:
            self.tell_twice(lambda: self.dispatcher.discarded([ids.pop(value % len(ids))], "rollout_deadline"), repeat=False)
        assert self.dispatcher.result(group, lease.issue, len(ids) * ROLLOUT_BYTES)
        self.unchanged(lambda: self.dispatcher.result(group, lease.issue, len(ids) * ROLLOUT_BYTES), True)
        assert self.dispatcher.waits(group, lease.issue)
        self.received[group] = Received(ids, version)

    def fail(self, value: int) -> None:
        group = self.pick(self.held, value)
        if group is not None:
            issue = self.end(group).issue
            self.tell_twice(lambda: self.dispatcher.failed(group, issue, "failed"))

    def unreadable(self, value: int) -> None:
        group = self.pick(self.received, value)
        if group is not None:
            issue = self.received.pop(group).ids[0].issue
            self.tell_twice(lambda: self.dispatcher.failed(group, issue, "rollout file unreadable"))

    def lose(self, value: int) -> None:
        for group in [g for g, (actor, *_) in self.held.items() if actor == value % ACTORS]:
            self.end(group)
        self.tell_twice(lambda: self.dispatcher.lost(value % ACTORS))

    def wait(self, value: int) -> None:
        self.clock += value
        deadline_s = self.settings.group_deadline_s
        if deadline_s is not None:
            for group in [g for g, (*_, since) in self.held.items() if since < self.clock - deadline_s]:
                self.end(group)
        self.tell_twice(lambda: self.dispatcher.overdue(self.clock))

    def late(self, value: int) -> None:
        if self.over:
            lease = self.over[value % len(self.over)]
            self.unchanged(lambda: self.dispatcher.result(lease.group, lease.issue, 1), False)
            self.unchanged(lambda: self.dispatcher.failed(lease.group, lease.issue, "late"), [])
            self.unchanged(lambda: self.dispatcher.discarded(lease.rollout_ids(), "late"), [])

    # The preprocessor

    def drop(self, value: int) -> None:
        """A filter: a group, or a rollout of it."""
        group = self.pick(self.received, value)
        if group is not None:
            entry = self.received[group]
            ids = entry.ids if value % 2 else entry.ids[:1]
            entry.ids = [i for i in entry.ids if i not in ids]
            if not entry.ids:
                del self.received[group]
            self.tell_twice(lambda: self.dispatcher.discarded(ids, "filtered"))

    def make(self, value: int) -> None:
        """A step file, at most one ahead of the trainer."""
        step = max([self.step, *self.files]) + 1
        for group, entry in list(self.received.items()):
            if lag(step, entry.version) > self.max_lag:
                assert not self.in_order  # then admission alone keeps the limit
                del self.received[group]
                self.tell_twice(lambda entry=entry: self.dispatcher.discarded(entry.ids, "too old"))
        ready = self.ready()
        if len(ready) >= self.settings.groups_per_step and step <= min(self.step + 2, self.settings.steps):
            self.files[step] = [self.received.pop(g) for g in ready[: self.settings.groups_per_step]]
            assert not self.dispatcher.ended(self.ids_of(step))

    # The trainer

    def train(self, value: int) -> None:
        s, step = self.settings, self.step + 1
        begins = s.mode == "conventional" and self.step % s.steps_per_generation == 0
        if step in self.files and (not begins or self.dispatcher.generation_sampled):
            self.step = step
            self.tell_twice(lambda: self.dispatcher.trained(step, self.ids_of(step)))

    def commit(self, value: int) -> None:
        s, step = self.settings, self.version.step + 1
        if s.mode == "conventional":  # the samplers get only versions that end a generation
            step = min((self.version.step // s.steps_per_generation + 1) * s.steps_per_generation, s.steps)
        if step <= self.step:
            self.dispatcher.committed(Version(self.version.lineage, step))

    # Crashes

    def checkpoint(self, value: int) -> None:
        self.checkpoint_now()

    def checkpoint_now(self) -> None:
        self.saved = (json.dumps(self.dispatcher.state()), self.step)

    def resume(self, value: int) -> None:
        """Everybody dies; a new attempt begins with the checkpoint, the ledger and the step files."""
        state = json.loads(self.saved[0])
        lineage = self.version.lineage + 1
        self.dispatcher = Dispatcher(self.settings, state)
        self.dispatcher.replay(self.ledger[state["events"] :])
        self.go_back(lineage)
        for entry in (entry for groups in self.files.values() for entry in groups):
            entry.announced = False
        self.dispatcher.problems(SIZES)
        self.dispatcher.committed(Version(lineage, self.step))

    def restart(self, value: int) -> None:
        """The trainers and the preprocessor die; they begin again with the checkpoint and the step files, and train what waits,
        or not, before the samplers have the checkpoint's version."""
        lineage = self.version.lineage + 1
        self.go_back(lineage)
        begins = Version(lineage, self.step)
        if value % 2:
            self.train(value)
        self.dispatcher.committed(begins)

    def go_back(self, lineage: int) -> None:
        self.forks[lineage] = self.step = self.saved[1]
        self.files = {step: groups for step, groups in self.files.items() if step > self.step}
        keep = {i.group for step in self.files for i in self.ids_of(step)}
        self.ledger += self.dispatcher.went_back(Version(lineage, self.step), "ended", keep)
        self.over += [lease for _, lease, *_ in self.held.values()]
        self.held, self.received = {}, {}

    # Work without mishaps

    def advance(self, value: int) -> None:
        """As much as leads to the next step, most of the time."""
        for actor in range(ACTORS):
            self.lease(actor + 3)
        while self.held:
            self.result(value)
        self.make(0)
        self.train(0)
        self.commit(0)

    def finish(self) -> None:
        """Ends with the last step, or with the problems: nobody waits for anybody."""
        for _ in range(40 * (self.settings.steps + 1)):
            if self.step == self.settings.steps or self.dispatcher.used_up:
                break
            self.advance(1)
            self.check()
        else:
            raise AssertionError(f"the run stands still at step {self.step}")
        self.ledger += self.dispatcher.close("run ended")
        begun = {e.rollout for e in self.ledger if e.kind == "issued"}
        assert self.ends().keys() == begun
        assert self.dispatcher.in_flight == 0

    # What must hold

    def check(self) -> None:
        begun = Counter(e.rollout for e in self.ledger if e.kind == "issued")
        ended = self.ends()
        assert max(begun.values(), default=1) == 1
        assert max(ended.values(), default=1) == 1
        assert ended.keys() <= begun.keys()
        alive = {i for entry in self.waiting_groups() for i in entry.ids}
        issued = {i for _, lease, *_ in self.held.values() for i in lease.rollout_ids()}
        again = {i for step in self.files if step > self.step for i in self.ids_of(step)}  # trained in an abandoned lineage
        assert begun.keys() - ended.keys() == issued | alive | (again - ended.keys())
        assert self.dispatcher.counts == {k: sum(e.kind == k for e in self.ledger) for k in ("issued", *ENDS)}
        reasons = Counter(e.reason for e in self.ledger if e.kind == "discarded")
        assert self.dispatcher.discard_reasons == reasons
        self.check_lacking()
        if self.settings.epochs is not None:
            first = Counter((e.rollout.problem, e.rollout.rollout) for e in self.ledger if self.is_first(e))
            assert max(first.values(), default=0) <= self.settings.epochs

    def check_lacking(self) -> None:
        """A step lacks groups as long as it cannot be made and something may still come."""
        s, d = self.settings, self.dispatcher
        ended = set(d.ended(i for step in self.files for i in self.ids_of(step)))
        in_files = {i.group for step in self.files for i in self.ids_of(step) if i not in ended}
        lacking, out = d.lacking(in_files), d.in_flight - len(self.received) - len(in_files) + max(d.budget(), 0)
        if s.mode == "conventional":
            assert lacking == out
        elif len(self.ready()) >= s.groups_per_step:
            assert lacking == 0
        elif self.in_order:
            assert min(1, out) <= lacking <= min(s.groups_per_step, out)
        else:
            assert lacking == min(s.groups_per_step - len(self.received), out)

    def ready(self) -> list[int]:
        """The groups that may be taken for a step, the first ones first."""
        below = self.dispatcher.awaited_from
        return sorted(g for g in self.received if g < below) if self.in_order else list(self.received)

    def is_first(self, event: LedgerEvent) -> bool:
        return event.kind == "issued" and event.rollout.issue == 0

    def ends(self) -> "Counter[RolloutId]":
        """Ends of each id; steps trained in a past that was given up are none."""
        lineage = self.version.lineage
        return Counter(
            e.rollout
            for e in self.ledger
            if e.kind in ENDS and (e.kind != "trained" or is_ancestor(e.version, lineage, self.forks))
        )

    # Within

    def waiting_groups(self) -> list[Received]:
        """Received groups that are not trained, in step files or not."""
        ended = {e.rollout for e in self.ledger if e.kind == "trained"}
        in_files = [g for step, groups in self.files.items() if step > self.step for g in groups if g.ids[0] not in ended]
        return [*self.received.values(), *in_files]

    def ids_of(self, step: int) -> list[RolloutId]:
        return [i for entry in self.files[step] for i in entry.ids]

    def pick(self, groups: dict, value: int) -> int | None:
        return sorted(groups)[value % len(groups)] if groups else None

    def end(self, group: int) -> Lease:
        lease = self.held.pop(group)[1]
        self.over.append(lease)
        return lease

    def tell_twice(self, call, *, repeat: bool = True) -> None:
        """The events of a call, which has none when it is repeated."""
        self.ledger += call()
        if repeat:
            self.unchanged(call, [])

    def unchanged(self, call, expected) -> None:
        before = self.dispatcher.state()
        assert call() == expected
        assert self.dispatcher.state() == before
