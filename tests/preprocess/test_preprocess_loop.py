"""The preprocessor against the real control plane, dispatcher, ledger and files; actor and trainer are played by the test."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from prl.config.load import dump
from prl.config.schema import Config
from prl.control.child import Child
from prl.control.client import ControlClient
from prl.control.ports import free_port
from prl.control.server import Bell, ControlServer
from prl.control.token import create_token
from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.ids import Lease
from prl.flow.versions import Version
from prl.orchestrator.options import RunOptions
from prl.orchestrator.rollouts import LedgerDesk, RolloutDesk
from prl.orchestrator.steps import StepDesk
from prl.preprocess.builder import Builder, BuilderSettings, Workshop
from prl.preprocess.loop import preprocess
from prl.preprocess.options import PreprocessOptions
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import LedgerWriter, ledger_events, read_ledger
from prl.streams.opening import open_reader, open_writer
from prl.streams.options import RedisOptions, StreamsOptions
from prl.streams.records import Group, Rollout, Turn, VersionSpan
from prl.streams.redis_server import RedisServer
from prl.streams.steps import find_steps, read_step
from prl.trainer.options import ModelOptions

STEPS = 6


class World:
    """An orchestrator's desks around one preprocessor."""

    def __init__(self, folder: Path, order: str, cursors=None, **options) -> None:
        self.run = RunFolder(folder)
        self.run.create()
        self.run.attempt(1).mkdir()
        self.run.plan(1).write_text(json.dumps({"data_parallel": 1}))
        write_model_folder(ModelOptions(init="random", architecture="qwen2"), self.run.model)  # of 16 tokens
        self.config = Config(
            run=RunOptions(name="run", steps=STEPS, groups_per_step=2, rollouts_per_group=2, max_lag=1, order=order),
            preprocess=PreprocessOptions(pack_tokens=16, drop_equal_groups=True, **options),
        )
        self.dispatcher = Dispatcher(
            DispatcherSettings(weights={"d": 1.0}, steps=STEPS, groups_per_step=2, rollouts_per_group=2, max_lag=1)
        )
        self.dispatcher.problems({"d": 100})
        self.dispatcher.committed(Version(0, 0))
        self.ledger = LedgerWriter(self.run.ledger(1))
        self.failed: list[str] = []
        self.metrics: list[dict] = []
        record = LedgerDesk(self.ledger.append).record
        bell = Bell()
        self.rollouts = RolloutDesk(self.dispatcher, record, bell, on_evaluation=lambda e, body: None, cursors=cursors)
        self.rollouts.open = True
        self.steps = StepDesk(
            self.dispatcher, self.rollouts, record, bell, trained=0, forks={}, lineage=0, waiting=(),
            on_trained=self._trained, save_now=lambda step: False,
        )  # fmt: skip
        self.bell = bell
        self.token = create_token(self.run.token)
        self.server = ControlServer(
            self.token,
            {**self.rollouts.handlers(), **self.steps.handlers()},
            on_join=lambda member: None,
            on_fail=lambda member, error, trace: self.failed.append(error),
        )
        self.writer = open_writer(self.run, "actor-000", "run", 1, StreamsOptions(roll_groups=1))
        self.rng = np.random.default_rng(0)

    def _trained(self, step, train, data) -> bool:
        self.metrics.append(dict(data))
        return step == STEPS

    def client(self, url: str, role: str) -> ControlClient:
        return ControlClient(url, self.token, role, 0, self.config.control)

    async def act(self, client: ControlClient) -> None:
        """Lease, sample, publish, announce: each announcement twice, as a client does that lost the answer; the third group's
        file is damaged on its way, the fourth group's rewards are all equal."""
        count = 0
        while not self.rollouts.ended:
            answer = await client.call("lease", {"groups": 3}, deadline_s=60, reason="test")
            leases = [Lease(**lease) for lease in answer["leases"]]
            self.rng.shuffle(leases)
            for lease in leases:
                count += 1
                version = self.dispatcher.version
                (file,) = self.writer.append(self._sample(lease, version, equal=count == 4))
                if count == 3:
                    path = self.run.path / file.name
                    data = bytearray(path.read_bytes())
                    data[300] ^= 1
                    path.write_bytes(data)
                announcement = file.announcement()
                for _ in range(2):
                    await client.call("rollouts", announcement, deadline_s=60, reason="test")

    def _sample(self, lease: Lease, version: Version, equal: bool) -> Group:
        def rollout(reward: float) -> Rollout:
            output = self.rng.integers(0, 9, 4).astype(np.int32)
            spans = (VersionSpan(version, 0, 4),)
            logprobs = np.zeros(4, np.float32)
            return Rollout((Turn(np.ones(3, np.int32), output, logprobs, spans, "stop", 0, 0.0, 1.0),), reward)

        rewards = [0.5, 0.5] if equal else [0.0, 1.0]
        return Group(lease.epoch, lease.domain, "", lease.problem, lease.group, lease.issue, tuple(map(rollout, rewards)))

    async def train(self, client: ControlClient) -> None:
        for step in range(1, STEPS + 1):
            file = None
            while file is None:
                file = (await client.call("next_step", {"step": step}, deadline_s=60, reason="test"))["file"]
            assert max(find_steps(self.run.steps)) <= step + 1  # never more than one step ahead
            data = read_step(self.run.path / file["path"], file["bytes"], file["checksum"], run="run")
            assert data.facts.step == step
            assert data.facts.samples == 4
            self.dispatcher.committed(Version(0, step))
            await client.call(
                "trained", {"step": step, "metrics": {}, "data": dict(data.metrics)}, deadline_s=60, reason="test"
            )
        self.rollouts.ended = True
        self.server.stopping = True
        self.bell.ring()


