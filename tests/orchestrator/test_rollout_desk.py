"""What the orchestrator tells actors and the preprocessor, over the real handlers."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from prl.control.server import Bell, Member
from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.events import LedgerEvent, to_discard_rows, to_rows
from prl.flow.ids import Lease, RolloutId
from prl.flow.versions import Version
from prl.orchestrator import rollouts, steps
from prl.orchestrator.rollouts import LedgerDesk, RolloutDesk
from prl.orchestrator.steps import StepDesk, StepEntry


@dataclass
class Desks:
    """A run's two desks, without processes; four groups a step."""

    clock: Callable[[], float] = time.monotonic
    steps_at_once: int = 1
    mode: str = "pipeline"
    steps_per_generation: int = 4
    ledger: list[LedgerEvent] = field(default_factory=list)

    def __post_init__(self):
        settings = DispatcherSettings(
            weights={"d": 1.0}, steps=9, groups_per_step=4, rollouts_per_group=2, max_lag=2, group_deadline_s=1000.0,
            mode=self.mode, steps_per_generation=self.steps_per_generation,
        )  # fmt: skip
        self.dispatcher = Dispatcher(settings)
        self.dispatcher.problems({"d": 100})
        self.dispatcher.committed(Version(0, 0))
        self.bell = Bell()
        self.rollouts = RolloutDesk(
            self.dispatcher, self.record, self.bell,
            on_evaluation=lambda evaluation, body: None, clock=self.clock,
        )  # fmt: skip
        self.rollouts.open = True
        self.steps = StepDesk(
            self.dispatcher, self.rollouts, self.record, self.bell, trained=0, forks={}, lineage=0, waiting=(),
            on_trained=lambda step, train, data: False, save_now=lambda step: False, steps_at_once=self.steps_at_once
        )  # fmt: skip
        self.sequence = 0

    async def record(self, events):
        self.ledger += events

    async def call(self, name, body, actor=0):
        handlers = {**self.rollouts.handlers(), **self.steps.handlers()}
        return await handlers[name](Member("actor", actor), body)

    async def lease(self, groups, actor=0):
        answer = await self.call("lease", {"groups": groups}, actor)
        return [Lease(**lease) for lease in answer["leases"]]

    async def wanted(self, known, actor=0):
        return (await self.call("wanted", {"known": known}, actor))["groups"]

    async def announce(self, *leases):
        self.sequence += 1
        groups = [{"group": lease.group, "issue": lease.issue, "rollouts": 2} for lease in leases]
        body = {"path": f"f{self.sequence}", "bytes": 100, "checksum": "", "writer": "w", "sequence": self.sequence}
        return await self.call("rollouts", {**body, "groups": groups})

    async def read(self, after):
        answer = await self.call("next_rollouts", {"after": after})
        return [announcement["path"] for announcement in answer["announcements"]], answer["cursor"]

    async def step(self, step, *leases, discarded=(), metrics=None):
        trained = to_rows([i for lease in leases for i in lease.rollout_ids()])
        body = {"step": step, "path": "", "bytes": 1, "checksum": "", "metrics": metrics or {}}
        await self.call("step_file", {**body, "trained": trained, "discarded": to_discard_rows(discarded)})


@pytest.fixture(autouse=True)
def answers_come_when_there_is_news(monkeypatch):
    """No call is answered because it has waited for long enough."""
    for module in (rollouts, steps):
        monkeypatch.setattr(module, "LONG_POLL_S", 1000.0)


def play(scenario) -> None:
    async def limited():
        async with asyncio.timeout(20):
            await scenario

    asyncio.run(limited())


def test_announcements_are_forgotten_and_cursors_stay_valid():
    async def scenario():
        desks = Desks()
        leases = await desks.lease(6)
        for lease in leases:
            await desks.announce(lease)
        assert await desks.read(0) == ([f"f{k}" for k in range(1, 7)], 6)
        await desks.step(1, *leases[:4], discarded=[(i, "filtered") for i in leases[4].rollout_ids()])
        await desks.call("trained", {"step": 1, "metrics": {}, "data": {}})
        assert await desks.read(0) == (["f6"], 6)
        (more,) = await desks.lease(1)
        await desks.announce(more, leases[0])
        assert await desks.read(6) == (["f7"], 7)
        assert await desks.read(2) == (["f6", "f7"], 7)
        assert desks.rollouts.cursors() == {"w": 7}

    play(scenario())


