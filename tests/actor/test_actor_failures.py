"""Rollouts and groups that fail at a sampler, in a domain or by a deadline, and what ends the actor."""

import asyncio
import math
import re
from dataclasses import replace

import pytest
from actor_rig import actor_at_work, domain_of, read_groups, solve, train
from stand_in import SamplerStandIn, until

from prl.actor.tokenizer import ModelTokenizer
from prl.domains import digits
from prl.domains.api import Context, DomainError, Problem
from prl.flow.ids import Lease
from prl.streams.records import Rollout


def test_a_rollout_is_tried_again_and_then_its_group_is_given_up(run):
    async def scenario():
        bad = [*map(int, digits.training_problems()[1].data["prompt"][:4]), 10]
        tries = []

        def answer(body):
            whole = solve(body)
            if body["token_ids"] == bad:
                tries.append(body["sampling_params"]["n"])
                whole["answers"][0] = {}  # one malformed answer a request
            return whole

        async with SamplerStandIn(answer) as sampler, actor_at_work(run, sampler) as orchestrator:
            orchestrator.offer(train(0), train(1, issue=3), train(2))
            await until(lambda: orchestrator.failed and len(orchestrator.groups) == 2)
        assert tries == [4, 1, 1]
        assert sorted(orchestrator.groups) == [0, 2]
        (failed,) = orchestrator.failed
        assert (failed["group"], failed["issue"], failed["reason"]) == (1, 3, "sampler_malformed")

    asyncio.run(scenario())


def test_a_group_has_a_deadline(run):
    async def scenario():
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler, rollout_s=0.3) as orchestrator:
            sampler.hold = asyncio.Event()
            orchestrator.offer(train(0), Lease("evaluate", "digits", 0, 0, -1, 0, 3))
            await until(lambda: len(orchestrator.failed) == 2)
        assert {(f["group"], f["reason"]) for f in orchestrator.failed} == {(0, "rollout_deadline"), (-1, "rollout_deadline")}

    asyncio.run(scenario())


def test_a_domain_that_sleeps_for_ever_fails_its_group_alone(run):
    solvable, known = digits.training_problems()[0], Context(ModelTokenizer(run.model), None)
    calls = []

    async def generate_rollout(problem, sampler, context):
        calls.append(problem)
        if len(calls) <= 4:  # the first group's
            await asyncio.Event().wait()
        return await digits.generate_rollout(solvable, sampler, known)

    async def scenario():
        async with (
            SamplerStandIn(solve) as sampler,
            actor_at_work(run, sampler, tasks=domain_of(generate_rollout), rollout_s=0.5) as orchestrator,
        ):
            orchestrator.offer(train(0), train(1))
            await until(lambda: orchestrator.failed and orchestrator.groups)
        assert [(f["group"], f["reason"]) for f in orchestrator.failed] == [(0, "rollout_deadline")]
        assert orchestrator.groups == [1]

    asyncio.run(scenario())


@pytest.mark.parametrize("trouble", ["one fails", "one is late", "both"])
def test_a_group_is_handed_in_without_the_rollouts_that_failed_or_were_late(run, trouble):
    solvable, known = digits.training_problems()[0], Context(ModelTokenizer(run.model), None)
    calls = []

    async def generate_rollout(problem, sampler, context):
        number = len(calls)
        calls.append(number)
        if number == 1 and trouble != "one is late":
            raise KeyError("a fault of the domain's own")
        if number == 2 and trouble != "one fails":
            await asyncio.Event().wait()
        return await digits.generate_rollout(solvable, sampler, known)

    async def score_group(problem, rollouts, context):
        return [replace(rollout, reward=float(k)) for k, rollout in enumerate(rollouts)]

    async def scenario():
        tasks = domain_of(generate_rollout, score_group)
        async with (
            SamplerStandIn(solve) as sampler,
            actor_at_work(run, sampler, tasks=tasks, enough=3, rollout_s=0.5) as orchestrator,
        ):
            orchestrator.offer(train(7))
            await until(lambda: orchestrator.groups or orchestrator.failed)
        return orchestrator

    orchestrator = asyncio.run(scenario())
    if trouble == "both":
        assert [(f["group"], f["reason"]) for f in orchestrator.failed] == [(7, "domain_KeyError")]
        assert not orchestrator.groups
        return
    missing, reason = (1, "domain_KeyError") if trouble == "one fails" else (2, "rollout_deadline")
    assert orchestrator.discarded == [[0, "digits/7", 7, 0, [missing], reason]]
    group = read_groups(run, orchestrator)[7]
    assert group.numbers == tuple(k for k in range(4) if k != missing)
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("where", ["generate_rollout", "score_group", "a reward that is no number"])
def test_a_domain_that_only_fails_ends_the_actor_with_its_cause(run, where):
    solvable, known = digits.training_problems()[0], Context(ModelTokenizer(run.model), None)

    async def generate_rollout(problem, sampler, context):
        if where == "generate_rollout":
            raise KeyError("a fault of the domain's own")
        return await digits.generate_rollout(solvable, sampler, known)

    async def score_group(problem, rollouts, context):
        if where == "score_group":
            raise DomainError("a fault of the domain's own")
        return ["a fault of the domain's own"] * len(rollouts)

    async def scenario():
        async with (
            SamplerStandIn(solve) as sampler,
            actor_at_work(run, sampler, tasks=domain_of(generate_rollout, score_group)) as orchestrator,
        ):
            orchestrator.offer(*(train(n) for n in range(30)))
            await asyncio.wait([orchestrator.working])

    with pytest.raises(RuntimeError, match=r"16 groups in a row failed.*a fault of the domain's own"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "status", "words"),
    [
        ([999_999], 400, "999999"),
        ([-1], 400, "-1"),
        ([3], 400, "answered 400"),
        ([3], 404, "answered 404"),
        ([3] * 64, 200, "64"),
    ],
)
def test_requests_that_are_refused_end_the_actor_with_their_cause(run, caplog, prompt, status, words):
    """Each is asked once: neither its rollouts nor the log go round in circles."""

    async def generate_rollout(problem, sampler, context):
        return Rollout((await sampler.generate(prompt),), 1.0)

    async def scenario():
        async with (
            SamplerStandIn(lambda body: status) as sampler,
            actor_at_work(run, sampler, tasks=domain_of(generate_rollout)) as orchestrator,
        ):
            orchestrator.offer(*(train(n) for n in range(16)))
            await asyncio.wait([orchestrator.working])
            assert len(orchestrator.failed) == 16
            assert {f["reason"] for f in orchestrator.failed} == {"sampler_too_long" if status == 200 else "sampler_refused"}
            assert len(sampler.bodies) <= 1  # one prompt, asked for in one turn of the loop

    with pytest.raises(RuntimeError, match=rf"16 groups in a row failed.*{words}"):
        asyncio.run(scenario())
    assert len([record for record in caplog.records if "failed" in record.message]) <= 2