async def run_world(world: World) -> None:
    url = await world.server.start("127.0.0.1")
    child = Child(world.config, world.run, 1, "preprocess", 0, "127.0.0.1", None, world.token, url)
    try:
        async with asyncio.timeout(120):
            async with (
                world.client(url, "preprocess") as own,
                world.client(url, "actor") as actor,
                world.client(url, "trainer") as trainer,
            ):
                await asyncio.gather(preprocess(child, own), world.act(actor), world.train(trainer))
    finally:
        await world.server.close()
    world.ledger.append(world.dispatcher.close("run ended"))
    world.ledger.close()


@pytest.mark.parametrize(
    ("order", "options"),
    [("arrival", {}), ("dispatch", {}), ("dispatch", {"memory_mib": 0}), ("arrival", {"processes": 2})],
    ids=["arrival", "dispatch", "read again", "two workers"],
)
def test_every_rollout_ends_once_in_six_steps(tmp_path, order, options):
    world = World(tmp_path / "run", order, **options)
    asyncio.run(run_world(world))
    assert world.failed == []
    assert list(find_steps(world.run.steps)) == list(range(1, STEPS + 1))

    events = list(ledger_events(read_ledger(world.run.ledgers)))
    issued = Counter(e.rollout for e in events if e.kind == "issued")
    ended = Counter(e.rollout for e in events if e.kind != "issued")
    assert issued == ended
    assert set(issued.values()) == {1}
    assert Counter(e.reason for e in events if e.kind == "issued_again") == {"rollout file unreadable": 2}
    assert Counter(e.reason for e in events if e.kind == "discarded")["all rewards equal"] == 2

    trained = [e for e in events if e.kind == "trained"]
    for step, file in find_steps(world.run.steps).items():
        in_file = read_step(file.path, file.bytes, file.checksum).rollout_ids()
        assert sorted(e.rollout for e in trained if e.step == step) == in_file
    if order == "dispatch":
        groups = [e.rollout.group for e in trained]
        assert groups == sorted(groups)
    assert len(world.metrics) == STEPS
    for metrics in world.metrics:
        assert metrics["lag_max"] <= 1
        assert metrics["reward_mean"] == 0.5
        assert metrics["too_old_tokens"] == 0
        parts = [metrics[name] for name in ("heard_s", "read_s", "build_s", "publish_s")]
        assert min(parts) > 0
        assert metrics["ready_s"] > parts[3]
        if metrics["held_back_s"] == 0:
            assert metrics["ready_s"] > sum(parts)
        assert metrics["held_back_s"] >= 0
    assert world.metrics[-1]["quarantined_files"] == 1
    assert sum(m["dropped_all_equal"] for m in world.metrics) == 2


