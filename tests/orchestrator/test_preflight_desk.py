"""The preflight of three nodes over the real control plane: each answers for itself, and all hear one decision."""

import asyncio
import json
import time
from contextlib import AsyncExitStack

import pytest

from prl.cluster.options import ClusterOptions, PreflightOptions
from prl.cluster.preflight.node import pass_preflight
from prl.config.schema import Config
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.server import Bell, ControlServer
from prl.orchestrator.binding import Plan
from prl.orchestrator.causes import Causes
from prl.orchestrator.options import RunOptions
from prl.orchestrator.outcome import CANCEL, Cause
from prl.orchestrator.preflight import PreflightDesk
from prl.runfolder.paths import RunFolder
from prl.runfolder.preflight import read_preflight

NODES = tuple(
    {"name": f"n{number + 1}", "address": f"127.0.0.{number + 1}", "component": int(number > 0)} for number in range(3)
)


class Rig:
    """The desk behind its server, and the agents of the nodes, each with the canary that it is given."""

    def __init__(self, folder, start_s=20.0, **preflight):
        self.run = RunFolder(folder)
        self.run.create()
        self.run.attempt(1).mkdir()
        self.run.canary(1).write_text("word")
        cluster = ClusterOptions(nodes=3, mode="het", sbatch={"exclude": "n9"}, preflight=PreflightOptions(**preflight))
        self.control = ControlOptions(heartbeat_s=0.1, start_s=start_s)
        config = Config(run=RunOptions(folder=str(self.run)), cluster=cluster, control=self.control)
        bell = Bell()
        self.causes = Causes(bell)
        self.desk = PreflightDesk(self.run, config, Plan(1, NODES, (), 1), self.causes, bell)
        self.server = ControlServer(
            "token", self.desk.handlers(), on_join=lambda m: None, on_fail=lambda m, e, t: pytest.fail(e)
        )

    async def agent(self, stack, node, canary):
        client = await stack.enter_async_context(ControlClient(self.url, "token", "agent", node, self.control))
        await client.join({})
        return await pass_preflight(client, canary, NODES[node]["address"], "token")

    async def through(self, canaries, meanwhile=None):
        """What the desk says, and each agent whose canary is given."""
        self.url = await self.server.start("127.0.0.1")
        async with AsyncExitStack() as stack:
            agents = [asyncio.create_task(self.agent(stack, node, canary)) for node, canary in canaries.items()]
            deciding = asyncio.create_task(self.desk.passed())
            if meanwhile is not None:
                await asyncio.sleep(0.5)
                meanwhile()
            decided = await deciding
            heard = await asyncio.gather(*agents)
        await self.server.close()
        return decided, heard


def go_through(rig, canaries, meanwhile=None):
    return asyncio.run(asyncio.wait_for(rig.through(canaries, meanwhile), 60))


def test_nodes_that_will_do_go_on_together_and_leave_what_they_were_like(tmp_path):
    rig = Rig(tmp_path / "run", bandwidth_mib_per_s=0.001)
    began = time.monotonic()
    assert go_through(rig, dict.fromkeys(range(3), rig.run.canary(1))) == (True, [True, True, True])
    took_s = time.monotonic() - began
    assert not rig.causes
    written = json.loads(rig.run.preflight(1).read_text())
    assert list(written["nodes"]) == ["n1", "n2", "n3"]
    assert {(link["node"], link["peer"]) for link in written["links"]} == {("n2", "n1"), ("n3", "n1")}
    facts = read_preflight(rig.run.preflight(1))
    assert (facts.nodes, facts.findings) == (3, ())
    assert 0 < facts.took_s < took_s
    assert facts.clock[1] < 5
    node, peer, speed = facts.slowest
    assert {node, peer} in ({"n1", "n2"}, {"n1", "n3"})
    assert 0 < speed <= facts.median_mib_per_s


def test_one_node_that_sees_another_folder_ends_the_run_for_all(tmp_path):
    rig = Rig(tmp_path / "run")
    other = tmp_path / "canary"
    other.write_text("an older word")
    assert go_through(rig, {0: rig.run.canary(1), 1: rig.run.canary(1), 2: other}) == (False, [False] * 3)
    (cause,) = rig.causes.found
    assert (cause.role, cause.host, cause.reason) == ("agent", "n3", "bad node")
    assert cause.words.startswith("preflight: n3: the run folder that it sees is not the one that rank 0 sees")
    assert cause.words.endswith("without it: --exclude=n9,n3")
    assert json.loads(rig.run.preflight(1).read_text())["links"] == []  # no use in any


def test_slow_links_are_told_once_all_have_been_tried(tmp_path):
    rig = Rig(tmp_path / "run", bandwidth_mib_per_s=999_999)
    decided, heard = go_through(rig, dict.fromkeys(range(3), rig.run.canary(1)))
    assert (decided, heard) == (False, [False] * 3)
    (cause,) = rig.causes.found
    assert cause.host == "n1"  # with which all are slow
    assert cause.words.count("MiB/s go over TCP") == 2


def test_a_node_that_does_not_come_is_named(tmp_path):
    rig = Rig(tmp_path / "run", start_s=1.0)
    assert go_through(rig, dict.fromkeys(range(2), rig.run.canary(1))) == (False, [False] * 2)
    (cause,) = rig.causes.found
    assert cause.host == "n3"
    assert "n3: its agent did not join the run within 1 s" in cause.words


def test_a_run_that_is_ended_meanwhile_holds_nobody_up(tmp_path):
    rig = Rig(tmp_path / "run")
    began = time.monotonic()
    cause = Cause("cancelled", None, CANCEL, reason="cancelled")
    decided, heard = go_through(rig, dict.fromkeys(range(2), rig.run.canary(1)), lambda: rig.causes.add(cause))
    assert (decided, heard, rig.causes.found) == (False, [False] * 2, [cause])
    assert time.monotonic() - began < 15
    assert not rig.run.preflight(1).exists()


def test_without_a_preflight_nodes_go_on_at_once(tmp_path):
    rig = Rig(tmp_path / "run", enabled=False)
    assert go_through(rig, {2: tmp_path / "nothing"}) == (True, [True])
    assert not rig.run.preflight(1).exists()
