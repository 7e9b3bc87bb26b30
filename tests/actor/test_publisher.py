"""The publisher: what is published together and when, and who waits when storage does not keep up."""

import asyncio
import threading
import time

import numpy as np
import pytest

from prl.actor.publisher import Publisher
from prl.control.server import Bell
from prl.flow.versions import Version
from prl.streams.options import StreamsOptions
from prl.streams.records import Group, Rollout, Turn, VersionSpan

MIB = 2**20


def group(number: int, mib: float = 0.0) -> Group:
    tokens = np.zeros(int(mib * MIB / 4), np.int32)
    turn = Turn(tokens, tokens[:0], np.zeros(0, np.float32), (), "stop", 0, 0.0, 0.0)
    turn = turn._replace(output_ids=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32))
    turn = turn._replace(versions=(VersionSpan(Version(0, 0), 0, 1),))
    return Group(0, "d", "", f"d/{number}", number, 0, (Rollout((turn,), 0.0),))


class World:
    """A stream that writes when it is let to, and an orchestrator that hears of it."""

    def __init__(self, **options) -> None:
        self.written: list[list[int]] = []
        self.announced: list[list[int]] = []
        self.bell = Bell()
        self.free = threading.Event()
        self.free.set()
        self.publisher = Publisher(self._write, self._announce, StreamsOptions(**options), wait_s=20)

    def _write(self, groups):
        assert self.free.wait(20)
        self.written.append([g.group for g in groups])
        yield {"groups": self.written[-1]}

    async def _announce(self, entry):
        self.announced.append(entry["groups"])
        self.bell.ring()
        return {"late": []}

    async def until_written(self, count: int) -> None:
        assert await self.bell.until(lambda: len(self.announced) >= count, 20)


def play(scenario) -> None:
    async def limited():
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(limited())


def test_groups_are_published_by_number_bytes_and_age():
    async def scenario():
        world = World(roll_groups=3, roll_mib=1, roll_s=0.2)
        running = asyncio.create_task(world.publisher.run())
        for number in range(3):
            await world.publisher.put(group(number))
        await world.until_written(1)
        await world.publisher.put(group(3, mib=0.6))
        await world.publisher.put(group(4, mib=0.6))
        await world.until_written(2)
        await world.publisher.put(group(5))
        await world.until_written(3)  # after 0.2 s
        world.publisher.close()
        await running
        assert world.written == world.announced == [[0, 1, 2], [3, 4], [5]]

    play(scenario())


def test_what_a_step_wants_is_published_at_once():
    async def scenario():
        world = World(roll_groups=3, roll_s=1000)
        running = asyncio.create_task(world.publisher.run())
        await world.publisher.put(group(0))
        await world.publisher.put(group(1))
        await asyncio.sleep(0.05)
        assert world.written == []
        world.publisher.want(2)
        await world.until_written(1)
        await world.publisher.put(group(2))
        await asyncio.sleep(0.05)
        assert world.written == [[0, 1]]  # one is not enough
        world.publisher.want(1)
        await world.until_written(2)
        await world.publisher.put(group(3))
        await world.until_written(3)
        world.publisher.want(None)  # nothing is wanted any more
        await world.publisher.put(group(4))
        await asyncio.sleep(0.05)
        assert world.written == [[0, 1], [2], [3]]
        world.publisher.want(100)  # more than there may be in a file
        await world.publisher.put(group(5))
        await world.publisher.put(group(6))
        await world.until_written(4)
        world.publisher.close()
        await running
        assert world.announced == [[0, 1], [2], [3], [4, 5, 6]]

    play(scenario())


def test_a_group_that_came_while_others_were_written_is_as_old_as_it_is():
    async def scenario():
        world = World(roll_groups=2, roll_s=0.5)
        world.free.clear()
        running = asyncio.create_task(world.publisher.run())
        await world.publisher.put(group(0))
        await world.publisher.put(group(1))
        await asyncio.sleep(0.05)
        await world.publisher.put(group(2))
        await asyncio.sleep(0.5)
        world.free.set()
        began_s = time.monotonic()
        await world.until_written(2)
        assert time.monotonic() - began_s < 0.4
        assert world.announced == [[0, 1], [2]]
        world.publisher.close()
        await running

    play(scenario())


def test_who_puts_waits_while_too_much_is_not_durable():
    async def scenario():
        world = World(roll_groups=1, queue_mib=2)
        world.free.clear()
        running = asyncio.create_task(world.publisher.run())
        done = []

        async def put_all():
            for number in range(8):
                await world.publisher.put(group(number, mib=0.9))
                done.append(number)

        putting = asyncio.create_task(put_all())
        await asyncio.sleep(0.1)
        assert done == [0, 1, 2]  # 2.7 MiB: one more than fits, what is being written included
        world.free.set()
        await putting
        world.publisher.close()
        await running
        assert [number for entry in world.announced for number in entry] == list(range(8))

    play(scenario())


def test_what_waits_is_published_when_there_is_room_for_no_more():
    """Nothing else would make room: a file's worth is more than may wait."""

    async def scenario():
        world = World(roll_mib=64, roll_s=3600, queue_mib=1)
        running = asyncio.create_task(world.publisher.run())
        for number in range(5):
            await world.publisher.put(group(number, mib=0.6))
        await world.until_written(2)
        assert world.written == [[0, 1], [2, 3]]
        world.publisher.close()
        await running

    play(scenario())


def test_storage_that_never_takes_more_ends_the_wait_with_words():
    async def scenario():
        publisher = Publisher(lambda groups: [], None, StreamsOptions(queue_mib=1), wait_s=0.05)
        await publisher.put(group(0, mib=1))
        with pytest.raises(TimeoutError, match=r"1 MiB of finished groups wait .* streams.queue_mib, and that for 0.05 s"):
            await publisher.put(group(1))

    play(scenario())


def test_an_error_of_the_storage_ends_the_publisher():
    async def scenario():
        def full(groups):
            yield {}
            raise OSError(28, "No space left on device")

        async def announced(entry):
            return {}

        publisher = Publisher(full, announced, StreamsOptions(roll_groups=1), wait_s=1)
        await publisher.put(group(0))
        with pytest.raises(OSError, match="No space"):
            await publisher.run()

    play(scenario())


def test_an_entry_is_announced_before_the_next_is_written():
    """Which may have to wait for room that is made where the first is read."""

    async def scenario():
        heard = threading.Event()

        def write(groups):
            yield {"entry": 0}
            assert heard.wait(10)
            yield {"entry": 1}

        entries = []

        async def announce(entry):
            entries.append(entry["entry"])
            heard.set()
            return {}

        publisher = Publisher(write, announce, StreamsOptions(), wait_s=1)
        await publisher.put(group(0))
        publisher.close()
        await publisher.run()
        assert entries == [0, 1]

    play(scenario())
