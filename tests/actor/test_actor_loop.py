"""What an actor does with the groups that it leases, until the run ends."""

import asyncio
import time

import pytest
from actor_rig import actor_at_work, read_groups, solve, train
from stand_in import SamplerStandIn, choice, reply, until

from prl.domains import digits
from prl.flow.ids import Lease
from prl.metrics.events import read_events
from prl.streams.options import StreamsOptions


def test_leased_groups_come_back_as_announced_files(run):
    async def scenario():
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler) as orchestrator:
            orchestrator.offer(*(train(n) for n in range(40)))
            await until(lambda: len(orchestrator.groups) == 40)
            assert len(sampler.bodies) == 40  # one request a group
            assert max(orchestrator.asked) == 32  # lease_groups
        return orchestrator

    orchestrator = asyncio.run(scenario())
    groups = read_groups(run, orchestrator)
    assert sorted(groups) == list(range(40))
    problems = digits.training_problems()
    for number, group in groups.items():
        assert (group.problem, group.domain, group.issue, len(group.rollouts)) == (f"digits/{number}", "digits", 0, 4)
        for rollout in group.rollouts:
            assert rollout.reward == 1.0
            (turn,) = rollout.turns
            assert "".join(map(str, turn.prompt_ids[:4])) + "=" == problems[number].data["prompt"]
            assert [str(span.version) for span in turn.versions] == ["0:7", "0:8"]
    sequences = [a["sequence"] for a in orchestrator.announcements]
    assert sequences == list(range(len(sequences)))
    assert {a["writer"] for a in orchestrator.announcements} == {"actor-000"}


def test_no_group_waits_for_another(run):
    """The first group's sampler does not answer; the others end, are announced, and others are leased in their place."""

    async def scenario():
        slow = digits.training_problems()[0].data["prompt"]
        slow_ids = [*map(int, slow[:4]), 10]
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler, max_groups=2) as orchestrator:
            sampler.hold, sampler.holds = asyncio.Event(), lambda body: body["token_ids"] == slow_ids
            orchestrator.offer(*(train(n) for n in range(10)))
            await until(lambda: len(orchestrator.groups) == 9)
            assert 0 not in orchestrator.groups
            sampler.hold.set()
            await until(lambda: len(orchestrator.groups) == 10)
            assert max(orchestrator.asked) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["stands still", "dies"])
def test_what_waits_at_a_sampler_that_is_gone_is_asked_elsewhere_within_its_lease(run, monkeypatch, how):
    """Though the actor has no room left, and so leases nothing by which it would hear of it."""
    monkeypatch.setattr("prl.actor.sampler_client._LEAVING_S", 0.2)

    async def scenario():
        async with (
            SamplerStandIn(solve) as gone,
            SamplerStandIn(solve) as other,
            actor_at_work(run, gone, other, max_groups=2) as orchestrator,
        ):
            gone.hold = asyncio.Event()
            orchestrator.offer(train(1), train(2))
            await until(lambda: gone.bodies and other.bodies)
            if how == "dies":
                await gone.__aexit__()
            orchestrator.samplers[0] = None
            orchestrator.bell.ring()
            await until(lambda: len(orchestrator.groups) == 2)
            assert len(orchestrator.asked) <= 2
            await asyncio.sleep(1.2)  # for a line of metrics
        return orchestrator

    orchestrator = asyncio.run(scenario())
    groups = read_groups(run, orchestrator)
    assert sorted(orchestrator.groups) == sorted(groups) == [1, 2]  # each once,
    assert all(group.issue == 0 and len(group.rollouts) == 4 for group in groups.values())
    assert {turn.replica for group in groups.values() for rollout in group.rollouts for turn in rollout.turns} == {1}
    events = read_events(run.metrics / "actor-0.jsonl")[0]
    assert max(event.values.get("actor/errors/retried", 0) for event in events) >= 1
    assert orchestrator.failed == orchestrator.discarded == []


def test_the_end_of_the_run_keeps_what_is_done_and_drops_the_rest(run):
    async def scenario():
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler) as orchestrator:
            orchestrator.offer(train(0), train(1))
            await until(lambda: len(sampler.bodies) == 2)
            sampler.hold = asyncio.Event()
            orchestrator.offer(train(2))
            await until(lambda: len(sampler.bodies) == 3)
            orchestrator.end()
            await until(lambda: sampler.dropped == 1)
        assert sorted(orchestrator.groups) == [0, 1]
        assert not orchestrator.failed

    asyncio.run(scenario())