def test_an_entry_that_cannot_be_read_when_its_step_is_built_is_sampled_again(tmp_path, monkeypatch):
    """The first entry was good when it came; then its disk fails. Step 1 is undone, and its other group trains later."""
    world = World(tmp_path / "run", "dispatch", memory_mib=0)
    read, spoiled = Builder.build, []

    def spoil_and_build(self, order, sequence):
        if not spoiled:
            spoiled.append(order.members[0].entry.name)
            (world.run.path / spoiled[0]).write_bytes(b"gone")
        return read(self, order, sequence)

    monkeypatch.setattr(Builder, "build", spoil_and_build)
    asyncio.run(run_world(world))
    assert world.failed == []
    events = list(ledger_events(read_ledger(world.run.ledgers)))
    assert Counter(e.rollout for e in events if e.kind == "issued") == Counter(e.rollout for e in events if e.kind != "issued")
    assert Counter(e.reason for e in events if e.kind == "issued_again") == {"rollout file unreadable": 4}
    groups = [e.rollout.group for e in events if e.kind == "trained"]
    assert groups == sorted(groups)
    assert world.metrics[-1]["quarantined_files"] == 2


@pytest.mark.parametrize("wrong", ["a version that does not exist yet", "a token of the prompt", "a token of the answer"])
def test_what_this_runs_model_cannot_have_sampled_costs_its_group_and_not_the_run(tmp_path, wrong):
    world = World(tmp_path / "run", "arrival")
    sample, versions = world._sample, []

    def sampled(lease, version, equal):
        versions.append(version)
        first = len(versions) == 1
        group = sample(lease, Version(0, 99) if first and "version" in wrong else version, equal)
        if first and "token" in wrong:
            turn = group.rollouts[0].turns[0]
            (turn.prompt_ids if "prompt" in wrong else turn.output_ids)[-1] = 16
        return group

    world._sample = sampled
    asyncio.run(run_world(world))
    assert world.failed == []
    events = list(ledger_events(read_ledger(world.run.ledgers)))
    assert Counter(e.reason for e in events if e.kind == "issued_again") == {"rollout file unreadable": 4}
    assert {e.version.step for e in events if e.kind == "trained"} == set(range(1, STEPS + 1))
    assert world.metrics[-1]["quarantined_files"] == 2


def test_a_dead_worker_is_an_error_in_words(tmp_path):
    settings = BuilderSettings(str(tmp_path), "run", 1, PreprocessOptions(), StreamsOptions(), 1, 16)
    workshop = Workshop(settings, 2)

    async def lose_a_worker() -> None:
        with pytest.raises(KeyError):
            await workshop.publish(3)  # nothing is built: an error of this one step
        (pid,) = workshop._workers[1]._processes
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"worker 1 of the preprocessor died at step 3: .*preprocess.processes = 2"):
            await workshop.publish(3)

    try:
        asyncio.run(lose_a_worker())
    finally:
        workshop.close()


async def run_process(world: World, then) -> None:
    """`python -m prl.preprocess` in the world, as a node agent starts it; `then(process, actor, trainer)`."""
    url = await world.server.start("127.0.0.1")
    world.run.config.write_text(dump(world.config))
    places = {"PRL_RUN": world.run.path, "PRL_ATTEMPT": 1, "PRL_ROLE": "preprocess", "PRL_INDEX": 0}
    places |= {"PRL_HOST": "127.0.0.1", "PRL_CONTROL_URL": url}
    environment = os.environ | {name: str(value) for name, value in places.items()}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "prl.preprocess", env=environment)
    try:
        async with asyncio.timeout(120), world.client(url, "actor") as actor, world.client(url, "trainer") as trainer:
            await then(process, actor, trainer)
    finally:
        if process.returncode is None:
            process.kill()
        await world.server.close()
        world.ledger.close()


def test_the_process_and_its_workers_end_with_the_run(tmp_path):
    world = World(tmp_path / "run", "arrival", processes=2)

    async def to_the_end(process, actor, trainer) -> None:
        await asyncio.gather(world.act(actor), world.train(trainer))
        assert await process.wait() == 0

    asyncio.run(run_process(world, to_the_end))
    assert world.failed == []
    assert list(find_steps(world.run.steps)) == list(range(1, STEPS + 1))


