"""The verifier with real worker processes and a real server."""

import asyncio
import os
import signal
import sys
import time
from contextlib import asynccontextmanager

import aiohttp
import psutil
import pytest

from prl.control.token import authorization
from prl.domains.api import VerifierError
from prl.verifier.client import VerifierClient
from prl.verifier.pool import CheckError, Pool
from prl.verifier.service import VerifierService

TOKEN = "the run's token"
ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


@asynccontextmanager
async def verifier(processes=1, check_s=20.0, deadline_s=60.0):
    async with (
        Pool(processes, check_s, memory_mib=4096) as pool,
        VerifierService(pool, TOKEN, "127.0.0.1") as service,
        VerifierClient(TOKEN, deadline_s=deadline_s) as client,
    ):
        client.set_url(service.url)
        yield pool, service, client


def test_verdicts_of_a_group():
    answers = {
        r"so it is \boxed{0.5}": "correct",
        r"\boxed{\frac12}": "correct",
        r"\boxed{\frac{2}{4}}": "correct",
        "#### 1/2": "correct",
        r"\boxed{2}": "wrong",
        r"\boxed{x}": "wrong",
        r"\boxed{}": "no_answer",
        "one half": "no_answer",
        "": "no_answer",
        r"\boxed{+++}": "unparsable",
    }

    async def scenario():
        async with verifier() as (_, _, client):
            asked = [*answers, *answers]  # equal answers too
            assert await client.check("math", "1/2", asked) == [*answers.values()] * 2
            assert await client.check("math", "1/2", []) == []

    asyncio.run(scenario())


def test_gold_and_answer_are_not_exchanged():
    """math-verify is not symmetric: an interval answers a relation, a relation does not answer an interval. A bare polynomial
    must be wrapped to be seen at all."""

    async def scenario():
        async with verifier() as (_, _, client):
            assert await client.check("math", "3", [r"\boxed{x = 3}"]) == ["correct"]
            assert await client.check("math", "x^2+2x+1", [r"\boxed{(x+1)^2}"]) == ["correct"]
            assert await client.check("math", "(1,2)", [r"\boxed{1 < x < 2}"]) == ["wrong"]
            assert await client.check("math", "1 < x < 2", [r"\boxed{(1,2)}"]) == ["correct"]

    asyncio.run(scenario())


def test_an_endless_check_is_killed_at_its_deadline_while_others_go_on():
    async def scenario():
        async with verifier(processes=2, check_s=2.0) as (pool, _, client):
            began = time.monotonic()
            endless = asyncio.create_task(client.check("math", "4", [ENDLESS, r"\boxed{4}"]))
            others = 0
            while not endless.done():
                assert await client.check("math", "4", [f"\\boxed{{{others}.0}}"]) == ["correct" if others == 4 else "wrong"]
                others += 1
            took_s = time.monotonic() - began
            assert await endless == ["timeout", "correct"]
            assert 2.0 <= took_s < 10.0
            assert others > 10
            assert pool.killed == 1
            # Both workers serve again: two endless checks are killed side by side.
            began = time.monotonic()
            verdicts = await asyncio.gather(*(client.check("math", str(n), [ENDLESS]) for n in range(2)))
            assert verdicts == [["timeout"], ["timeout"]]
            assert time.monotonic() - began < 20.0  # the first may have to wait for its worker's start
            assert await client.check("math", "4", [r"\boxed{4}"]) == ["correct"]

    asyncio.run(scenario())


def test_a_worker_that_dies_fails_its_check_alone_and_is_replaced():
    async def scenario():
        async with verifier(check_s=30.0) as (pool, _, client):
            (worker,) = pool._all
            check = asyncio.create_task(client.check("math", "4", [ENDLESS]))
            await asyncio.sleep(0.3)
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(VerifierError, match="a worker died"):
                await check
            assert await client.check("math", "4", [r"\boxed{4}"]) == ["correct"]

    asyncio.run(scenario())