def cancel(rollout):
    raise asyncio.CancelledError


def nothing_sampled(turn):
    return turn._replace(output_ids=turn.output_ids[:0], logprobs=turn.logprobs[:0], versions=())


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("train", lambda r: replace(r, reward=math.nan), r"rollout 2 of 4: the reward must be .* got nan"),
        ("train", lambda r: replace(r, reward=1e300), r"rollout 2 of 4: the reward must be .* got 1e\+300"),
        ("train", lambda r: replace(r, reward=10**400), r"rollout 2 of 4: the reward must be .* got 1000"),
        ("train", lambda r: replace(r, reward="1.0"), r"rollout 2 of 4: the reward must be .* got '1.0'"),
        ("train", lambda r: replace(r, reward=None), r"rollout 2 of 4: the reward must be .* got None"),
        ("train", lambda r: replace(r, metrics={"x": "y"}), r"rollout 2 of 4: metric 'x' must be .* got 'y'"),
        ("train", lambda r: replace(r, turns=()), r"rollout 2 of 4: expected turns .* got \(\)"),
        ("evaluate", cancel, r"RuntimeError: the domain's code cancelled itself"),
        ("train", cancel, r"RuntimeError: the domain's code cancelled itself"),
        ("train", lambda r: None, r"rollout 2 of 4: expected a Rollout, got None"),
        (
            "train",
            lambda r: replace(r, turns=(r.turns[0]._replace(versions=()),)),
            r"StreamError: .*rollout 2: 5 output",
        ),
        ("train", lambda r: replace(r, turns=(r.turns[0]._replace(output_ids=[1]),)), r"rollout 2 of 4: expected turns"),
        ("evaluate", lambda r: replace(r, turns=(nothing_sampled(r.turns[0]),)), "without one output token"),
    ],
)
def test_a_rollout_that_is_none_fails_its_group_alone(run, caplog, kind, change, words):
    solvable, known = digits.training_problems()[0], Context(ModelTokenizer(run.model), None)

    async def generate_rollout(problem, sampler, context):
        if change is cancel and kind == "train" and not scored:  # else in score_group
            cancel(None)
        return await digits.generate_rollout(solvable, sampler, known)

    async def score_group(problem, rollouts, context):
        bad = 0 if kind == "evaluate" else 2
        return [change(r) if k == bad and not scored else r for k, r in enumerate(rollouts)]

    scored = []

    async def scenario():
        tasks = domain_of(generate_rollout, score_group)
        tasks["digits"] = replace(tasks["digits"], evaluate=[Problem({})])
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler, tasks=tasks) as orchestrator:
            orchestrator.offer(train(7) if kind == "train" else Lease("evaluate", "digits", 0, 0, 7, 0, 1))
            await until(lambda: orchestrator.failed)
            scored.append(True)
            orchestrator.offer(train(8))
            await until(lambda: orchestrator.groups)
        assert [f["group"] for f in orchestrator.failed] == [7]
        assert orchestrator.groups == [8]

    asyncio.run(scenario())
    assert re.search(words, caplog.text)
