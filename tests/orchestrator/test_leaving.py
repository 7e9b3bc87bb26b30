"""A run whose nodes are taken away saves after the step in hand and ends; SAVE has a step saved."""

import asyncio

import pytest
from process_rig import Rig, run

from prl.flow.events import to_rows
from prl.orchestrator import shutdown
from prl.orchestrator.agent import _ask_why
from prl.orchestrator.outcome import LOST, Cause
from prl.orchestrator.updates import UpdateError
from prl.runfolder.outcome import read_outcome

WARNED = "warned by SIGUSR1: the time limit is near"


async def make_steps(rig: Rig, count: int) -> None:
    """Step files of all groups that the first steps need."""
    for step in range(1, count + 1):
        groups = await rig.lease("actor 0", 2)
        body = {"path": f"f{step}", "bytes": 100, "checksum": "", "writer": "w", "sequence": step}
        body["groups"] = [{"group": group, "issue": issue, "rollouts": 2} for group, issue in groups]
        await rig.ask("actor 0", "rollouts", body)
        trained = to_rows(event.rollout for event in rig.ledger() if (event.rollout.group, 0) in groups)
        file = {"step": step, "path": "step", "bytes": 1, "checksum": "", "trained": trained, "discarded": [], "metrics": {}}
        await rig.ask("preprocess 0", "step_file", file)


def trained(rig: Rig, step: int):
    return rig.ask("trainer 0", "trained", {"step": step, "metrics": {}, "data": {}})


def test_the_trainer_is_told_at_the_end_of_its_step_to_save_and_not_to_export(tmp_path):
    async def scenario(rig):
        await rig.come("trainer 0", 0)
        await make_steps(rig, 1)
        rig.orchestrator.shutdown.leave(WARNED, "time limit")
        assert await trained(rig, 1) == {"stop": True, "leave": True, "save": False}
        order = await rig.ask("trainer 0", "next_step", {"step": 2})  # also where it waits
        assert (order["file"], order["stop"], order["leave"]) == (None, True, True)
        assert await rig.dies("actor 0") is None  # nobody is needed any more
        assert await rig.dies("preprocess 1") is None

    run(tmp_path / "run", scenario)
    ended = read_outcome(tmp_path / "run/attempt_001/exit.json")
    assert (ended.outcome, ended.reason, ended.cause, ended.steps, ended.next) == ("left", "time limit", WARNED, 1, "stop")


def test_a_run_whose_last_step_is_in_hand_ends_as_if_nobody_had_warned_it(tmp_path):
    async def scenario(rig):
        await rig.come("trainer 0", 0)
        await make_steps(rig, 2)
        await trained(rig, 1)
        rig.orchestrator.shutdown.leave(WARNED, "time limit")
        assert await trained(rig, 2) == {"stop": True, "leave": False, "save": False}

    run(tmp_path / "run", scenario)
    ended = read_outcome(tmp_path / "run/attempt_001/exit.json")
    assert (ended.outcome, ended.reason, ended.cause) == ("done", "done", "all 2 steps trained")


@pytest.mark.parametrize("reason", ["preempted", "time limit"])
def test_before_rollouts_are_handed_out_there_is_nothing_to_save(tmp_path, reason):
    async def scenario(rig):
        rig.orchestrator._work.rollouts.open = False
        rig.orchestrator.shutdown.leave("Slurm ends the job", reason)
        assert rig.causes[0].reason == reason

    run(tmp_path / "run", scenario)
    ended = read_outcome(tmp_path / "run/attempt_001/exit.json")
    assert (ended.outcome, ended.reason, ended.steps) == ("left", reason, 0)


@pytest.mark.parametrize("running", [True, False])
def test_stop_ends_a_run_after_its_step_and_before_any_at_once(tmp_path, running):
    async def scenario(rig):
        rig.orchestrator._phases.running = running
        for _ in range(2):
            rig.orchestrator.shutdown.stop("asked to stop by STOP")
        assert rig.orchestrator._work.steps.finishing == running
        assert len(rig.causes) == (not running)

    run(tmp_path / "run", scenario)
    ended = read_outcome(tmp_path / "run/attempt_001/exit.json")
    expected = ("done", "stopped", "asked to stop by STOP") if running else ("cancelled", "cancelled", ended.cause)
    assert (ended.outcome, ended.reason, ended.cause) == expected
    assert running or ended.cause == "asked to stop by STOP before it trained"


def test_the_step_that_is_trained_next_is_saved_once_after_somebody_asked(tmp_path):
    async def scenario(rig):
        await rig.come("trainer 0", 0)
        await make_steps(rig, 2)
        rig.orchestrator._work.checkpoints.ask()
        assert (await trained(rig, 1))["save"]
        assert not (await trained(rig, 2))["save"]

    run(tmp_path / "run", scenario)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_version_that_samplers_refuse_ends_a_run_but_not_one_that_leaves(tmp_path, leaves):
    """Slurm ends a sampler's engine with all else, and the sampler refuses what comes then."""

    async def scenario(rig):
        if leaves:
            rig.orchestrator.shutdown.expect_deaths()
        rig.orchestrator._samplers._updater._on_error(UpdateError("sampler 0 refused commit"))
        assert bool(rig.orchestrator._causes) != leaves
        rig.orchestrator.shutdown.leave("Slurm ends the job with SIGTERM", "preempted")

    run(tmp_path / "run", scenario)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_trainer_whose_version_samplers_refuse_goes_on_to_save_where_the_run_leaves(tmp_path, monkeypatch, leaves):
    async def scenario(rig):
        async def refused(*_, **__):
            raise ValueError("sampler 0 refused receive")

        monkeypatch.setattr(rig.orchestrator._samplers._updater, "offer", refused)
        if leaves:
            rig.orchestrator.shutdown.expect_deaths()
        body = {"epoch": 3, "step": 0, "lineage": 0}
        offered = rig.orchestrator._samplers._offer_version(None, body)
        if leaves:
            assert await offered == {"epoch": 3, "world_size": 0, "send": False}
        else:
            with pytest.raises(ValueError, match="sampler 0 refused receive"):
                await offered
        rig.orchestrator.shutdown.leave("Slurm ends the job with SIGTERM", "preempted")

    run(tmp_path / "run", scenario)


