"""What the orchestrator makes of trainer ranks that die or stand still: all begin again together, at the newest checkpoint."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import asdict

import pytest
from left_behind import step_file, write_checkpoint
from process_rig import run

from prl.control.client import ControlError
from prl.flow.events import to_rows
from prl.flow.versions import Version
from prl.orchestrator.outcome import MEMORY_KILL
from prl.orchestrator.updates import Committed
from prl.runfolder.model import write_model_folder
from prl.runfolder.outcome import read_outcome
from prl.runfolder.paths import RunFolder
from prl.runfolder.plan import read_plan
from prl.trainer.options import ModelOptions


class Training:
    """Two groups a step, of which the first actor samples all and the preprocessor makes files."""

    def __init__(self, rig):
        self.rig = rig
        self.sequence = 0
        self.leases = {}
        write_model_folder(ModelOptions(init="random", architecture="qwen2"), rig.run.model)
        self.serve(Version(0, 0))

    @property
    def work(self):
        return self.rig.orchestrator._work

    def serve(self, version):
        """The samplers have committed it."""
        samplers, committed = self.rig.orchestrator._samplers, Committed(version, "7", {}, ())
        samplers._updater.current = committed
        samplers._committed(committed)

    async def sample(self, groups):
        """The groups that an actor is given for what it asks, whose results have come."""
        answer = await self.rig.ask("actor 0", "lease", {"groups": groups})
        found = [(lease["group"], lease["issue"]) for lease in answer["leases"]]
        self.leases |= dict.fromkeys(found)
        assert await self.hand_in(*found) == []
        return found

    async def hand_in(self, *groups):
        """Those that come late."""
        body = {"path": f"f{self.sequence}", "bytes": 100, "checksum": "", "writer": "w", "sequence": self.sequence}
        self.sequence += 1
        body["groups"] = [{"group": group, "issue": issue, "rollouts": 2} for group, issue in groups]
        return (await self.rig.ask("actor 0", "rollouts", body))["late"] if groups else []

    def ids(self, *groups):
        return [e.rollout for e in self.rig.ledger() if e.kind == "issued" and (e.rollout.group, e.rollout.issue) in groups]

    def file(self, step, *groups):
        """A durable step file, as it would be announced."""
        ids = self.ids(*groups)
        file = step_file(self.rig.run, step, ids, step)
        where = {"path": str(file.path.relative_to(self.rig.run.path)), "bytes": file.bytes, "checksum": file.checksum}
        return {"step": step, **where, "trained": to_rows(ids), "discarded": [], "metrics": {}}

    async def make(self, step, *groups):
        await self.rig.ask("preprocess 0", "step_file", self.file(step, *groups))

    async def train(self, step):
        return await self.rig.ask("trainer 0", "trained", {"step": step, "metrics": {}, "data": {}})

    async def all_die(self, start=0):
        """Of the death of trainer rank 1."""
        assert await self.rig.dies("trainer 1", start) is not None
        for node, doomed in ((0, ["trainer 0", "preprocess 0"]), (1, ["preprocess 1"])):
            answer = await self.rig.ask(f"agent {node}", "orders", {"known": [], "dumps": 0})
            assert sorted(answer["end"]) == sorted([name, start] for name in doomed)
        for name in ("trainer 0", "preprocess 0", "preprocess 1"):
            assert await self.rig.dies(name, start) is not None

    async def begin(self, start):
        """Where the ranks of this start are told to begin."""
        for rank in (0, 1):
            self.rig.clients[f"trainer {rank}"] = await self.rig.client("trainer", rank, start)
        answers = [await self.rig.ask(f"trainer {rank}", "training", {}) for rank in (0, 1)]
        assert answers[0] == answers[1]
        checkpoint = (await self.rig.ask("trainer 0", "resume", {}))["checkpoint"]
        for name in ("trainer 0", "trainer 1"):
            await self.rig.clients[name].join({})
        for name in ("preprocess 0", "preprocess 1"):
            await self.rig.come(name, start)
        return answers[0], checkpoint


@asynccontextmanager
async def training(rig):
    """The parts of a run that go on beside what the test does."""
    orchestrator = rig.orchestrator
    tasks = [asyncio.create_task(part) for part in (orchestrator._lineages.follow(), orchestrator._processes.watch_silence())]
    for task in tasks:
        orchestrator.watch(task)
    yield Training(rig)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_trainers_begin_again_at_the_newest_checkpoint_and_train_what_lies_behind_it_as_it_is(tmp_path):
    """Checkpoint of step 1; step 2 was trained, step 3's file durable and never announced, two groups were under way."""

    async def scenario(rig):
        async with training(rig) as t:
            launch = await rig.ask("trainer 0", "training", {})
            assert (launch["lineage"], launch["resumes"]) == (0, False)
            assert await t.sample(4) == [(0, 0), (1, 0), (2, 0), (3, 0)]
            await t.make(1, (0, 0), (1, 0))
            await t.train(1)
            write_checkpoint(rig.run, 1, t.work.dispatcher.state())
            t.serve(Version(0, 1))
            assert await t.sample(2) == [(4, 0), (5, 0)]
            await t.make(2, (2, 0), (3, 0))
            await t.train(2)
            t.serve(Version(0, 2))
            assert await rig.lease("actor 0", 2) == [(6, 0), (7, 0)]
            unannounced = rig.ask("preprocess 0", "step_file", {**t.file(3, (4, 0), (5, 0)), "step": 99})
            with pytest.raises(ControlError, match="step file 99 announced, step 3 expected"):
                await unannounced

            dead = [rig.clients[name] for name in ("trainer 0", "trainer 1")]
            await t.all_die()
            waiting = rig.ask("actor 1", "lease", {"groups": 9})
            again, checkpoint = await t.begin(1)
            assert (again["lineage"], again["resumes"]) == (1, True)
            assert again["port"] != launch["port"]
            assert checkpoint == str(rig.run.checkpoint(1))
            assert rig.causes == []
            plan = read_plan(rig.run.plan(1))
            assert (plan.lineage, plan.forks) == (1, {1: 1})
            for client in dead:
                with pytest.raises(ControlError, match="410"):
                    await client.call("trained", {"step": 2, "metrics": {}, "data": {}}, deadline_s=5, reason="test")

            assert await t.hand_in((6, 0), (7, 0)) == [6, 7]  # late: they are issued again
            assert (await rig.ask("trainer 0", "next_step", {"step": 2}))["file"]["step"] == 2
            await t.train(2)  # before the samplers have anything of the lineage
            assert (await rig.ask("trainer 0", "next_step", {"step": 3}))["file"]["step"] == 3
            assert (await waiting)["leases"] == []
            held = rig.ask("actor 0", "lease", {"groups": 9})
            await asyncio.sleep(0.3)
            assert not held.done()
            t.serve(Version(1, 2))
            assert [(one["group"], one["issue"]) for one in (await held)["leases"]] == [(6, 1), (7, 1)]

            trained = [(e.rollout.group, str(e.version)) for e in rig.ledger() if e.kind == "trained" and not e.rollout.rollout]
            in_order = sorted(trained, key=lambda one: one[1])
            assert trained == in_order
            assert sorted(trained) == [(0, "0:1"), (1, "0:1"), (2, "0:2"), (2, "1:2"), (3, "0:2"), (3, "1:2")]
            ends = [(e.rollout.group, e.kind, e.reason) for e in rig.ledger() if e.kind in ("issued_again", "discarded")]
            assert set(ends) == {(group, "issued_again", "trainer ended") for group in (6, 7)}

    run(tmp_path / "run", scenario, steps=6)