def test_evaluations_sample_every_held_out_problem_once_at_temperature_one(run):
    async def scenario():
        held_out = digits.evaluation_problems()

        nothing_right = choice([10] * 5, finish_reason="length", spans=[("1:9", 0, 5)])

        def answer(body):  # right where the last digit is even
            even = body["token_ids"][3] % 2 == 0
            return solve(body) if even else reply([nothing_right] * body["sampling_params"]["n"])

        async with SamplerStandIn(answer) as sampler, actor_at_work(run, sampler, temperature=0.5, top_p=0.9) as orchestrator:
            orchestrator.offer(Lease("evaluate", "digits", 0, 20, -1, 2, 512), train(0))
            await until(lambda: orchestrator.evaluations and orchestrator.groups)
            prompts = [tuple(b["token_ids"]) for b in sampler.bodies if b["sampling_params"]["temperature"] == 1.0]
            assert sorted(prompts) == sorted((*map(int, p.data["prompt"][:4]), 10) for p in held_out)
            others = [b["sampling_params"] for b in sampler.bodies if b["sampling_params"]["temperature"] != 1.0]
            assert [(o["temperature"], o["top_p"], o["n"]) for o in others] == [(0.5, 0.9, 4)]
        (result,) = orchestrator.evaluations
        right = sum(int(p.data["prompt"][3]) % 2 == 0 for p in held_out) / 512
        assert result["reward_mean"] == pytest.approx(right)
        assert result["reward_std"] == pytest.approx((right * (1 - right)) ** 0.5)
        expected = {"group": -1, "issue": 2, "problems": 512, "output_tokens": 5 * 512}
        expected |= {"version_start": "0:7", "version_end": "1:9"}
        assert expected.items() <= result.items()
        assert orchestrator.groups == [0]

    asyncio.run(scenario())


def test_an_actor_that_has_no_room_hears_at_once_that_a_step_waits(run):
    """All its groups are in flight, so that it leases none; what it has finished is published."""

    async def scenario():
        streams = StreamsOptions(roll_s=1000, roll_groups=1000)
        async with (
            SamplerStandIn(solve) as sampler,
            actor_at_work(run, sampler, streams=streams, wanted=None, max_groups=2) as orchestrator,
        ):
            orchestrator.offer(train(0), train(1))
            await until(lambda: len(sampler.bodies) == 2)
            sampler.hold = asyncio.Event()
            orchestrator.offer(train(2), train(3))
            await until(lambda: len(sampler.bodies) == 4)
            await asyncio.sleep(0.1)
            assert not orchestrator.groups
            assert not orchestrator.leases
            orchestrator.want(3)  # more than it has; it hears of fewer as well
            await asyncio.sleep(0.1)
            assert not orchestrator.groups
            orchestrator.want(2)
            began_s = time.monotonic()
            await until(lambda: sorted(orchestrator.groups) == [0, 1])
            assert time.monotonic() - began_s < 1.0  # some ms where nobody else computes
            sampler.hold.set()
            await until(lambda: sorted(orchestrator.groups) == [0, 1, 2, 3])

    asyncio.run(scenario())


def test_metrics(run):
    async def scenario():
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler) as orchestrator:
            orchestrator.offer(train(0), Lease("train", "digits", 99_999, 0, 1, 0, 4))  # a problem that is not there
            await until(lambda: orchestrator.groups and orchestrator.failed)
            await asyncio.sleep(1.2)

    asyncio.run(scenario())
    events, _ = read_events(run.metrics / "actor-0.jsonl")
    scalars = [event.values for event in events if event.kind == "scalars"]
    assert sum(values["actor/rollouts_per_s"] for values in scalars) > 0
    assert scalars[-1]["actor/errors/group_unknown_problem"] == 1
    assert all(0 <= values["actor/loop_lag_s"] < 5 for values in scalars)
    assert [event.labels["name"] for event in events if event.kind == "phase"] == ["first rollout request"]
