"""Actors, the orchestrator's desks and the dispatcher, with files that are never rolled by time: no step waits for them."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from stand_in import TOKEN, SamplerStandIn, choice, reply

from prl.actor.loop import Actor, Parts
from prl.actor.options import ActorOptions
from prl.actor.publisher import rollout_publisher
from prl.actor.sampler_client import SamplerClient
from prl.actor.tasks import load_tasks
from prl.actor.tokenizer import ModelTokenizer
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.server import Bell, ControlServer
from prl.domains.options import DomainOptions
from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.events import to_rows
from prl.flow.groups import GroupQueue
from prl.flow.versions import Version
from prl.metrics.events import MetricsWriter
from prl.orchestrator.rollouts import RolloutDesk
from prl.orchestrator.steps import StepDesk
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.streams.options import StreamsOptions
from prl.streams.reader import read_rollouts
from prl.trainer.options import ModelOptions
from prl.verifier.client import VerifierClient

NEVER = StreamsOptions(roll_s=1000, roll_groups=1000)
GROUPS = 8  # a step
PROBLEMS = 3 * GROUPS + 3


class World:
    """An orchestrator without processes, and one client that takes rollouts in and trains each step at once."""

    def __init__(self, folder, settings: DispatcherSettings) -> None:
        self.run = RunFolder(folder / "run")
        self.run.create()
        write_model_folder(ModelOptions(init="random", architecture="qwen2"), self.run.model)
        self.settings = settings
        self.dispatcher = Dispatcher(settings)
        self.dispatcher.problems({"digits": PROBLEMS})
        self.dispatcher.committed(Version(0, 0))
        self.bell = Bell()
        self.sampler_url = ""
        self.rollouts = RolloutDesk(self.dispatcher, self._record, self.bell, on_evaluation=lambda evaluation, body: None)
        self.rollouts.open = True
        self.steps = StepDesk(
            self.dispatcher, self.rollouts, self._record, self.bell, trained=0, forks={}, lineage=0, waiting=(),
            on_trained=lambda step, train, data: False, save_now=lambda step: False,
        )  # fmt: skip
        self.handlers = {**self.rollouts.handlers(), **self.steps.handlers()}
        self.handlers |= {"samplers": self._samplers, "verifier": self._verifier}
        self.files = 0

    async def _record(self, events) -> None:
        pass

    async def _verifier(self, member, body):
        await asyncio.Event().wait()

    async def _samplers(self, member, body):
        if body["known"]:
            await asyncio.Event().wait()
        return {"samplers": [[0, self.sampler_url]]}

    async def train(self, client: ControlClient) -> None:
        """All steps, or all that the problems are enough for."""
        queue, rows, cursor, step = GroupQueue(self.settings.order), {}, 0, 1

        async def call(name, **body):
            return await client.call(name, body, deadline_s=20, reason="test")

        while step <= self.settings.steps and not self.dispatcher.used_up:
            answer = await call("next_rollouts", after=cursor)
            cursor = answer["cursor"]
            for a in answer["announcements"]:
                self.files += 1
                for group in read_rollouts(self.run.path / a["path"], a["bytes"], a["checksum"]):
                    rows[group.group] = to_rows(group.rollout_ids())
                    queue.add(group.group)
            while len(ready := queue.in_order(self.dispatcher.awaited_from)[:GROUPS]) == GROUPS:
                taken = [row for group in ready for row in rows[group]]
                for group in ready:
                    queue.remove(group)
                await call("step_file", step=step, path="", bytes=1, checksum="", trained=taken, discarded=[], metrics={})
                while (await call("next_step", step=step))["file"] is None:
                    pass
                await call("trained", step=step, metrics={}, data={})
                conventional = self.settings.mode == "conventional"
                if not conventional or step % self.settings.steps_per_generation == 0:
                    self.dispatcher.committed(Version(0, step))
                    self.bell.ring()
                step += 1
        self.rollouts.ended = True
        self.bell.ring()


async def run_world(world: World, actors: int) -> None:
    server = ControlServer(TOKEN, world.handlers, on_join=lambda member: None, on_fail=lambda *_: None)
    url = await server.start("127.0.0.1")
    tasks = load_tasks([DomainOptions(name="digits")], 1, ModelTokenizer(world.run.model), None)
    answer = choice([1, 2, 3, 4, 11])
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        stack.push_async_callback(server.close)
        enter = stack.enter_async_context
        world.sampler_url = (await enter(SamplerStandIn(lambda body: reply([answer] * body["sampling_params"]["n"])))).url
        working = [world.train(await enter(ControlClient(url, TOKEN, "trainer", 0, ControlOptions())))]
        for index in range(actors):
            metrics = stack.enter_context(MetricsWriter(world.run.metrics, "actor", index, 1))
            control = await enter(ControlClient(url, TOKEN, "actor", index, ControlOptions()))
            samplers = await enter(SamplerClient(TOKEN, request_s=5, max_model_len=64, max_answers=512, vocabulary=16))
            verifier = await enter(VerifierClient(TOKEN, deadline_s=5))
            publisher = rollout_publisher(world.run, "a run", 1, control, NEVER, ControlOptions())
            parts = Parts(tasks, control, samplers, verifier, publisher, metrics)
            working.append(Actor(parts, ActorOptions(max_groups=3, lease_groups=2), call_s=20).run())
        await asyncio.gather(*working)


@pytest.mark.parametrize("actors", [1, 3, 9])
@pytest.mark.parametrize(("mode", "order"), [("pipeline", "arrival"), ("pipeline", "dispatch"), ("conventional", "arrival")])
def test_no_step_waits_for_files_to_be_rolled_by_time(tmp_path, mode, order, actors):
    settings = DispatcherSettings(
        weights={"digits": 1.0}, steps=6, groups_per_step=GROUPS, rollouts_per_group=2, mode=mode, order=order, max_lag=1,
        steps_per_generation=2,
    )  # fmt: skip
    world = World(tmp_path, settings)
    asyncio.run(run_world(world, actors))
    assert world.steps.trained == 6
    if actors == 1 and mode == "pipeline":
        # Of what is lacking half at a time: 4, 2, 1 and 1 groups; more where some end before the actor hears that none is.
        assert world.files <= 6 * 6


def test_nor_does_the_end_of_the_problems(tmp_path):
    settings = DispatcherSettings(
        weights={"digits": 1.0}, steps=100, groups_per_step=GROUPS, rollouts_per_group=2, epochs=1, max_lag=1
    )
    world = World(tmp_path, settings)
    asyncio.run(run_world(world, actors=2))
    assert world.steps.trained == 3
    assert world.dispatcher.used_up
    assert world.dispatcher.counts["issued"] == 2 * PROBLEMS