@pytest.mark.parametrize("order", ["arrival", "dispatch"])
def test_in_the_order_of_dispatch_a_group_that_a_step_file_was_made_without_does_not_come_behind_it(tmp_path, order):
    """The preprocessor had dropped it, and died before it told of that and of the file."""

    async def scenario(rig):
        async with training(rig) as t:
            await t.sample(4)
            t.file(1, (0, 0), (2, 0))
            await t.all_die()
            await t.begin(1)
            assert (await rig.ask("trainer 0", "next_step", {"step": 1}))["file"]["step"] == 1
            ends = [(e.rollout.group, e.kind, e.reason) for e in rig.ledger() if e.kind != "issued"]
            dropped = (
                (1, "issued_again", "trainer ended") if order == "arrival" else (1, "discarded", "left out of a step file")
            )
            assert sorted(ends) == [dropped, dropped, *[(3, "issued_again", "trainer ended")] * 2]

    run(tmp_path / "run", scenario, steps=6, order=order)


def test_without_a_checkpoint_they_begin_at_the_model_and_what_they_still_say_is_refused(tmp_path):
    async def scenario(rig):
        async with training(rig) as t:
            await t.sample(4)
            await t.make(1, (0, 0), (1, 0))
            await t.train(1)
            await rig.dies("trainer 1")
            # Of step 2, whose number the new trainers will come to: it must never be taken for theirs.
            said = rig.ask("trainer 0", "trained", {"step": 1, "metrics": {}, "data": {}})
            asked = rig.ask("trainer 0", "checkpoint", {"step": 1, "parts": [], "last": False, "metrics": {}})
            await asyncio.sleep(0.2)
            for name in ("trainer 0", "preprocess 0", "preprocess 1"):
                assert await rig.dies(name) is not None
            for call in (said, asked):
                with pytest.raises(ControlError, match="start 0 of trainer 0 has ended"):
                    await call
            launch, checkpoint = await t.begin(1)
            assert (launch["lineage"], launch["resumes"], checkpoint) == (1, False, None)
            assert t.work.steps.trained == 0
            assert (await rig.ask("trainer 0", "next_step", {"step": 1}))["file"]["step"] == 1
            assert read_plan(rig.run.plan(1)).forks == {1: 0}
            assert rig.run.manifests() == []

    run(tmp_path / "run", scenario, steps=6)