def children():
    """Those of this process, but for the ended. Other tests' servers may be among them."""
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("closed_after_s", [0.0, 0.3])
def test_no_worker_outlives_the_pool(closed_after_s):
    """Whatever goes on in it: checks, waits for a worker, workers that are being started anew. Who waits is told."""

    async def scenario():
        others = children()
        async with Pool(2, 60.0, memory_mib=4096) as pool:
            checks = [asyncio.create_task(pool.check("math", "4", ENDLESS)) for _ in range(5)]
            await asyncio.sleep(0.1)
            os.kill(next(iter(pool._all)).pid, signal.SIGKILL)
            await asyncio.wait(checks, timeout=10, return_when="FIRST_COMPLETED")
            await asyncio.sleep(closed_after_s)
            assert children() - others
        assert children() <= others
        async with asyncio.timeout(5):
            ends = await asyncio.gather(*checks, return_exceptions=True)
            assert [type(end) for end in ends] == [CheckError] * 5
            assert sum("the verifier's pool is closed" in str(end) for end in ends) == 4
            with pytest.raises(CheckError, match="closed"):
                await pool.check("math", "4", r"\boxed{4}")
        await asyncio.sleep(1.0)  # for what a check that ended may have begun
        assert children() <= others
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_a_cancelled_check_costs_no_worker():
    async def scenario():
        async with Pool(1, 60.0, memory_mib=4096) as pool:
            for _ in range(2):
                check = asyncio.create_task(pool.check("math", "4", ENDLESS))
                await asyncio.sleep(0.1)
                check.cancel()
                await asyncio.wait([check])
                waiting = asyncio.create_task(pool.check("math", "4", ENDLESS))  # for the worker that is being started
                await asyncio.sleep(0.05)
                waiting.cancel()
            assert await pool.check("math", "4", r"\boxed{4}") == "correct"

    asyncio.run(scenario())


def test_what_cannot_be_checked_is_refused_with_words():
    async def scenario():
        async with verifier() as (_, _, client):
            for rule, gold, words in (("math", "", "cannot parse the gold answer"), ("maths", "4", "'maths'")):
                with pytest.raises(VerifierError, match=words) as caught:
                    await client.check(rule, gold, [r"\boxed{4}"])
                assert caught.value.reason == "refused"

    asyncio.run(scenario())


def test_every_route_wants_the_token():
    async def scenario():
        async with verifier() as (_, service, _), aiohttp.ClientSession() as session:
            body = {"rule": "math", "gold": "4", "answers": []}
            for headers in ({}, authorization("another"), {"Authorization": TOKEN}):
                for method, path in (("POST", "/check"), ("GET", "/check"), ("GET", "/"), ("GET", "/metrics")):
                    async with session.request(method, service.url + path, json=body, headers=headers) as response:
                        assert response.status == 401, path
            async with session.post(f"{service.url}/check", json=body, headers=authorization(TOKEN)) as response:
                assert (response.status, await response.json()) == (200, {"verdicts": []})
            for wrong in ({}, {**body, "answers": "4"}, {**body, "answers": [4]}, {**body, "gold": None}, [1]):
                async with session.post(f"{service.url}/check", json=wrong, headers=authorization(TOKEN)) as response:
                    assert response.status == 400, wrong

    asyncio.run(scenario())


def test_the_client_waits_for_a_verifier_and_gives_up_at_its_deadline():
    async def scenario():
        async with VerifierClient(TOKEN, deadline_s=0.3) as client:
            with pytest.raises(VerifierError, match="no verifier was known") as caught:
                await client.check("math", "4", ["4"])
            assert caught.value.reason == "deadline"
            client.set_url("http://127.0.0.1:9")  # nobody listens there
            with pytest.raises(VerifierError, match=r"127\.0\.0\.1"):
                await client.check("math", "4", ["4"])
        async with verifier() as (_, service, client):
            client.set_url("http://127.0.0.1:9")
            check = asyncio.create_task(client.check("math", "4", [r"\boxed{4}"]))
            await asyncio.sleep(0.1)
            client.set_url(service.url)  # it was restarted elsewhere
            assert await check == ["correct"]

    asyncio.run(scenario())


def test_a_pool_whose_workers_cannot_start_says_so(monkeypatch):
    async def scenario():
        async with Pool(1, 1.0, memory_mib=4096):
            pass

    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(CheckError, match="ended at its start"):
        asyncio.run(scenario())
