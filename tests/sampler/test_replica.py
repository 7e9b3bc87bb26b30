"""A sampler whose engine does not confirm that it stands still: real engines do, so it is played."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from prl.sampler.replica import Replica
from prl.weights.options import WeightsOptions


class Engine:
    """Answers nothing to a pause of what it samples, until it is told to; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stands = asyncio.Event()
        self.output_processor = SimpleNamespace(
            process_outputs=None, abort_requests=None, get_num_unfinished_requests=lambda: 0
        )
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(mode)
        if mode == "keep":
            await self.stands.wait()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        self.asked.append(method)


def test_nothing_is_written_over_weights_that_may_be_sampled_from():
    async def main() -> None:
        engine = Engine()
        replica = Replica(engine, WeightsOptions(staging="chunked", prefix_cache="keep", update_s=0.1))
        replica.closed = None  # it serves a version
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
