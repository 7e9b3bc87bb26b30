"""Weight updates by files and by lanes, and when they take the place of the one group."""

import asyncio
from dataclasses import replace

import pytest
from update_rig import OFFER, OPTIONS, run

from prl.flow.versions import Version
from prl.weights.options import WeightsOptions

FILES = WeightsOptions(transport="filesystem", group_s=2, update_s=0.5)


async def share(rig, replica, digests, step=4):
    """What the workers of a replica add to the digest."""
    for worker, digest in enumerate(digests):
        where = {"replica": replica, "worker": worker, "seed": 0}
        await rig.updater.staged({**rig.which(step), **where, "digest": str(digest), "receive_s": 0.1, "direct_share": 1.0})


def test_by_files_samplers_read_what_the_trainer_has_written_and_their_shares_add_up():
    async def scenario(rig):
        answer = await rig.offer()
        assert (answer["epoch"], answer["send"], answer["transport"], answer["held"]) == (3, True, "filesystem", None)
        assert all(sampler.calls == [] for sampler in rig.samplers)  # there is nothing to read yet
        await rig.sent()
        load = await rig.samplers[1].asked("load")
        assert load == {"lineage": 0, "step": 4, "epoch": 3, "seed": 0, "tensors": OFFER["tensors"]}
        await share(rig, 0, [7])
        await share(rig, 1, [2**64 - 1, 8])
        await share(rig, 2, [7])
        await rig.settled()
        assert rig.membership.serving == (0, 1, 2)
        assert rig.committed[0].values["weights/by_files"] == 1
        assert rig.samplers[0].verbs() == ["load", "commit"]
        assert (await rig.offer(5))["held"] is None  # they have left the group

    run(scenario, options=FILES)


def test_by_files_one_that_dies_or_cannot_read_keeps_nobody_from_the_version():
    async def scenario(rig):
        await rig.offer()
        rig.desk.died(0, "sampler 0 was ended by SIGKILL")
        await asyncio.sleep(0.05)
        assert rig.updater.under_way == Version(0, 4)  # the trainer need not write it again
        await rig.sent()
        await rig.samplers[2].asked("load")
        await share(rig, 2, [7])
        words = "StoredError: weights/0_4/rank_0_0.safetensors: has 3 bytes, of 40 that were written"
        await rig.updater.staged({**rig.which(4), "replica": 1, "worker": 0, "seed": 0, "error": words})
        await rig.settled()
        assert rig.membership.serving == (2,)
        assert await rig.samplers[1].asked("fence") == {"reason": f"sampler 1 did not read the weights: {words}"}
        assert rig.membership.state(1) == "joined"
        assert rig.errors == []

    run(scenario, options=FILES)


def test_by_files_shares_that_do_not_add_up_close_one_sampler():
    async def scenario(rig):
        await rig.offer()
        await rig.sent()
        await rig.samplers[1].asked("load")
        for replica, digests in enumerate([[7], [3, 3], [7]]):
            await share(rig, replica, digests)
        await rig.settled()
        assert rig.membership.serving == (0, 2)
        words = "sampler 1 of all workers staged other weights than the trainer sent for version 0:4: digest 6, not 7"
        assert words in rig.words

    run(scenario, options=FILES)


def test_what_nobody_can_read_is_written_again_and_the_third_time_ends_the_run():
    async def scenario(rig):
        for tried in (1, 2, 3):
            await rig.offer()
            await rig.sent()
            await rig.samplers[2].asked("load")
            for replica in range(3):
                where = {"replica": replica, "worker": 0, "seed": 0}
                await rig.updater.staged({**rig.which(4), **where, "error": "torn"})
            await rig.settled()
            assert len(rig.errors) == (tried == 3)
            for sampler in rig.samplers:
                sampler.calls.clear()
        assert "sampler 0 did not read the weights: torn" in str(rig.errors[0])
        assert rig.membership.group == (0, 1, 2)

    run(scenario, options=FILES)