def test_a_trained_step_has_the_figures_of_its_file_whoever_made_it():
    """An earlier attempt's file, which nobody announces, and one of this attempt."""

    async def scenario():
        desks, told = Desks(), []
        earlier = StepEntry({"step": 1, "path": "f", "bytes": 1, "checksum": ""}, ())
        desks.steps = StepDesk(
            desks.dispatcher, desks.rollouts, desks.record, desks.bell, trained=0, forks={}, lineage=0, waiting=(earlier,),
            on_trained=lambda step, train, data: told.append((step, train, data)), save_now=lambda step: False,
        )  # fmt: skip
        leases = await desks.lease(4)
        await desks.announce(*leases)
        await desks.step(2, *leases, metrics={"ready_s": 0.5})
        await desks.call("trained", {"step": 1, "metrics": {"loss": 3.0}, "data": {"rollouts": 16.0}})
        await desks.call("trained", {"step": 2, "metrics": {"loss": 2.0}, "data": {"rollouts": 8.0}})
        assert told == [(1, {"loss": 3.0}, {"rollouts": 16.0}), (2, {"loss": 2.0}, {"rollouts": 8.0, "ready_s": 0.5})]

    play(scenario())


def test_actors_hear_at_how_many_groups_a_step_wants_them():
    """Half their share of what it lacks, and nothing while it lacks none."""

    async def scenario():
        desks = Desks()
        assert await desks.wanted(None) == 2  # one actor, four groups a step
        assert await desks.wanted(2, actor=1) == 1  # two actors
        leases = await desks.lease(12)
        waiting = [asyncio.create_task(desks.wanted(1, actor)) for actor in (0, 1)]
        for lease in leases[:3]:
            await desks.announce(lease)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        await desks.announce(leases[3])  # step 1 is complete
        assert await asyncio.gather(*waiting) == [None] * 2
        again = asyncio.create_task(desks.wanted(None))
        await desks.announce(leases[4])
        assert not again.done()  # until there is its file nobody waits for step 2
        await desks.step(1, *leases[:4])
        assert await again == 1
        await desks.announce(*leases[5:8])
        assert await desks.wanted(1) is None
        await desks.call("trained", {"step": 1, "metrics": {}, "data": {}})
        await desks.step(2, *leases[4:8])
        assert await desks.wanted(None) == 1
        desks.steps.finishing = True
        desks.bell.ring()
        assert await desks.wanted(1) is None

    play(scenario())


@pytest.mark.parametrize(("at_once", "files"), [(1, 2), (2, 3)])
def test_nothing_is_wanted_while_the_trainer_has_files_enough(at_once, files):
    """One step file more than are in the making at once: until a step is trained nobody makes another."""

    async def scenario():
        desks = Desks(steps_at_once=at_once)
        leases = await desks.lease(12)
        assert await desks.wanted(None) == 2
        for step in range(1, files + 1):
            assert await desks.wanted(None) == 2
            announced = leases[4 * step - 4 : 4 * step]
            await desks.announce(*announced)
            await desks.step(step, *announced)
        assert await desks.wanted(2) is None
        hearing = asyncio.create_task(desks.wanted(None))
        desks.dispatcher.committed(Version(0, 1))  # four groups more may be handed out
        desks.bell.ring()
        await asyncio.sleep(0.05)
        assert not hearing.done()
        await desks.call("trained", {"step": 1, "metrics": {}, "data": {}})
        assert await hearing == 2

    play(scenario())


def test_a_generation_is_wanted_to_its_end_whatever_files_there_are():
    async def scenario():
        desks = Desks(mode="conventional", steps_per_generation=3)
        leases = await desks.lease(12)
        for step in (1, 2):
            await desks.announce(*leases[4 * step - 4 : 4 * step])
            await desks.step(step, *leases[4 * step - 4 : 4 * step])
        assert await desks.wanted(None) == 2  # four are out, and the first step begins when they have come

    play(scenario())


