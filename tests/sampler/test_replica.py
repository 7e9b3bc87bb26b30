"""A sampler that stands still, and whose engine does not confirm it or samples nothing, or for which no version comes: played,
for real engines confirm it, and their deadlines are longer."""

import asyncio
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import prl.sampler.traffic
from prl.flow.versions import Version
from prl.sampler.replica import CommitRefused, Replica
from prl.weights.options import WeightsOptions

VERSION, DIGEST = Version(0, 7), 5


class Engine:
    """Answers nothing to a pause of what it samples, until it is told to; keeps what it was asked. One worker."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stands = asyncio.Event()
        self.staged: dict[str, str | bool] = {}
        self.in_flight = 0
        self.output_processor = SimpleNamespace(
            process_outputs=lambda outputs, timestamp: None,
            abort_requests=None,
            get_num_unfinished_requests=lambda: self.in_flight,
        )
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=self._pause,
            resume_scheduler_async=partial(self._hear, "resume"),
            set_weight_version_async=partial(self._hear, "label"),
        )

    async def _hear(self, call: str, *arguments: str) -> None:
        self.asked.append(call)

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(mode)
        if mode == "keep":
            await self.stands.wait()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append(method)
        return [{"prl_staged": self.staged, "prl_commit": {"digest": str(DIGEST), "share": False}}.get(method)]


def standing(**options: float) -> tuple[Engine, Replica]:
    """One that serves a version, and that will stand still for the next one."""
    engine = Engine()
    replica = Replica(engine, WeightsOptions(staging="chunked", prefix_cache="keep", **options))
    replica.closed = None
    return engine, replica


def test_nothing_is_written_over_weights_that_may_be_sampled_from():
    async def main() -> None:
        engine, replica = standing(update_s=0.1)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await replica.receive({})
        assert engine.asked == ["keep", "keep"]
        waiting = asyncio.create_task(replica.entrance.turn())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        engine.stands.set()
        await replica.receive({})
        await replica.load({})
        assert engine.asked[2:] == ["keep", "prl_receive", "prl_load"]
        assert not waiting.done()
        await replica.fence("another test")
        await asyncio.wait_for(waiting, 5)  # and is told that it is closed
        assert replica.closed == "another test"

    asyncio.run(asyncio.wait_for(main(), 30))


def test_those_who_wait_for_a_version_that_does_not_come_are_told_within_a_deadline():
    """Whether nothing arrives, or what arrived is never committed, or not what was asked for."""

    async def main() -> None:
        engine, replica = standing(group_s=0.3, update_s=0.2)
        engine.stands.set()
        began = time.monotonic()
        await replica.receive({})
        waiting = asyncio.create_task(replica.entrance.turn())
        await asyncio.sleep(0.1)
        await replica.receive({})  # the next version, which does not begin the time anew
        with pytest.raises(CommitRefused, match="holds no staged version"):
            await replica.commit(VERSION, DIGEST, clear_cache=False)
        assert not waiting.done()
        await asyncio.wait_for(waiting, 10)
        assert time.monotonic() - began >= 0.5
        assert replica.closed == "this sampler stood still for 0.5 s, and no version was committed"
        await asyncio.sleep(0)
        assert engine.asked == ["keep", "prl_receive", "prl_receive", "prl_staged", "abort"]

        engine.staged = {"version": str(VERSION), "digest": str(DIGEST), "share": False}
        await replica.commit(VERSION, DIGEST, clear_cache=False)
        assert (replica.closed, replica.version) == (None, VERSION)
        assert engine.asked[-5:] == ["prl_staged", "keep", "prl_commit", "label", "resume"]

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_version_that_comes_in_time_has_no_deadline_behind_it():
    async def main() -> None:
        engine, replica = standing(group_s=0.2, update_s=0.2)
        engine.stands.set()
        engine.staged = {"version": str(VERSION), "digest": str(DIGEST), "share": False}
        for _ in range(2):
            await replica.receive({})
            await asyncio.sleep(0.25)
            await replica.commit(VERSION, DIGEST, clear_cache=False)
        await asyncio.sleep(0.5)
        assert replica.closed is None
        assert "abort" not in engine.asked
        await asyncio.wait_for(replica.entrance.turn(), 5)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_pause_begins_where_the_step_under_way_ends():
    """The tokens of that step come a while after the engine was asked to stand still, and count as sampled before it did."""

    async def main() -> None:
        engine, replica = standing()
        engine.in_flight = 1
        engine.staged = {"version": str(VERSION), "digest": str(DIGEST), "share": False}

        async def pause(mode: str, clear_cache: bool) -> None:
            await asyncio.sleep(0.6)
            engine.output_processor.process_outputs([None], time.monotonic())

        async def resume() -> None:
            engine.output_processor.process_outputs([None], time.monotonic() + 0.1)

        engine.engine_core.pause_scheduler_async, engine.engine_core.resume_scheduler_async = pause, resume
        commit = await replica.commit(VERSION, DIGEST, clear_cache=False)
        assert 0 < commit.pause_s < 0.3
        assert 0.1 <= commit.gap_s < 0.5

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_engine_that_does_not_answer_does_not_keep_those_who_wait():
    """It has not confirmed that it stands still, and nobody tells the sampler anything any more."""

    async def main() -> None:
        _, replica = standing(group_s=0.2, update_s=0.1)
        with pytest.raises(TimeoutError):
            await replica.receive({})
        await asyncio.wait_for(replica.entrance.turn(), 10)
        assert replica.closed is not None
        assert "stood still for 0.3 s" in replica.closed

    asyncio.run(asyncio.wait_for(main(), 30))


def test_only_requests_that_wait_in_vain_show_that_an_engine_samples_nothing(monkeypatch):
    monkeypatch.setattr(prl.sampler.traffic, "_LOOK_S", 0.02)
    monkeypatch.setattr(prl.sampler.traffic, "_FIRST_TOKEN_S", 0.01)

    async def main() -> None:
        engine, replica = standing()
        engine.stands.set()
        engine.staged = {"version": str(VERSION), "digest": str(DIGEST), "share": False}
        silence = asyncio.create_task(replica.silence(0.1))
        engine.in_flight = 3
        await asyncio.sleep(0.3)  # before the first version
        await replica.commit(VERSION, DIGEST, clear_cache=False)
        for _ in range(20):  # each of them late, but not by the limit
            await asyncio.sleep(0.015)
            engine.output_processor.process_outputs(["a token"], time.monotonic())
        await replica.receive({})  # it stands still
        await asyncio.sleep(0.3)
        engine.in_flight = 0
        await replica.commit(VERSION, DIGEST, clear_cache=False)
        await asyncio.sleep(0.3)  # nothing was asked
        assert not silence.done()
        engine.in_flight = 2
        words = await asyncio.wait_for(silence, 5)
        assert words == "vLLM's engine has sampled no token for 0.1 s (sample.no_token_s), with 2 requests in flight"

    asyncio.run(asyncio.wait_for(main(), 30))
