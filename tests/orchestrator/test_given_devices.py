"""A node's processes use the accelerators that the job was given there, which need not be the first ones."""

import asyncio

import pytest
from agent_rig import Orchestrator, run_of

from prl.control.options import ControlOptions
from prl.orchestrator.node import run_agent

CHILD = "import os, time; print(repr(os.environ['CUDA_VISIBLE_DEVICES']), flush=True); time.sleep(600)"


def seen(tmp_path, planned):
    """What a process finds in its environment, and what the orchestrator hears where there is none."""
    run = run_of(tmp_path, CHILD)
    log = run.logs(1) / "sampler-0.log"

    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=0)
        orchestrator.environment["CUDA_VISIBLE_DEVICES"] = planned
        orchestrator.devices = [[0]]
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.2)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        while not agent.done() and not (log.exists() and log.read_text()):  # noqa: ASYNC110 (written by another process)
            await asyncio.sleep(0.02)
        orchestrator.server.stopping, orchestrator.server.grace_s = True, 0.2
        orchestrator.bell.ring()
        await asyncio.wait([agent], timeout=20)
        await orchestrator.server.close()
        return log.read_text().strip() if log.exists() else None, orchestrator.ended, agent.exception()

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("given", "planned", "found"),
    [
        (None, "0,1", "0,1"),
        ("NoDevFiles", "1", "1"),
        ("4,6", "1", "6"),
        ("GPU-4a,GPU-7b", "0,1", "GPU-4a,GPU-7b"),
        ("4,6", "", ""),
    ],
)
def test_the_numbers_of_a_plan_stand_for_what_the_node_was_given(tmp_path, monkeypatch, given, planned, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert seen(tmp_path, planned)[0] == repr(found)


def test_fewer_than_the_plan_reckons_with_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    found, (said,), error = seen(tmp_path, "1,2")
    assert found is None
    assert "sampler 0 is to have accelerator 2, counted from 0, and this node was given 4,6" in said
    assert "cluster.gpus_per_node" in str(error)