def test_groups_of_trained_steps_are_not_taken_for_some_that_wait():
    async def scenario():
        desks = Desks()
        leases = await desks.lease(12)
        await desks.announce(*leases[:4])
        await desks.step(1, *leases[:4])
        await desks.call("trained", {"step": 1, "metrics": {}, "data": {}})
        await desks.announce(*leases[4:7])
        assert await desks.wanted(None) == 1  # step 2 lacks one of its four
        # After a rollback step 1 is trained again, from its file.
        entry = StepEntry({"step": 1}, [i for lease in leases[:4] for i in lease.rollout_ids()])
        desks.dispatcher.went_back(Version(1, 0), "ended", keep=[lease.group for lease in leases[4:7]])
        desks.dispatcher.committed(Version(1, 0))
        desks.steps = StepDesk(
            desks.dispatcher, desks.rollouts, desks.record, desks.bell, trained=0, forks={1: 0}, lineage=1, waiting=(entry,),
            on_trained=lambda step, train, data: False, save_now=lambda step: False
        )  # fmt: skip
        assert await desks.wanted(None) == 1

    play(scenario())


def test_a_trainer_that_is_still_sending_its_version_is_not_asked_for_it():
    async def scenario():
        desks = Desks()
        desks.steps = StepDesk(
            desks.dispatcher, desks.rollouts, desks.record, desks.bell, trained=0, forks={}, lineage=0, waiting=(),
            on_trained=lambda step, train, data: False, save_now=lambda step: False, wants_version=lambda: True
        )  # fmt: skip
        assert (await desks.call("next_step", {"step": 1, "sends": False}))["send"]
        asked = asyncio.create_task(desks.call("next_step", {"step": 1, "sends": True}))
        desks.bell.ring()
        await asyncio.sleep(0.05)
        assert not asked.done()
        leases = await desks.lease(4)
        await desks.announce(*leases)
        await desks.step(1, *leases)
        assert ((await asked)["file"] is not None, (await asked)["send"]) == (True, False)

    play(scenario())


def test_a_dropped_group_is_wanted_anew():
    async def scenario():
        desks = Desks()
        leases = await desks.lease(12)
        assert await desks.wanted(None) == 2
        await desks.announce(*leases[:4])
        assert await desks.wanted(2) is None
        hearing = asyncio.create_task(desks.wanted(None))
        await desks.call("discard", {"discarded": to_discard_rows([(i, "filtered") for i in leases[1].rollout_ids()])})
        assert await hearing == 1

    play(scenario())


def test_a_group_that_is_out_for_too_long_goes_to_another_actor():
    async def scenario():
        now_s = [0.0]
        desks = Desks(clock=lambda: now_s[0])
        leases = await desks.lease(1)
        now_s[0] = 1000.0
        await desks.rollouts.expire()
        assert not any(e.kind == "issued_again" for e in desks.ledger)
        now_s[0] = 1001.0
        await desks.rollouts.expire()
        again, *_ = await desks.lease(12, actor=1)
        assert (again.group, again.issue) == (leases[0].group, 1)
        assert await desks.announce(leases[0]) == {"late": [leases[0].group]}
        assert await desks.announce(again) == {"late": []}
        assert [e.kind for e in desks.ledger if e.rollout.group == 0] == ["issued"] * 2 + ["issued_again"] * 2 + ["issued"] * 2

    play(scenario())


def test_rollouts_that_an_actor_gave_up_end_with_their_reason():
    async def scenario():
        desks = Desks()
        (lease,) = await desks.lease(1)
        missing, kept = lease.rollout_ids()
        await desks.call("discard", {"discarded": to_discard_rows([(missing, "rollout_deadline")])})
        assert await desks.announce(lease) == {"late": []}
        assert desks.dispatcher.discard_reasons == {"rollout_deadline": 1}
        assert desks.dispatcher.ended([missing, kept]) == [missing]

    play(scenario())


def test_what_was_recorded_before_is_durable_once_the_ledger_is_settled():
    """Also where the record has not come to the storage yet."""
    durable = []

    async def scenario():
        desk = LedgerDesk(durable.extend)
        event = LedgerEvent(RolloutId(0, "d/1", 0, 0, 0), "issued", Version(0, 0), -1, "")
        recording = asyncio.create_task(desk.record([event]))
        await asyncio.sleep(0)
        await desk.settled()
        assert durable == [event]
        await recording

    asyncio.run(scenario())
