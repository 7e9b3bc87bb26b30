"""What the orchestrator makes of actors, verifiers and preprocessors that die, over its real control plane; no process of a run
is started."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from prl.config.schema import Config
from prl.control.client import ControlClient, ControlError
from prl.control.options import ControlOptions
from prl.control.token import create_token
from prl.domains.options import DomainOptions
from prl.flow.events import to_rows
from prl.flow.versions import Version
from prl.orchestrator.binding import Plan
from prl.orchestrator.children import ChildPlan
from prl.orchestrator.main import Orchestrator
from prl.orchestrator.options import RunOptions
from prl.orchestrator.resume import find_start
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import in_words
from prl.streams.ledger import ledger_events, read_ledger

FACTS = {"problems": {"digits": 50}, "evaluation": {"digits": 5}}
CHILDREN = tuple(ChildPlan(role, index, index, (), {}) for role in ("actor", "verifier", "preprocess") for index in (0, 1))


class Rig:
    """An orchestrator of two nodes with an actor, a verifier and a preprocessor each, whose rollouts may be handed out."""

    def __init__(self, folder, **options):
        self.run = RunFolder(folder)
        self.run.create()
        self.run.attempt(1).mkdir()
        config = Config(
            run=RunOptions(folder=str(self.run), groups_per_step=2, rollouts_per_group=2, max_lag=1),
            domains=(DomainOptions(name="digits"),),
        )
        self.config = replace(config, control=ControlOptions(heartbeat_s=0.1, **options))

    async def __aenter__(self):
        self.token = create_token(self.run.token)
        start = find_start(self.run, self.config)
        self.orchestrator = Orchestrator(self.run, self.config, Plan(1, (), CHILDREN, 1), start, self.token)
        self.causes = self.orchestrator._causes.found
        self.url = await self.orchestrator.serve("127.0.0.1")
        self.stack = AsyncExitStack()
        self.agents = [await self.client("agent", node) for node in (0, 1)]
        self.clients = {}
        for child in CHILDREN:
            await self.come(child.name, 0)
        start.dispatcher.problems(FACTS["problems"], FACTS["evaluation"])
        start.dispatcher.committed(Version(0, 0))
        self.orchestrator._work.rollouts.open = True
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

    async def dies(self, name, start=0, words="was ended by SIGKILL"):
        """The pause until its restart."""
        body = {"child": name, "start": start, "code": -9, "words": f"{name} {words}", "log": "its.log", "log_end": ""}
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


def test_what_a_dead_actor_held_goes_to_another_with_its_next_issue(tmp_path):
    async def scenario(rig):
        assert await rig.lease("actor 0", 3) == [(0, 0), (1, 0), (2, 0)]
        assert await rig.lease("actor 1", 1) == [(3, 0)]
        waiting = rig.ask("actor 0", "lease", {"groups": 4})  # for whom nothing is left: it would get what is lost
        await asyncio.sleep(0.2)
        assert await rig.dies("actor 0") == 1.0
        assert (await waiting)["leases"] == []
        assert await rig.lease("actor 1", 4) == [(0, 1), (1, 1), (2, 1)]
        again = [event for event in rig.ledger() if event.kind == "issued_again"]
        assert {(e.rollout.group, e.rollout.issue, e.rollout.rollout, e.reason) for e in again} == {
            (group, 0, rollout, "actor 0 lost") for group in range(3) for rollout in range(2)
        }
        assert rig.causes == []

    run(tmp_path / "run", scenario)


def test_a_call_of_a_dead_process_that_comes_late_is_refused_and_its_successor_is_heard(tmp_path):
    async def scenario(rig):
        dead = rig.clients["actor 0"]
        await rig.dies("actor 0")
        with pytest.raises(ControlError, match=r"410.*start 0 of actor 0 has ended"):
            await dead.call("lease", {"groups": 1}, deadline_s=5, reason="test")
        await rig.come("actor 0", 1)
        assert await rig.lease("actor 0", 1) == [(0, 0)]

    run(tmp_path / "run", scenario)


@pytest.mark.parametrize("role", ["actor", "verifier", "preprocess"])
def test_more_deaths_than_the_limit_end_the_run_with_what_the_process_said_last(tmp_path, role):
    async def scenario(rig):
        name = f"{role} 1"
        for start, pause_s in enumerate([0.5, 1.0]):
            assert await rig.dies(name, start) == pause_s
            await rig.come(name, start + 1)
        assert rig.causes == []
        body = {"error": "OSError: stale file handle", "traceback": "its traceback"}
        await rig.clients[name].call("fail", body, deadline_s=5, reason="test")
        assert rig.causes == []  # it might have been started again
        assert await rig.dies(name, 2, "ended with code 1") is None
        (cause,) = rig.causes
        limit = "it had been started again 2 times (control.restarts)"
        assert (cause.words, cause.role) == (f"{name}: OSError: stale file handle; {limit}", role)
        assert cause.detail == "its traceback"

    run(tmp_path / "run", scenario, restarts=2, restart_pause_s=0.5)


def test_a_full_filesystem_is_nothing_that_a_restart_helps(tmp_path):
    async def scenario(rig):
        words = in_words(OSError(28, "No space left on device", "/scratch/run/file"))
        await rig.clients["preprocess 0"].call("fail", {"error": words}, deadline_s=5, reason="test")
        assert "/scratch/run/file: no space is left" in rig.causes[0].words

    run(tmp_path / "run", scenario)


def test_a_silent_process_is_ended_by_the_agent_of_its_node_alone(tmp_path):
    async def scenario(rig):
        leading = asyncio.create_task(rig.orchestrator._processes.watch_silence())
        orders = [rig.ask(f"agent {node}", "orders", {"known": [], "dumps": 0}) for node in (0, 1)]
        silent = rig.clients["verifier 1"]
        silent._heartbeat.cancel()
        answer = await asyncio.wait_for(orders[1], 10)
        assert answer["end"] == [["verifier 1", 0]]
        assert not orders[0].done()
        assert await rig.dies("verifier 1") == 1.0
        assert rig.causes == []
        for task in (leading, orders[0]):
            task.cancel()
        await asyncio.gather(leading, orders[0], return_exceptions=True)

    run(tmp_path / "run", scenario, lost_after_s=1.0)


def test_actors_hear_where_the_verifier_listens_as_soon_as_it_is_elsewhere(tmp_path):
    async def scenario(rig):
        first = (await rig.ask("actor 0", "verifier", {"known": None}))["url"]
        assert first == "http://0:0"
        await rig.dies("verifier 1")
        news = rig.ask("actor 0", "verifier", {"known": first})
        await asyncio.sleep(0.1)
        assert not news.done()
        await rig.dies("verifier 0")
        await rig.come("verifier 0", 1)
        assert (await asyncio.wait_for(news, 5))["url"] == "http://0:1"

    run(tmp_path / "run", scenario)


def test_an_actor_that_comes_back_with_other_problems_is_refused(tmp_path):
    async def scenario(rig):
        await rig.dies("actor 1")
        with pytest.raises(ControlError, match="other problems"):
            await rig.come("actor 1", 1, {**FACTS, "problems": {"digits": 51}})

    run(tmp_path / "run", scenario)


def test_a_preprocessor_that_begins_again_hears_of_what_lies_in_no_step_file(tmp_path):
    async def scenario(rig):
        await rig.lease("actor 0", 4)
        for sequence, groups in enumerate([(0, 1), (2, 3)]):
            body = {"path": f"f{sequence}", "bytes": 100, "checksum": "", "writer": "w", "sequence": sequence}
            body["groups"] = [{"group": group, "issue": 0, "rollouts": 2} for group in groups]
            await rig.ask("actor 0", "rollouts", body)
        trained = to_rows(event.rollout for event in rig.ledger() if event.rollout.group in (0, 2))
        file = {"step": 1, "path": "step", "bytes": 1, "checksum": "", "trained": trained, "discarded": [], "metrics": {}}
        await rig.ask("preprocess 0", "step_file", file)
        await rig.dies("preprocess 0")
        await rig.come("preprocess 0", 1)
        answer = await rig.ask("preprocess 0", "next_rollouts", {"after": 0, "trained_step": None})
        told = {g["group"]: g["taken"] for a in answer["announcements"] for g in a["groups"]}
        assert told == {0: True, 1: False, 2: True, 3: False}
        assert (answer["next_step"], answer["trained_step"]) == (2, 0)

    run(tmp_path / "run", scenario)