def test_ranks_that_fail_while_they_begin_lead_to_another_lineage_up_to_the_limit_and_the_worst_cause_is_told(tmp_path):
    async def scenario(rig):
        async with training(rig) as t:
            await t.sample(4)
            await t.make(1, (0, 0), (1, 0))
            await t.all_die()
            for rank in (0, 1):
                rig.clients[f"trainer {rank}"] = await rig.client("trainer", rank, 1)
            first = await rig.ask("trainer 0", "training", {})
            assert first["lineage"] == 1
            await rig.clients["trainer 0"].join({})
            assert await rig.dies("trainer 0", 1) == 2.0
            late = rig.ask("trainer 1", "training", {})
            await asyncio.sleep(0.2)
            assert not late.done()  # it is to end, and is told nothing any more
            rig.clients["trainer 1"]._heartbeat = asyncio.create_task(asyncio.sleep(0))
            assert await rig.dies("trainer 1", 1) == 2.0
            with pytest.raises(ControlError, match="start 1 of trainer 1 has ended"):
                await late
            second, checkpoint = await t.begin(2)
            assert (second["lineage"], checkpoint) == (2, None)
            assert read_plan(rig.run.plan(1)).forks == {1: 0, 2: 0}
            assert rig.causes == []
            words = {"error": "RuntimeError: connection closed by peer", "traceback": "its traceback"}
            await rig.clients["trainer 0"].call("fail", words, deadline_s=5, reason="test")
            assert await rig.dies("trainer 1", 2) is None
            assert await rig.dies("trainer 0", 2, "ended with code 1", code=1) is None
            first_cause = min(rig.causes, key=lambda cause: cause.rank)
            often = "the trainer had been started again 2 times (control.restarts)"
            assert first_cause.words == f"trainer 1 was ended by SIGKILL; {often}"
            assert {cause.role for cause in rig.causes} == {"trainer"}

    run(tmp_path / "run", scenario, steps=6, restarts=2)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ({"error": "TooManySkipped: step 7", "ends_run": True}, "trainer 1: TooManySkipped: step 7"),
        (None, "trainer 1 was ended by SIGKILL"),
    ],
)
def test_what_another_start_does_not_help_and_a_limit_of_none_end_the_run_at_once(tmp_path, failure, words):
    async def scenario(rig):
        if failure is None:
            assert await rig.dies("trainer 1") is None
        else:
            await rig.clients["trainer 1"].call("fail", failure, deadline_s=5, reason="test")
        assert [cause.words for cause in rig.causes] == [words]
        assert rig.orchestrator._processes.trainers_to_end == []

    run(tmp_path / "run", scenario, restarts=0 if failure is None else 3)