@pytest.mark.parametrize("transport", ["gather", "lanes"])
def test_a_group_that_breaks_twice_is_done_without_until_somebody_comes_or_goes(transport):
    async def scenario(rig):
        await rig.update(0, 1, 2, step=3)
        for epoch in (3, 4):
            answer = await rig.offer()
            assert (answer["transport"], answer["held"]) == (transport, "7" if epoch == 3 else None)
            assert rig.epoch == epoch
            await rig.updater.unsent({**rig.which(4), "error": "no route to host", "missing": [], "overdue": False})
            await rig.settled()
        assert any("go through files" in words and "no route to host" in words for words in rig.words)
        beside = await rig.updater.offer({**OFFER, "whole": False})  # the trainer computes, and cannot gather anything
        assert (beside["send"], beside["later"], rig.updater.under_way) == (False, True, None)
        for step in (4, 5):
            answer = await rig.offer(step)
            assert (answer["transport"], answer["held"]) == ("filesystem", None)
            await rig.sent(step=step, gathered_bytes=8)
            await rig.samplers[1].asked("load")
            for replica, digests in enumerate([[7], [3, 4], [7]]):
                await share(rig, replica, digests, step)
            await rig.settled()
            assert rig.committed[-1].version == Version(0, step)
            assert rig.committed[-1].values["weights/gathered_bytes"] == 8
        rig.desk.died(1, "sampler 1 was ended by SIGKILL")
        assert (await rig.update(0, 2, step=6))["held"] is None  # what came by files is no base
        assert rig.samplers[0].verbs()[-3:] == ["connect", "receive", "commit"]
        assert (await rig.update(0, 2, step=7))["held"] == "7"
        assert rig.committed[-1].values["weights/by_files"] == 0
        assert rig.committed[-1].values["weights/gathered_bytes"] == 0

    run(scenario, options=replace(OPTIONS, transport=transport))


LANES = replace(OPTIONS, transport="lanes")


def test_by_lanes_each_worker_holds_what_its_lane_was_sent():
    async def scenario(rig):
        answer = await rig.offer(senders=2)
        assert (answer["transport"], answer["world_size"], answer["samplers"]) == ("lanes", 6, [0, 1, 2])
        places = [await sampler.asked("connect") for sampler in rig.samplers]
        assert [place["rank_offset"] for place in places] == [2, 3, 5]  # behind both of the trainer's
        assert [place["lanes"] for place in places] == [{"trainer_ranks": 2, "samplers": [0, 1, 2]}] * 3
        await rig.stage(0, 2, digest="9")
        await rig.stage(1, digest="9", workers=[0])
        await rig.stage(1, digest="5", workers=[1])
        await rig.sent("14", lanes=["9", "5"])
        await rig.settled()
        assert rig.membership.serving == (0, 1, 2)
        assert (await rig.samplers[1].asked("commit"))["digest"] == "14"  # of the version
        rig.desk.died(0, "sampler 0 was ended by SIGKILL")
        await rig.offer(5, senders=2)
        assert (await rig.samplers[1].asked("connect"))["lanes"] == {"trainer_ranks": 2, "samplers": [1, 2]}

    run(scenario, options=LANES)


def test_by_lanes_a_worker_with_what_another_lane_was_sent_closes_its_sampler_alone():
    async def scenario(rig):
        await rig.offer(senders=2)
        await rig.stage(0, 1, 2, digest="9")
        await rig.sent("14", lanes=["9", "5"])
        await rig.settled()
        assert rig.membership.serving == (0, 2)
        words = "sampler 1 worker 1 staged other weights than the trainer sent for version 0:4: digest 9, not 5"
        assert words in rig.words

    run(scenario, options=LANES)


@pytest.mark.parametrize(("missing", "fenced"), [([0, 1], []), ([1, 4], [1]), ([2, 3, 5], [0, 1, 2])])
def test_by_lanes_who_did_not_come_is_known_by_the_rank(missing, fenced):
    async def scenario(rig):
        await rig.offer(senders=2)
        await rig.updater.unsent({**rig.which(4), "error": "waited 2 s", "missing": missing, "overdue": False})
        await rig.settled()
        assert [index for index in range(3) if rig.membership.state(index) == "fenced"] == fenced

    run(scenario, options=LANES)