def test_workers_do_not_outlive_a_killed_process(tmp_path):
    world = World(tmp_path / "run", "arrival", processes=2)

    async def kill(process, actor, trainer) -> None:
        acting = asyncio.create_task(world.act(actor))
        for step in (1, 2):  # one from each worker
            while (await trainer.call("next_step", {"step": step}, deadline_s=60, reason="test"))["file"] is None:
                pass
        children = psutil.Process(process.pid).children()
        assert len(children) >= 2
        process.kill()
        await process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 30)
        assert alive == []
        world.rollouts.ended = True
        world.bell.ring()
        await acting

    asyncio.run(run_process(world, kill))


@pytest.mark.redis
def test_what_was_left_in_redis_makes_room(tmp_path, monkeypatch):
    """By an earlier attempt, and by earlier trainers of this one. Else actors would wait for ever for room behind entries that
    nobody reads."""
    monkeypatch.setattr("prl.orchestrator.steps.LONG_POLL_S", 0.1)
    world = World(tmp_path / "run", "arrival", cursors={"actor-000": 1})
    streams = StreamsOptions(backend="redis", redis=RedisOptions(start=True), roll_groups=1)
    world.config = replace(world.config, streams=streams)
    world.run.attempt(2).mkdir()
    world.run.plan(2).write_text(world.run.plan(1).read_text())
    server = RedisServer(world.run, 1, "127.0.0.1", free_port("127.0.0.1"), world.token, start_s=30)
    with closing(server):
        world.run.redis_url(2).write_text(world.run.redis_url(1).read_text())
        for attempt in (1, 2, 2):
            writer = open_writer(world.run, "actor-000", "run", attempt, streams)
            writer.append(world._sample(Lease("train", "d", 1, 0, attempt, 0, 2), Version(0, 0), equal=False))

        async def start_and_stop() -> None:
            url = await world.server.start("127.0.0.1")
            child = Child(world.config, world.run, 2, "preprocess", 0, "127.0.0.1", None, world.token, url)
            async with world.client(url, "preprocess") as own, asyncio.timeout(30):
                running = asyncio.create_task(preprocess(child, own))
                while left() != [2] and not running.done():  # noqa: ASYNC110 - the server tells nobody
                    await asyncio.sleep(0.1)
                world.rollouts.ended = True
                world.bell.ring()
                await running
            await world.server.close()

        reader = open_reader(world.run, "run", 2, streams)

        def left() -> list[int]:
            return [entry.sequence for entry in reader.entries()]

        assert left() == [0, 1, 2]
        asyncio.run(start_and_stop())
        assert left() == [2]  # the one that is not announced yet
    world.ledger.close()


@pytest.mark.redis
def test_what_was_dropped_behind_a_group_that_waits_makes_room_in_redis(tmp_path, monkeypatch):
    """Else a filter that drops most groups would fill the stream before there are enough for a step."""
    monkeypatch.setattr("prl.orchestrator.steps.LONG_POLL_S", 0.1)
    world = World(tmp_path / "run", "arrival")
    streams = StreamsOptions(backend="redis", redis=RedisOptions(start=True), roll_groups=1)
    world.config = replace(world.config, streams=streams)
    server = RedisServer(world.run, 1, "127.0.0.1", free_port("127.0.0.1"), world.token, start_s=30)
    with closing(server):
        writer, reader = (open_writer(world.run, "actor-000", "run", 1, streams), open_reader(world.run, "run", 1, streams))

        async def drop_all_but_the_first() -> list[int]:
            url = await world.server.start("127.0.0.1")
            child = Child(world.config, world.run, 1, "preprocess", 0, "127.0.0.1", None, world.token, url)
            async with world.client(url, "preprocess") as own, world.client(url, "actor") as actor, asyncio.timeout(60):
                running = asyncio.create_task(preprocess(child, own))
                answer = await actor.call("lease", {"groups": 4}, deadline_s=60, reason="test")
                for number, lease in enumerate(answer["leases"]):
                    (entry,) = writer.append(world._sample(Lease(**lease), Version(0, 0), equal=number > 0))
                    await actor.call("rollouts", entry.announcement(), deadline_s=60, reason="test")
                while len(reader.entries()) > 1 and not running.done():  # noqa: ASYNC110 - the server tells nobody
                    await asyncio.sleep(0.1)
                left = [entry.sequence for entry in reader.entries()]
                world.rollouts.ended = True
                world.bell.ring()
                await running
            await world.server.close()
            return left

        assert asyncio.run(drop_all_but_the_first()) == [0]
    assert world.dispatcher.discard_reasons == {"all rewards equal": 6}
    world.ledger.close()
