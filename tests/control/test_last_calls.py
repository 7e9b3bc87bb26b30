"""What was begun has ended before anybody goes on as if it had."""

import asyncio
import threading

import pytest

from prl.control.client import ControlClient, ControlError
from prl.control.options import ControlOptions
from prl.control.server import ControlServer
from prl.control.tasks import end_tasks, thread_to_its_end, to_its_end


def test_a_server_has_closed_when_what_calls_do_in_threads_has_ended_and_breaks_off_those_that_wait():
    done, working, released = [], threading.Event(), threading.Event()

    def work():
        working.set()
        assert released.wait(30)
        done.append("work")

    async def slow(member, body):
        await thread_to_its_end(work)
        done.append("answer")
        return {}

    async def waiting(member, body):
        await asyncio.Event().wait()

    async def main():
        server = ControlServer(
            "a-token", {"slow": slow, "waiting": waiting}, on_join=lambda member: None, on_fail=lambda *failure: None
        )
        url = await server.start("127.0.0.1")
        async with ControlClient(url, "a-token", "actor", 0, ControlOptions()) as client:
            calls = [asyncio.create_task(client.call(n, {}, deadline_s=1, reason="test")) for n in ("slow", "waiting")]
            assert await asyncio.to_thread(working.wait, 30)
            for call in calls:
                with pytest.raises(ControlError, match="no answer"):
                    await call
        closing = asyncio.create_task(server.close())
        await asyncio.sleep(1.5)  # longer than calls have to be answered
        assert not closing.done()
        released.set()
        await closing
        assert done == ["work"]

    asyncio.run(asyncio.wait_for(main(), 30))


def test_work_that_is_not_to_be_broken_off_goes_on_to_its_end_when_its_task_is_cancelled():
    async def main():
        done, go = [], asyncio.Event()

        async def work():
            await go.wait()
            done.append("work")
            return "answer"

        task = asyncio.create_task(to_its_end(work()))
        await asyncio.sleep(0)
        ending = asyncio.create_task(end_tasks([task], 10))
        await asyncio.sleep(0.05)
        assert not task.done()
        go.set()
        await ending
        assert done == ["work"]
        assert task.cancelled()
        assert await to_its_end(work()) == "answer"

    asyncio.run(main())


def test_what_does_not_end_is_named():
    async def main():
        never = asyncio.Event()
        task = asyncio.create_task(to_its_end(never.wait()), name="the wait for nothing")
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError, match=r"not ended within 0\.05 s: the wait for nothing"):
            await end_tasks([task], 0.05)
        never.set()
        await asyncio.wait([task])

    asyncio.run(main())
