"""The sampler client against real HTTP servers that replay recorded replies."""

import asyncio
import json
import time

import numpy as np
import pytest
from stand_in import RECORDED, TOKEN, SamplerStandIn, choice, replay, reply, until

from prl.actor.replies import parse_reply, parse_versions
from prl.actor.sampler_client import SamplerClient
from prl.domains.api import SamplerError
from prl.flow.versions import Version
from prl.streams.records import VersionSpan


def client(**changes):
    return SamplerClient(TOKEN, **{"request_s": 10.0, "max_model_len": 64, "max_answers": 512, "vocabulary": 16, **changes})


async def gather(sampler, prompts, **parameters):
    return await asyncio.gather(*(sampler.generate(prompt, **parameters) for prompt in prompts), return_exceptions=True)


def test_a_recorded_reply_becomes_turns():
    async def scenario():
        async with SamplerStandIn() as stand_in, client() as samplers:
            samplers.set_replicas({7: stand_in.url})
            before = time.time()
            first, second = await gather(samplers.sampler(5, 1.0, 1.0), [[3, 1, 9, 4, 10]] * 2)
            assert stand_in.bodies == [
                {
                    "token_ids": [3, 1, 9, 4, 10],
                    "sampling_params": {
                        "n": 2,
                        "max_tokens": 5,
                        "temperature": 1.0,
                        "top_p": 1.0,
                        "stop_token_ids": [],
                    },
                }
            ]
            assert first.prompt_ids.tolist() == [3, 1, 9, 4, 10]
            assert first.output_ids.tolist() == [5, 6]
            assert first.output_ids.dtype == first.prompt_ids.dtype == np.int32
            np.testing.assert_array_equal(first.logprobs, np.array([-2.9505186, -2.988471], np.float32))
            assert first.versions == (VersionSpan(Version(0, 0), 0, 2),)
            assert (first.finish_reason, first.replica) == ("length", 7)
            assert before <= first.started <= first.ended <= time.time()
            assert (second.output_ids.tolist(), second.finish_reason) == ([11], "stop")

    asyncio.run(scenario())


def test_equal_prompts_of_one_turn_of_the_loop_are_one_request():
    async def scenario():
        async with SamplerStandIn() as stand_in, client(max_answers=16) as samplers:
            samplers.set_replicas({0: stand_in.url})
            sampler = samplers.sampler(5, 1.0, 1.0)
            tasks = [asyncio.create_task(sampler.generate(p)) for p in [[1, 2]] * 16 + [[1, 3]] * 20]
            tasks.append(asyncio.create_task(sampler.generate([1, 2], temperature=0.5)))
            tasks.append(asyncio.create_task(sampler.generate([1, 2], stop_token_ids=[4])))
            await asyncio.gather(*tasks)
            asked = sorted((b["token_ids"], b["sampling_params"]["n"]) for b in stand_in.bodies)
            # Other parameters are other requests, and 20 answers are more than one request may ask for.
            assert asked == [([1, 2], 1), ([1, 2], 1), ([1, 2], 16), ([1, 3], 4), ([1, 3], 16)]
            await sampler.generate([1, 2])
            assert len(stand_in.bodies) == 6

    asyncio.run(scenario())


def test_requests_are_spread_by_tokens_in_flight():
    async def scenario():
        async with SamplerStandIn() as a, SamplerStandIn() as b, client(max_model_len=1000, vocabulary=20) as samplers:
            a.hold = b.hold = asyncio.Event()
            samplers.set_replicas({0: a.url, 1: b.url})
            sampler = samplers.sampler(10, 1.0, 1.0)
            tasks = []
            for k, longest in enumerate([100, 10, 10, 10, 10]):  # the long one weighs as much as ten short ones
                tasks.append(asyncio.create_task(sampler.generate([1, k], max_tokens=longest)))
                await asyncio.sleep(0.05)
            assert [len(a.bodies), len(b.bodies)] == [1, 4]
            a.hold.set()
            await asyncio.gather(*tasks)
            a.bodies.clear(), b.bodies.clear()
            await asyncio.gather(*(sampler.generate([2, k]) for k in range(20)))
            assert [len(a.bodies), len(b.bodies)] == [10, 10]

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", [503, 500, 429, 408, 401, "disconnect", "nobody listens"])
def test_a_failing_replica_is_left_alone_and_another_one_asked(fault):
    async def scenario():
        async with SamplerStandIn(lambda body: fault) as bad, SamplerStandIn() as good, client() as samplers:
            samplers.set_replicas({0: "http://127.0.0.1:9" if fault == "nobody listens" else bad.url, 1: good.url})
            turns = await gather(samplers.sampler(5, 1.0, 1.0), [[1, k] for k in range(8)])
            assert [turn.replica for turn in turns] == [1] * 8
            assert 1 <= samplers.counts["retried"] <= 4  # half of the requests met the bad one, before it was known as bad
            assert len(bad.bodies) <= 4

    asyncio.run(scenario())


