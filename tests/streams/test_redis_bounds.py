"""The bound of streams over Redis, and a step that lacks more than it lets through."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from stream_data import make_group

from prl.actor.publisher import rollout_publisher
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.server import Bell, ControlServer
from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.versions import Version
from prl.orchestrator.rollouts import RolloutDesk
from prl.orchestrator.steps import StepDesk
from prl.streams.opening import open_reader
from prl.streams.options import RedisOptions, StreamsOptions

pytestmark = pytest.mark.redis
RNG = np.random.default_rng(0)


def large_group(number: int):
    """Of 0.6 MiB: two of them are more than an actor may have in the server."""
    group = make_group(number, RNG, rollouts=1)
    turn = group.rollouts[0].turns[0]._replace(prompt_ids=np.zeros(150_000, np.int32))
    return replace(group, group=number, issue=0, rollouts=(replace(group.rollouts[0], turns=(turn,)),))


@pytest.mark.deadline(60)
def test_what_a_step_lacks_goes_through_whatever_the_bound(redis_run):
    """Nothing is released before the step is complete: else an actor whose part of it is larger would wait for ever."""
    streams = StreamsOptions(backend="redis", redis=RedisOptions(start=True, max_mib=1, full_s=5), roll_groups=1)
    settings = DispatcherSettings(weights={"d": 1.0}, steps=9, groups_per_step=4, rollouts_per_group=1, max_lag=1)

    async def record(events):
        pass

    async def main():
        dispatcher, bell = Dispatcher(settings), Bell()
        dispatcher.problems({"d": 100})
        dispatcher.committed(Version(0, 0))
        announced = []
        rollouts = RolloutDesk(
            dispatcher, record, bell, on_evaluation=lambda e, body: None, on_announced=lambda a: announced.append(a["sequence"])
        )
        rollouts.open = True
        steps = StepDesk(
            dispatcher, rollouts, record, bell, trained=0, forks={}, lineage=0, waiting=(),
            on_trained=lambda *told: False, save_now=lambda step: False,
        )  # fmt: skip
        token = redis_run.token.read_text()
        handlers = {**rollouts.handlers(), **steps.handlers()}
        server = ControlServer(token, handlers, on_join=lambda member: None, on_fail=lambda *told: None)
        url = await server.start("127.0.0.1")
        control = ControlOptions()
        reader = open_reader(redis_run, "run", 1, streams)
        async with ControlClient(url, token, "actor", 0, control) as client, asyncio.timeout(60):
            publisher = rollout_publisher(redis_run, "run", 1, client, streams, control)

            async def hear():
                wanted = None
                while True:
                    await publisher.gathered()
                    answer = await client.call("wanted", {"known": wanted}, deadline_s=60, reason="test")
                    wanted = answer["groups"]
                    publisher.want(wanted)

            hearing, running = asyncio.create_task(hear()), asyncio.create_task(publisher.run())
            leases = (await client.call("lease", {"groups": 8}, deadline_s=60, reason="test"))["leases"]
            assert [lease["group"] for lease in leases] == list(range(8))
            for number in range(8):
                await publisher.put(large_group(number))
            assert await bell.until(lambda: len(announced) >= 4, 30)
            await asyncio.sleep(0.5)
            assert len(announced) <= 5  # the step is complete; one may be on its way while that is heard
            assert not hearing.done()
            assert not running.done()
            before = len(announced)
            reader.release({"actor-000": announced[-1]})
            assert await bell.until(lambda: len(announced) > before, 30)
            hearing.cancel()
            publisher.want(1)
            publisher.close()
            await running
        assert announced == list(range(8))
        await server.close()

    asyncio.run(main())
