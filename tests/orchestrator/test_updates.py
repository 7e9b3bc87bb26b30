"""The course of a weight update: who is offered a version, armed with it, told of it, and when the next one comes."""

import asyncio
import time
from dataclasses import replace

import pytest
from update_rig import MEETING, OFFER, OPTIONS, REFUSES, run

from prl.control.server import Member
from prl.flow.membership import Membership, MembershipSettings
from prl.flow.versions import Version
from prl.orchestrator.replicas import ReplicaDesk
from prl.orchestrator.sampler_calls import SamplerCalls
from prl.orchestrator.updates import PATIENCE_S, WeightUpdater
from prl.weights.options import WeightsOptions


@pytest.mark.parametrize(("policy", "clear_cache"), [("salted", False), ("recompute", True)])
def test_a_version_is_armed_verified_and_committed_on_all_samplers(policy, clear_cache):
    async def scenario(rig):
        answer = await rig.offer()
        assert answer == {
            "epoch": 3,  # three have come, one after another
            "world_size": 5,
            "samplers": [0, 1, 2],
            "send": True,
            "transport": "gather",
            "held": None,
        }
        offsets = [sampler.calls[0][1]["rank_offset"] for sampler in rig.samplers]
        assert offsets == [1, 2, 4]  # rank 0 is the trainer, the second sampler has two workers
        assert all(MEETING.items() <= sampler.calls[0][1].items() for sampler in rig.samplers)
        assert all(sampler.verbs() == ["connect", "receive"] for sampler in rig.samplers)
        await rig.stage(0, 2)
        await rig.stage(1, direct_share=0.25)
        assert not rig.committed  # not before the trainer has said what it sent
        assert rig.membership.serving == ()
        await rig.sent()
        await rig.settled()
        assert rig.committed[0].version == Version(0, 4)
        assert rig.committed[0].values["weights/receive_s"] == pytest.approx(0.2)
        assert rig.committed[0].values["weights/direct_share"] == 0.25
        assert rig.samplers[0].calls[-1] == ("commit", {"lineage": 0, "step": 4, "digest": "7", "clear_cache": clear_cache})
        assert rig.membership.serving == (0, 1, 2)
        await rig.update(0, 1, 2, step=5)
        assert rig.samplers[0].verbs() == ["connect", "receive", "commit", "receive", "commit"]  # one group for all versions

    run(scenario, options=replace(OPTIONS, prefix_cache=policy))


def test_a_difference_is_asked_for_only_of_what_all_have_committed():
    async def scenario(rig):
        async def update(digest, *replicas, step, changed_share=None):
            """The `held` of the offer's answer."""
            held = (await rig.offer(step))["held"]
            await rig.stage(*replicas, step=step, digest=digest)
            await rig.sent(digest, step, changed_share)
            await rig.settled()
            return held

        assert await update("7", 0, 1, 2, step=1) is None
        assert "weights/changed_share" not in rig.committed[-1].values
        assert await update("8", 0, 1, 2, step=2, changed_share=0.25) == "7"
        assert rig.committed[-1].values["weights/changed_share"] == 0.25
        assert rig.committed[-1].values["weights/bytes"] == 8
        rig.samplers[1].does = {"commit": REFUSES}
        assert await update("9", 0, 1, 2, step=3) == "8"
        rig.samplers[1].does = {}
        assert rig.membership.serving == (0, 2)  # the other one has it staged, and its live weights are not known
        assert await update("10", 0, 1, 2, step=4) is None
        assert await update("11", 0, 1, 2, step=5) == "10"
        assert (await rig.offer(6))["held"] == "11"
        failure = {"error": "a connection closed", "missing": [], "overdue": False}  # it reached some, perhaps
        await rig.updater.unsent({**rig.which(6), **failure})
        await rig.settled()
        assert await update("12", 0, 1, 2, step=6) is None
        rig.desk.died(1, "sampler 1 was ended by SIGKILL")
        assert await update("13", 0, 2, step=7) is None
        rig.join(1)  # a newcomer
        assert await update("14", 0, 1, 2, step=8) is None
        assert await update("14", 0, 1, 2, step=8) == "14"
        assert rig.errors == []

    run(scenario)


def test_an_update_that_outlasts_a_step_is_not_waited_for_and_the_newest_version_comes_next():
    async def scenario(rig):
        options = {"newer_comes": True}
        await rig.offer(4)
        for step in (5, 6):
            began = time.monotonic()
            answer = await rig.updater.offer({**OFFER, "step": step}, **options)
            assert not answer["send"]
            assert time.monotonic() - began < PATIENCE_S + 0.2
        last = asyncio.create_task(rig.updater.offer({**OFFER, "step": 7}, **options))
        await asyncio.sleep(0.05)
        await rig.stage(0, 1, 2)
        await rig.sent()
        assert (await last)["send"]
        await rig.stage(0, 1, 2, step=7)
        await rig.sent(step=7)
        await rig.settled()
        assert [one.version.step for one in rig.committed] == [4, 7]
        assert [one.values["weights/passed_over"] for one in rig.committed] == [2, 0]

    run(scenario, options=WeightsOptions(group_s=2, update_s=5, bucket_mib=1))


def test_reports_of_another_version_or_group_are_refused():
    async def scenario(rig):
        await rig.offer()
        with pytest.raises(ValueError, match="0:3 of epoch 3 is not under way"):
            await rig.stage(0, step=3)
        rig.epoch = 2
        with pytest.raises(ValueError, match="0:4 of epoch 2 is not under way"):
            await rig.stage(0)

    run(scenario)


def test_the_first_offer_waits_for_the_samplers():
    async def main():
        desk = ReplicaDesk(
            Membership(MembershipSettings(1, 0, 1.0, 1.0)),
            tell=lambda *_: asyncio.sleep(0),
            on_change=lambda words: None,
        )
        calls = SamplerCalls("t", desk)
        updater = WeightUpdater(calls, OPTIONS, desk, start_s=0.2, on_committed=lambda c: None, on_error=lambda e: None)
        with pytest.raises(ValueError, match="version 0:4 waits for the samplers to start"):
            await updater.offer(OFFER)
        assert updater.current is None
        await updater.close()
        await calls.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_the_next_offer_waits_for_the_commit_before_it():
    async def scenario(rig):
        await rig.offer()
        second = asyncio.create_task(rig.updater.offer({**OFFER, "step": 5}))
        await asyncio.sleep(0.1)
        assert not second.done()
        await rig.stage(0, 1, 2)
        await rig.sent()
        assert (await second)["send"] is True
        assert rig.committed[0].version == Version(0, 4)

    run(scenario, options=replace(OPTIONS, update_s=5))


def test_actors_are_told_at_once_who_serves():
    async def scenario(rig):
        ask = rig.desk.handlers()["samplers"]
        await rig.update(0, 1, 2, step=3)
        known = (await ask(Member("actor", 0), {"known": None}))["samplers"]
        assert known == [[index, url] for index, url in enumerate(rig.urls)]
        news = asyncio.create_task(ask(Member("actor", 0), {"known": known}))
        await asyncio.sleep(0.05)
        assert not news.done()
        rig.desk.died(0, "sampler 0 was ended by SIGKILL")
        assert (await asyncio.wait_for(news, 1))["samplers"] == known[1:]

    run(scenario)
