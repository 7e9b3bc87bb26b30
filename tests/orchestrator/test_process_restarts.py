"""What the orchestrator makes of actors, verifiers and preprocessors that die."""

import asyncio
import threading

import pytest
from process_rig import FACTS, run

from prl.control.client import ControlError
from prl.flow.events import to_discard_rows, to_rows
from prl.runfolder.publish import in_words


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
        assert (await asyncio.wait_for(news, 5))["url"] is None  # where it listened, somebody else may
        news = rig.ask("actor 0", "verifier", {"known": None})
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


def test_a_step_file_whose_sender_died_while_the_ledger_was_written_is_not_made_again(tmp_path):
    async def scenario(rig):
        written, write = threading.Event(), rig.orchestrator._ledger_desk._append
        await rig.lease("actor 0", 2)
        body = {"path": "f", "bytes": 100, "checksum": "", "writer": "w", "sequence": 0}
        body["groups"] = [{"group": group, "issue": 0, "rollouts": 2} for group in (0, 1)]
        await rig.ask("actor 0", "rollouts", body)
        *trained, dropped = [event.rollout for event in rig.ledger()]

        def slowly(events):
            assert written.wait(20)
            write(events)

        rig.orchestrator._ledger_desk._append = slowly
        file = {"step": 1, "path": "step", "bytes": 1, "checksum": "", "trained": to_rows(trained), "metrics": {}}
        announcing = rig.ask("preprocess 0", "step_file", {**file, "discarded": to_discard_rows([(dropped, "cut")])})
        try:
            await asyncio.sleep(0.2)
            assert not announcing.done()
            await rig.dies("preprocess 0")
            await rig.come("preprocess 0", 1)
            answer = await rig.ask("preprocess 0", "next_rollouts", {"after": 0, "trained_step": None})
        finally:
            written.set()
        assert answer["next_step"] == 2
        assert [g["taken"] for a in answer["announcements"] for g in a["groups"]] == [True, True]
        await announcing
        assert [event.rollout for event in rig.ledger() if event.kind == "discarded"] == [dropped]

    run(tmp_path / "run", scenario)