@pytest.mark.parametrize("reason", ["preempted", "time limit", "cancelled"])
def test_a_child_that_slurm_ended_before_this_process_knew_why_is_no_cause(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(shutdown, "GATHER_CAUSES_S", 0.1)

    async def scenario(rig):
        await rig.come("trainer 0", 0)
        await rig.dies("trainer 0")
        ending = asyncio.create_task(rig.orchestrator.shutdown.tell_everyone())
        rig.orchestrator.shutdown.expect_deaths()
        await asyncio.sleep(0.5)  # Slurm takes its time to say why
        if reason == "cancelled":
            rig.orchestrator.shutdown.cancel("cancelled by SIGTERM")
        else:
            rig.orchestrator.shutdown.leave("Slurm ends the job with SIGTERM", reason)
        for agent in rig.agents:
            await agent.call("node_done", {}, deadline_s=5, reason="test")
        await ending

    run(tmp_path / "run", scenario, restarts=0)
    ended = read_outcome(tmp_path / "run/attempt_001/exit.json")
    outcome = "cancelled" if reason == "cancelled" else "left"
    assert (ended.outcome, ended.reason, ended.steps) == (outcome, reason, 0)


@pytest.mark.parametrize("gone", [False, True])
def test_where_slurm_ends_the_step_of_a_job_that_goes_on_an_agent_that_is_gone_is_why(tmp_path, gone):
    async def scenario(rig):
        for agent in rig.agents:
            await agent.join({})
        if gone:
            rig.agents[1]._heartbeat.cancel()
        await rig.orchestrator.shutdown.blame_lost_agent("cancelled by SIGTERM")

    run(tmp_path / "run", scenario, heartbeat_s=1.0)  # by far less often than a busy machine is late
    ended = read_outcome(tmp_path / "run/attempt_001/exit.json")
    if gone:
        assert ended.cause.startswith("agent 1 on ")
        assert ended.cause.endswith(" has ended without a word, and Slurm has ended the others")
    else:
        assert ended.cause == "cancelled by SIGTERM"
    assert (ended.outcome, ended.reason) == (("failed", "killed") if gone else ("cancelled", "cancelled"))


@pytest.mark.parametrize(("gone", "reason"), [(False, "requeued"), (True, "node failure")])
def test_where_slurm_has_queued_the_job_again_a_silent_node_is_why(tmp_path, gone, reason):
    async def scenario(rig):
        for agent in rig.agents:
            await agent.join({})
        if gone:
            rig.agents[1]._heartbeat.cancel()
            await asyncio.sleep(3.0)
        rig.orchestrator._work.rollouts.open = False
        rig.orchestrator.shutdown.terminated.set()
        await _ask_why(rig.orchestrator.shutdown, lambda: "requeued")

    run(tmp_path / "run", scenario, lost_after_s=5)
    ended = read_outcome(tmp_path / "run/attempt_001/exit.json")
    where = " (nothing is heard of n2)" if gone else ""
    assert (ended.reason, ended.cause) == (reason, f"Slurm ends the job with SIGTERM: {reason}{where}")


def test_the_end_of_a_run_that_has_lost_a_node_is_told_to_the_others_at_once(tmp_path):
    async def scenario(rig):
        for agent in rig.agents:
            await agent.join({})
        rig.agents[1]._heartbeat.cancel()
        await asyncio.sleep(0.3)
        rig.causes.append(Cause("agent 1 was silent", "agent", LOST, reason="node failure"))
        ending = asyncio.create_task(rig.orchestrator.shutdown.tell_everyone())
        await asyncio.wait_for(rig.agents[0].stopping.wait(), 10)
        for agent in rig.agents:
            await agent.call("node_done", {}, deadline_s=5, reason="test")
        await ending

    run(tmp_path / "run", scenario, lost_after_s=30)


@pytest.mark.parametrize("lost", [False, True])
def test_an_agent_that_is_late_when_a_process_fails_is_heard_again_or_its_node_is_the_cause(tmp_path, lost):
    async def scenario(rig):
        for agent in rig.agents:
            await agent.join({})
        rig.agents[1]._heartbeat.cancel()
        watching = asyncio.create_task(rig.orchestrator._processes.watch_silence())
        words = {"error": "RuntimeError: connection closed by peer", "traceback": "its traceback"}
        await rig.clients["trainer 0"].call("fail", words, deadline_s=5, reason="test")
        ending = asyncio.create_task(rig.orchestrator.shutdown.tell_everyone())
        await asyncio.sleep(1.5)
        assert not rig.orchestrator._server.stopping
        if not lost:
            await rig.agents[1].join({})
        await asyncio.sleep(0.5 if not lost else 4.0)
        for agent in rig.agents:
            await agent.call("node_done", {}, deadline_s=5, reason="test")
        await ending
        watching.cancel()

    run(tmp_path / "run", scenario, restarts=0, lost_after_s=4)
    ended = read_outcome(tmp_path / "run/attempt_001/exit.json")
    if lost:
        assert (ended.reason, ended.host) == ("node failure", "n2")
        assert ended.cause.startswith("agent 1 on ")
    else:
        assert (ended.reason, ended.cause) == ("error", "trainer 0: RuntimeError: connection closed by peer")