def test_a_sampler_that_has_no_version_yet_is_asked_again():
    async def scenario():
        answers = iter([503, 503, 503])
        async with SamplerStandIn(lambda body: next(answers, None) or replay(body)) as stand_in, client() as samplers:
            samplers.set_replicas({0: stand_in.url})
            turn = await samplers.sampler(5, 1.0, 1.0).generate([1])
            assert (turn.replica, samplers.counts["retried"]) == (0, 3)

    asyncio.run(scenario())


def test_waits_for_the_first_replica():
    async def scenario():
        async with SamplerStandIn() as stand_in, client() as samplers:
            asked = asyncio.create_task(samplers.sampler(5, 1.0, 1.0).generate([1]))
            await asyncio.sleep(0.05)
            assert not asked.done()
            samplers.set_replicas({0: stand_in.url})
            assert (await asked).replica == 0

    asyncio.run(scenario())


def test_deadlines():
    async def scenario():
        async with SamplerStandIn() as stand_in, client(request_s=0.3) as samplers:
            sampler = samplers.sampler(5, 1.0, 1.0)
            with pytest.raises(SamplerError, match="no replica was known") as caught:
                await sampler.generate([1])
            assert caught.value.reason == "deadline"
            stand_in.hold = asyncio.Event()
            samplers.set_replicas({3: stand_in.url})
            with pytest.raises(SamplerError, match=r"no answer from sampler 3 .* within 0 s") as caught:
                await sampler.generate([1])
            assert caught.value.reason == "deadline"
            await until(lambda: stand_in.dropped == 1)  # the request does not live on in the sampler
            stand_in.hold, stand_in.answer = None, lambda body: 503
            with pytest.raises(SamplerError, match=r"no sampler took a request .*answered 503"):
                await sampler.generate([1])

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", [16, -1, 2**40, 2**70, 1.5, "1", None])
def test_ids_that_are_not_in_the_vocabulary_are_not_sent(wrong):
    async def scenario():
        async with SamplerStandIn() as stand_in, client() as samplers:
            samplers.set_replicas({0: stand_in.url})
            sampler = samplers.sampler(5, 1.0, 1.0)
            first, second, good = await gather(sampler, [[3, wrong], [3, wrong], [0, 15]])
            for error in (first, second):
                assert isinstance(error, SamplerError)
                assert (error.reason, repr(wrong) in str(error)) == ("refused", True)
            assert good.prompt_ids.tolist() == [0, 15]
            await sampler.generate(np.array([4, 5]))
            assert [body["token_ids"] for body in stand_in.bodies] == [[0, 15], [4, 5]]

    asyncio.run(scenario())


def test_a_refused_request_is_not_repeated():
    async def scenario():
        async with SamplerStandIn(lambda body: 400) as stand_in, client() as samplers:
            samplers.set_replicas({0: stand_in.url})
            for error in await gather(samplers.sampler(5, 1.0, 1.0), [[1], [1], [2]]):
                assert isinstance(error, SamplerError)
                assert error.reason == "refused"
            assert len(stand_in.bodies) == 2

    asyncio.run(scenario())


def test_a_wrong_token_is_refused():
    async def scenario():
        options = {"request_s": 0.3, "max_model_len": 9, "max_answers": 1, "vocabulary": 16}
        async with SamplerStandIn() as stand_in, SamplerClient("?", **options) as samplers:
            samplers.set_replicas({0: stand_in.url})
            with pytest.raises(SamplerError, match="401") as caught:
                await samplers.sampler(5, 1.0, 1.0).generate([1])
            assert caught.value.reason == "deadline"  # it may be a stranger at a replica's address: others are asked

    asyncio.run(scenario())


def test_answers_are_cut_to_the_context_and_prompts_must_fit():
    async def scenario():
        async with SamplerStandIn() as stand_in, client(max_model_len=8) as samplers:
            samplers.set_replicas({0: stand_in.url})
            sampler = samplers.sampler(5, 1.0, 1.0)
            await sampler.generate([1] * 6)
            assert stand_in.bodies[0]["sampling_params"]["max_tokens"] == 2
            for prompt in ([1] * 8, []):
                with pytest.raises(SamplerError) as caught:
                    await sampler.generate(prompt)
                assert caught.value.reason == "too_long"

    asyncio.run(scenario())


def test_an_aborted_answer_goes_on_elsewhere_from_its_last_token():
    async def scenario():
        def aborted(body):
            partial = choice([5, 6], finish_reason="abort", spans=[("0:3", 0, 1), ("0:4", 1, 2)])
            nothing = choice([], finish_reason="abort")
            return reply([partial, choice([9, 11]), nothing])

        def rest(body):
            end = 5 - len(body["token_ids"])
            return reply(
                [choice([7, 11], spans=[("0:4", 0, 1), ("0:5", 1, 2)])] if end < 4 else [choice([8], spans=[("0:6", 0, 1)])]
            )

        async with SamplerStandIn(aborted) as leaving, SamplerStandIn(rest) as staying, client() as samplers:
            samplers.set_replicas({0: leaving.url, 1: staying.url})
            first, second, third = await gather(samplers.sampler(5, 1.0, 1.0), [[1]] * 3)
            assert first.output_ids.tolist() == [5, 6, 7, 11]
            np.testing.assert_array_equal(first.logprobs, -(np.array([6, 7, 8, 12]) / 16).astype(np.float32))
            assert first.versions == (
                VersionSpan(Version(0, 3), 0, 1),
                VersionSpan(Version(0, 4), 1, 3),  # one span over the seam
                VersionSpan(Version(0, 5), 3, 4),
            )
            assert (first.finish_reason, first.replica, first.prompt_ids.tolist()) == ("stop", 1, [1])
            assert (second.output_ids.tolist(), second.replica) == ([9, 11], 0)
            assert (third.output_ids.tolist(), third.versions) == ([8], (VersionSpan(Version(0, 6), 0, 1),))
            asked = sorted((b["token_ids"], b["sampling_params"]["max_tokens"]) for b in staying.bodies)
            assert asked == [([1], 5), ([1, 5, 6], 3)]
            assert samplers.counts["aborted"] == 2

    asyncio.run(scenario())


