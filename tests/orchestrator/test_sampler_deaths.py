"""What the orchestrator makes of samplers that die, over its real control plane; no process of a run is started."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from prl.config.schema import Config
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.token import create_token
from prl.domains.options import DomainOptions
from prl.orchestrator.binding import Plan
from prl.orchestrator.children import ChildPlan
from prl.orchestrator.main import Orchestrator
from prl.orchestrator.options import RunOptions
from prl.orchestrator.resume import find_start
from prl.runfolder.paths import RunFolder
from prl.sampler.options import SampleOptions


class Rig:
    """An orchestrator of two samplers, with the agent of their node."""

    def __init__(self, folder, replicas, start_s=300.0, **options):
        self.run = RunFolder(folder)
        self.run.create()
        self.run.attempt(1).mkdir()
        self.replicas = replicas
        config = Config(run=RunOptions(folder=str(self.run)), domains=(DomainOptions(name="digits"),))
        self.config = replace(config, sample=SampleOptions(**options), control=ControlOptions(heartbeat_s=0.1, start_s=start_s))

    async def __aenter__(self):
        token = create_token(self.run.token)
        children = tuple(ChildPlan("sampler", index, 0, (), {}, serves=True) for index in range(self.replicas))
        start = find_start(self.run, self.config)
        self.orchestrator = Orchestrator(self.run, self.config, Plan(1, (), children, 1), start, token)
        self.causes = self.orchestrator._causes.found
        url = await self.orchestrator.serve("127.0.0.1")
        self.stack = AsyncExitStack()

        async def client(role, index):
            return await self.stack.enter_async_context(ControlClient(url, token, role, index, self.config.control))

        self.agent = await client("agent", 0)
        self.samplers = [await client("sampler", index) for index in range(self.replicas)]
        return self

    async def __aexit__(self, *_):
        await self.stack.aclose()
        await self.orchestrator.close()

    async def dies(self, index, code=-9):
        words = f"sampler {index} was ended by SIGKILL" if code < 0 else f"sampler {index} ended with code {code}"
        body = {
            "child": f"sampler {index}",
            "number": 0,
            "code": code,
            "words": words,
            "log": "its.log",
            "tail": "",
            "log_end": "",
        }
        answer = await self.agent.call("child_ended", body, deadline_s=5, reason="test")
        return answer.get("restart_after_s")


def run(folder, scenario, replicas=2, **options):
    async def main():
        async with Rig(folder, replicas, **options) as rig:
            await scenario(rig)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_only_sampler_ends_the_run_where_it_is_not_started_again(tmp_path):
    async def scenario(rig):
        await rig.samplers[0].join({"url": "http://127.0.0.1:9", "workers": 1})
        assert await rig.dies(0) is None
        (cause,) = rig.causes
        assert cause.words.startswith("sampler 0 was ended by SIGKILL")
        assert cause.role == "sampler"

    run(tmp_path / "run", scenario, replicas=1, restarts=0)


def test_one_of_two_samplers_does_not_end_the_run_and_both_do(tmp_path):
    async def scenario(rig):
        for sampler in rig.samplers:
            await sampler.join({"url": "http://127.0.0.1:9", "workers": 1})
        assert await rig.dies(1) == 2.0
        assert await rig.dies(1) is None
        assert rig.causes == []
        assert await rig.dies(0) == 2.0
        assert rig.causes == []  # it may come back
        assert await rig.dies(0) is None
        assert rig.causes[0].words.startswith("sampler 0 was ended by SIGKILL")

    run(tmp_path / "run", scenario, restarts=1, restart_pause_s=2.0)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_run_that_leaves_its_nodes_needs_no_sampler_any_more(tmp_path, leaves):
    async def scenario(rig):
        await rig.samplers[0].join({"url": "http://127.0.0.1:9", "workers": 1})
        rig.orchestrator._work.rollouts.open = True
        assert await rig.dies(0) == 0.1
        if leaves:
            rig.orchestrator.shutdown.leave("warned by SIGUSR1", "time limit")
        watching = asyncio.create_task(rig.orchestrator._processes.watch_silence())
        await asyncio.sleep(1.0)  # control.start_s is over: nobody has come back
        assert bool(rig.causes) != leaves
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    run(tmp_path / "run", scenario, replicas=1, restarts=3, restart_pause_s=0.1, start_s=0.3)


def test_a_sampler_that_never_came_is_the_configurations_fault(tmp_path):
    async def scenario(rig):
        await rig.samplers[0].join({"url": "http://127.0.0.1:9", "workers": 1})
        assert await rig.dies(1, code=1) is None
        assert rig.causes[0].words.startswith("sampler 1 ended with code 1")

    run(tmp_path / "run", scenario, restarts=3)


@pytest.mark.parametrize("said", [True, False])
def test_a_sampler_that_says_why_it_ends_is_quoted(tmp_path, said):
    async def scenario(rig):
        await rig.samplers[0].join({"url": "http://127.0.0.1:9", "workers": 1})
        if said:
            body = {"error": "vLLM's engine died", "traceback": ""}
            await rig.samplers[0].call("fail", body, deadline_s=5, reason="test")
        assert await rig.dies(0, code=1) is None
        (cause,) = rig.causes
        assert ("vLLM's engine died; then sampler 0 ended with code 1" in cause.words) == said

    run(tmp_path / "run", scenario, replicas=1, restarts=0)
