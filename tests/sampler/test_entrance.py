import asyncio

from prl.sampler.entrance import Entrance

ROUNDS = 50


async def _burst(entrance, requests):
    """The numbers of the requests that have entered, as they enter, and their tasks."""
    entered = []

    async def request(number):
        await entrance.turn()
        entered.append(number)

    return entered, [asyncio.create_task(request(number)) for number in range(requests)]


def test_a_burst_enters_in_order_and_one_in_a_round_of_the_event_loop():
    async def main():
        entered, tasks = await _burst(Entrance(), 20)
        counts = []
        while len(entered) < 20:
            await asyncio.sleep(0)
            counts.append(len(entered))
        await asyncio.gather(*tasks)
        assert entered == list(range(20))
        assert max(b - a for a, b in zip([0, *counts], counts, strict=False)) == 1

    asyncio.run(asyncio.wait_for(main(), 10))


def test_nobody_enters_while_it_is_shut_and_everybody_afterwards():
    async def main():
        entrance = Entrance()
        entered, tasks = await _burst(entrance, 6)
        for _ in range(3):
            await asyncio.sleep(0)
        assert entered
        with entrance.shut():
            inside = len(entered) + 1  # who had its turn already may be on its way
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            assert len(entered) <= inside
            stopped = len(entered)
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            assert len(entered) == stopped < 6
        await asyncio.gather(*tasks)
        assert entered == list(range(6))

    asyncio.run(asyncio.wait_for(main(), 10))


def test_it_opens_again_after_an_update_that_failed_and_passes_over_who_went_away():
    async def main():
        entrance = Entrance()
        try:
            with entrance.shut():
                entered, tasks = await _burst(entrance, 3)
                for _ in range(ROUNDS):
                    await asyncio.sleep(0)
                tasks[0].cancel()
                tasks[1].cancel()
                raise OSError("the engine did not answer")
        except OSError:
            pass
        await asyncio.wait(tasks)
        assert entered == [2]

    asyncio.run(asyncio.wait_for(main(), 10))