def test_what_a_rank_says_that_misses_another_one_does_not_end_the_run_at_the_last_restart_that_there_may_be(tmp_path):
    async def scenario(rig):
        async with training(rig) as t:
            assert await rig.dies("trainer 1") is not None
            words = {"error": "RuntimeError: connection closed by peer", "traceback": "its traceback"}
            await rig.clients["trainer 0"].call("fail", words, deadline_s=5, reason="test")
            assert await rig.dies("trainer 0", 0, "ended with code 1", code=1) is not None
            for name in ("preprocess 0", "preprocess 1"):
                assert await rig.dies(name) is not None
            await t.begin(1)
            assert rig.causes == []

    run(tmp_path / "run", scenario, restarts=1)


def test_a_rank_that_runs_out_of_memory_again_and_again_ends_the_run_at_the_limit(tmp_path):
    killed = f"was ended by SIGKILL: {MEMORY_KILL}"

    async def scenario(rig):
        async with training(rig) as t:
            assert await rig.dies("trainer 1", 0, killed) is not None
            for name in ("trainer 0", "preprocess 0", "preprocess 1"):
                assert await rig.dies(name, 0) is not None
            await t.begin(1)
            assert rig.causes == []
            assert await rig.dies("trainer 1", 1, killed) is None

    run(tmp_path / "run", scenario, restarts=1)
    outcome = read_outcome(RunFolder(tmp_path / "run").exit(1))
    assert (outcome.reason, outcome.next) == ("out of memory", "stop")
    assert outcome.cause == f"trainer 1 {killed}; the trainer had been started again 1 times (control.restarts)"


def test_a_rank_that_falls_silent_has_all_of_them_end(tmp_path):
    async def scenario(rig):
        async with training(rig):
            orders = [rig.ask(f"agent {node}", "orders", {"known": [], "dumps": 0}) for node in (0, 1)]
            rig.clients["trainer 1"]._heartbeat.cancel()
            ended = [await asyncio.wait_for(asked, 10) for asked in orders]
            assert sorted(name for answer in ended for name, _ in answer["end"]) == [
                "preprocess 0", "preprocess 1", "trainer 0", "trainer 1",
            ]  # fmt: skip
            assert rig.causes == []

    run(tmp_path / "run", scenario, lost_after_s=1.0)


def test_an_actor_waits_for_as_long_as_trainers_may_take_to_begin_again(tmp_path):
    """It waits longer than anyone waits for work otherwise, and no trainer begins before all have ended."""

    async def scenario(rig):
        async with training(rig) as t:
            await t.sample(4)
            await t.make(1, (0, 0), (1, 0))
            assert await rig.dies("trainer 1") is not None
            held = rig.ask("actor 0", "lease", {"groups": 9})
            await asyncio.sleep(1.5)
            for name in ("trainer 0", "preprocess 0", "preprocess 1"):
                assert await rig.dies(name) is not None
            await t.begin(1)
            t.serve(Version(1, 0))
            assert [(one["group"], one["issue"]) for one in (await held)["leases"]] == [(2, 1), (3, 1)]

    run(tmp_path / "run", scenario, steps=6, wait_s=1.0)


def test_a_save_that_was_asked_for_and_is_lost_with_the_trainers_is_asked_of_the_next_ones(tmp_path):
    async def scenario(rig):
        async with training(rig) as t:
            await t.sample(4)
            for step, groups in ((1, [(0, 0), (1, 0)]), (2, [(2, 0), (3, 0)])):
                await t.make(step, *groups)
            t.work.checkpoints.ask()
            assert (await t.train(1))["save"]
            await t.all_die()
            await t.begin(1)
            assert (await t.train(1))["save"]
            assert not (await t.train(2))["save"]
            assert t.work.checkpoints.asked  # that of step 1 is on its way

    run(tmp_path / "run", scenario, steps=6)


def test_a_run_that_was_to_stop_does_so_once_the_steps_of_before_are_trained_again(tmp_path):
    async def scenario(rig):
        async with training(rig) as t:
            await t.sample(4)
            for step, groups in ((1, [(0, 0), (1, 0)]), (2, [(2, 0), (3, 0)])):
                await t.make(step, *groups)
                await t.train(step)
            t.work.finish("asked to stop", "stopped")
            assert t.work.steps.finishing
            await t.all_die()
            await t.begin(1)
            t.work.finish("asked to stop", "stopped")  # as long as the file is there
            assert not t.work.steps.finishing
            assert not (await t.train(1))["stop"]
            assert (await t.train(2))["stop"]
            assert asdict(t.work.ending) == {"words": "asked to stop", "reason": "stopped"}

    run(tmp_path / "run", scenario, steps=6)