def test_requests_at_a_withdrawn_replica_go_elsewhere(monkeypatch):
    monkeypatch.setattr("prl.actor.sampler_client._LEAVING_S", 0.2)

    async def scenario():
        async with SamplerStandIn() as silent, SamplerStandIn() as other, client() as samplers:
            silent.hold = asyncio.Event()
            samplers.set_replicas({0: silent.url})
            asked = asyncio.create_task(samplers.sampler(5, 1.0, 1.0).generate([1]))
            await until(lambda: silent.bodies)
            samplers.set_replicas({1: other.url})
            assert (await asked).replica == 1
            assert samplers.counts["retried"] == 1

    asyncio.run(scenario())


def test_a_malformed_answer_fails_alone():
    no_logprob = choice([3, 4])
    no_logprob["logprobs"][1] = None  # the wire's word for NaN and infinities
    short = choice([3, 4])
    short["logprobs"].pop()
    bad = [
        {**choice([3]), "token_ids": None},
        {**choice([3]), "token_ids": ["x"]},
        {**choice([3]), "logprobs": None},
        {**choice([3]), "finish_reason": "error"},
        {**choice([3]), "versions": None},
        choice([]),
        choice([3, 4], spans=[("0:1", 0, 1)]),
        choice([3, 4], spans=[("0:1", 0, 1), ("0:2", 0, 2)]),
        choice([3], spans=[("two", 0, 1)]),
        choice([3], spans=[("0:1", 0, 2)]),
        no_logprob,
        short,
        {},
        None,
    ]

    async def scenario():
        choices = reply([choice([3, 11]), *(entry or {} for entry in bad), choice([4, 11])])
        choices["answers"][-2] = None
        async with SamplerStandIn(lambda body: choices) as stand_in, client() as samplers:
            samplers.set_replicas({0: stand_in.url})
            turns = await gather(samplers.sampler(5, 1.0, 1.0), [[1]] * (len(bad) + 3))  # and one that is missing
            assert turns[0].output_ids.tolist() == [3, 11]
            assert turns[len(bad) + 1].output_ids.tolist() == [4, 11]
            for error in [*turns[1 : len(bad) + 1], turns[-1]]:
                assert isinstance(error, SamplerError), error
                assert error.reason == "malformed"
            assert len(stand_in.bodies) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [b"{", b"[]", b"null", json.dumps({"error": "x"}).encode(), b'{"answers": null}'])
def test_a_malformed_reply_fails_its_rollouts_only(answer):
    async def scenario():
        async with (
            SamplerStandIn(lambda body: answer if body["token_ids"] == [1] else replay(body)) as stand_in,
            client() as samplers,
        ):
            samplers.set_replicas({0: stand_in.url})
            bad, good = await gather(samplers.sampler(5, 1.0, 1.0), [[1], [2]])
            assert isinstance(bad, SamplerError)
            assert bad.reason == "malformed"
            assert good.output_ids.tolist() == [5, 6]

    asyncio.run(scenario())


def test_a_request_that_nobody_waits_for_is_dropped():
    async def scenario():
        async with SamplerStandIn() as stand_in, client() as samplers:
            stand_in.hold = asyncio.Event()
            samplers.set_replicas({0: stand_in.url})
            sampler = samplers.sampler(5, 1.0, 1.0)
            tasks = [asyncio.create_task(sampler.generate([1])) for _ in range(3)]
            await until(lambda: stand_in.bodies)
            tasks[0].cancel()
            tasks[1].cancel()
            await asyncio.sleep(0.1)
            assert stand_in.dropped == 0  # the third still waits
            tasks[2].cancel()
            await until(lambda: stand_in.dropped == 1)

    asyncio.run(scenario())


def test_the_recorded_reply_is_parsed_whole():
    answers = parse_reply(RECORDED, 2, 3)
    assert [answer.output_ids.tolist() for answer in answers] == [[5, 6], [11]]


def test_neighbouring_spans_of_one_version_become_one():
    spans = [["0:1", 0, 2], ["0:1", 2, 3], ["1:1", 3, 4]]
    assert parse_versions(spans, 4) == (VersionSpan(Version(0, 1), 0, 3), VersionSpan(Version(1, 1), 3, 4))
