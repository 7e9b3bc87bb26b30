"""An orchestrator of two nodes with an actor, a verifier, a preprocessor and a trainer rank each, over its real control plane;
no process of a run is started."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from prl.config.schema import Config
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.token import create_token
from prl.domains.options import DomainOptions
from prl.flow.versions import Version
from prl.orchestrator.binding import Plan
from prl.orchestrator.children import ChildPlan
from prl.orchestrator.main import Orchestrator
from prl.orchestrator.options import RunOptions
from prl.orchestrator.resume import find_start
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import ledger_events, read_ledger

FACTS = {"problems": {"digits": 50}, "evaluation": {"digits": 5}}
ROLES = ("actor", "verifier", "preprocess", "trainer")
NODES = tuple({"name": f"n{k + 1}", "address": "127.0.0.1", "component": k} for k in (0, 1))
CHILDREN = tuple(ChildPlan(role, index, index, (), {}) for role in ROLES for index in (0, 1))


class Rig:
    """Its rollouts may be handed out from the start."""

    def __init__(self, folder, steps=2, order="arrival", **options):
        self.run = RunFolder(folder)
        self.run.create()
        self.run.attempt(1).mkdir()
        config = Config(
            run=RunOptions(
                name="r",
                id="1",
                folder=str(self.run),
                steps=steps,
                groups_per_step=2,
                rollouts_per_group=2,
                max_lag=1,
                order=order,
            ),
            domains=(DomainOptions(name="digits"),),
        )
        self.config = replace(config, control=ControlOptions(**{"heartbeat_s": 0.1, **options}))

    async def __aenter__(self):
        self.token = create_token(self.run.token)
        start = find_start(self.run, self.config)
        self.orchestrator = Orchestrator(self.run, self.config, Plan(1, NODES, CHILDREN, 1), start, self.token)
        self.causes = self.orchestrator._causes.found
        self.url = await self.orchestrator.serve("127.0.0.1")
        self.stack = AsyncExitStack()
        self.agents = [await self.client("agent", node) for node in (0, 1)]
        self.clients = {}
        for child in CHILDREN:
            await self.come(child.name, 0)
        start.dispatcher.problems(FACTS["problems"], FACTS["evaluation"])
        start.dispatcher.committed(Version(0, 0))
        self.orchestrator._phases.running = self.orchestrator._work.rollouts.open = True
        return self

    async def __aexit__(self, *_):
        await self.stack.aclose()
        await self.orchestrator.close()

    async def client(self, role, index, start=0):
        client = ControlClient(self.url, self.token, role, index, self.config.control, start=start)
        return await self.stack.enter_async_context(client)

    async def come(self, name, start, facts=FACTS):
        role, index = name.split()
        self.clients[name] = client = await self.client(role, int(index), start)
        await client.join({**facts, "url": f"http://{name[-1]}:{start}"})
        return client

    async def dies(self, name, start=0, words="was ended by SIGKILL", code=-9):
        """The pause until its restart. Its heartbeats end with it."""
        self.clients[name]._heartbeat.cancel()
        body = {"child": name, "number": start, "code": code, "words": f"{name} {words}", "log": "its.log", "log_end": ""}
        answer = await self.agents[int(name[-1])].call("child_ended", body, deadline_s=5, reason="test")
        return answer.get("restart_after_s")

    def ask(self, name, call, body):
        client = self.clients[name] if name in self.clients else self.agents[int(name[-1])]
        return asyncio.create_task(client.call(call, body, deadline_s=10, reason="test"))

    async def lease(self, name, groups):
        answer = await self.ask(name, "lease", {"groups": groups})
        return [(lease["group"], lease["issue"]) for lease in answer["leases"]]

    def ledger(self):
        return list(ledger_events(read_ledger(self.run.ledgers)))


def run(folder, scenario, **options):
    async def main():
        async with Rig(folder, **options) as rig:
            await scenario(rig)

    asyncio.run(asyncio.wait_for(main(), 60))
