"""Weight updates to samplers that refuse, stand still, die or hold other weights than were sent."""

import asyncio
import time

import pytest
from update_rig import DIES, FAILS, OPTIONS, REFUSES, STANDS_STILL, run

from prl.flow.versions import Version


@pytest.mark.parametrize("does", [REFUSES, STANDS_STILL, FAILS, DIES])
@pytest.mark.parametrize("verb", ["connect", "receive"])
def test_a_sampler_that_is_not_armed_is_left_out_before_the_trainer_hears_of_it(verb, does):
    async def scenario(rig):
        rig.samplers[1].does = {verb: does}
        began = time.monotonic()
        answer = await rig.offer()
        assert time.monotonic() - began < OPTIONS.group_s + 1
        assert (answer["send"], answer["world_size"], answer["epoch"]) == (True, 3, 4)
        places = [body for name, body in rig.samplers[2].calls if name == "connect"]
        assert [(place["epoch"], place["rank_offset"], place["world_size"]) for place in places] == [(3, 4, 5), (4, 2, 3)]
        await rig.stage(0, 2)
        await rig.sent()
        await rig.settled()
        assert rig.membership.serving == (0, 2)
        assert rig.membership.reasons == {{REFUSES: "refused", DIES: "unreachable"}.get(does, "late"): 1}
        assert "sampler 1" in rig.words[3]
        assert await rig.samplers[1].asked("fence")  # as far as it still answers
        assert rig.errors == []

    run(scenario)


@pytest.mark.parametrize("verb", ["connect", "receive"])
def test_what_all_samplers_refuse_is_the_senders_fault(verb):
    async def scenario(rig):
        for sampler in rig.samplers:
            sampler.does = {verb: REFUSES}
        with pytest.raises(ValueError, match=f"refused {verb}: 409"):
            await rig.offer()
        assert f"sampler 0 refused {verb}: 409 live weights have another digest" in str(rig.errors[0])

    run(scenario)


def test_a_sampler_that_breaks_off_because_it_died_is_told_as_its_agent_tells_it():
    async def scenario(rig):
        rig.samplers[1].does = {"receive": DIES}
        offer = asyncio.create_task(rig.offer())
        await rig.samplers[1].asked("receive")
        await asyncio.sleep(0.1)
        rig.desk.died(1, "sampler 1 was ended by SIGKILL")
        rig.samplers[1].does = {}
        rig.join(1)  # and is there again before anything else
        assert (await offer)["world_size"] == 5
        assert rig.membership.reasons == {"died": 1}

    run(scenario)


def test_a_sampler_that_dies_while_the_trainer_sends_breaks_the_group_and_the_version_is_sent_again():
    async def scenario(rig):
        await rig.offer()
        watching = asyncio.create_task(rig.updater.sending(rig.which(4)))
        await asyncio.sleep(0.05)
        assert not watching.done()
        assert rig.desk.died(1, "sampler 1 was ended by SIGKILL") == 1.0
        assert await watching == {"broken": "sampler 1 left the group"}
        await rig.updater.unsent({**rig.which(4), "error": "left", "missing": [], "overdue": False})
        await rig.update(0, 2, step=4)
        assert rig.epoch == 4
        rig.join(1)
        assert rig.membership.serving == (0, 2)
        await rig.update(0, 1, 2, step=5)
        assert rig.membership.restarts == 1

    run(scenario)


def test_a_sampler_that_falls_silent_while_the_trainer_sends_is_fenced_and_its_process_is_to_end():
    async def scenario(rig):
        await rig.update(0, 1, 2, step=3)
        rig.samplers[1].does = {"fence": STANDS_STILL}
        await rig.offer()
        rig.desk.fence(1, "silent", "sampler 1 was silent for 30 s")
        rig.desk.fence(1, "silent", "sampler 1 was silent for 30 s")  # told once
        assert (await rig.updater.sending(rig.which(4)))["broken"] == "sampler 1 left the group"
        assert rig.membership.reasons == {"silent": 1}
        await rig.update(0, 2, step=4)
        assert (await rig.samplers[1].asked("fence")) == {"reason": "sampler 1 was silent for 30 s"}
        assert await rig.desk.changed.until(lambda: rig.desk.to_end == [("sampler 1", 0)], 5)

    run(scenario)


def test_a_sampler_that_goes_when_the_others_hold_the_version_does_not_keep_them_from_it():
    async def scenario(rig):
        await rig.offer()
        await rig.stage(0, 2)
        await rig.sent()
        await asyncio.sleep(0.05)
        rig.desk.died(1, "sampler 1 was ended by SIGKILL")
        await rig.settled()
        assert rig.committed[0].version == Version(0, 4)
        assert rig.membership.serving == (0, 2)
        await rig.update(0, 2, step=5)

    run(scenario)


def test_a_version_that_came_through_a_dead_sampler_and_not_to_all_is_not_committed():
    async def scenario(rig):
        await rig.offer()
        await rig.stage(0)
        await rig.sent()
        rig.desk.died(1, "sampler 1 was ended by SIGKILL")
        where = {"replica": 2, "worker": 0}
        await rig.updater.staged({**rig.which(4), **where, "error": "connection closed by peer", "missing": [], "halt": None})
        await rig.settled()
        assert rig.committed == []
        assert all("commit" not in sampler.verbs() for sampler in rig.samplers)
        await rig.update(0, 2, step=4)

    run(scenario)


def test_a_sampler_that_never_stages_is_fenced_at_its_deadline_and_the_others_commit():
    async def scenario(rig):
        await rig.offer()
        await rig.stage(0, 2)
        await rig.stage(1, workers=[0])
        await rig.sent()
        began = time.monotonic()
        await rig.settled()
        assert time.monotonic() - began < OPTIONS.update_s + 0.5
        assert rig.membership.serving == (0, 2)
        assert rig.membership.reasons == {"late": 1}
        assert "sampler 1 did not stage version 0:4 within 0 s: waited for worker 1" in rig.words[3]

    run(scenario)


@pytest.mark.parametrize("does", [STANDS_STILL, FAILS, DIES])
def test_a_sampler_that_does_not_commit_in_time_is_fenced_and_the_others_serve(does):
    async def scenario(rig):
        rig.samplers[0].does = {"commit": does}
        await rig.offer()
        await rig.stage(0, 1, 2)
        await rig.sent()
        await rig.settled()
        assert rig.membership.serving == (1, 2)
        assert rig.committed[0].version == Version(0, 4)
        assert rig.membership.reasons == {"unreachable" if does == DIES else "late": 1}
        await rig.update(1, 2, step=5)

    run(scenario)


def test_a_sampler_that_is_found_dead_in_a_commit_is_not_waited_for():
    async def scenario(rig):
        rig.samplers[0].does = {"commit": STANDS_STILL}
        await rig.offer()
        await rig.stage(0, 1, 2)
        await rig.sent()
        await rig.samplers[0].asked("commit")
        began = time.monotonic()
        rig.desk.fence(0, "silent", "sampler 0 was silent for 30 s")
        await rig.settled()
        assert time.monotonic() - began < OPTIONS.update_s / 2
        assert rig.membership.serving == (1, 2)

    run(scenario)


def test_another_digest_on_one_worker_closes_that_sampler_until_the_next_version():
    async def scenario(rig):
        await rig.update(0, 1, 2, step=3)
        await rig.offer()
        await rig.stage(0, 2)
        await rig.stage(1, workers=[0])
        await rig.stage(1, workers=[1], digest="8")
        await rig.sent()
        await rig.settled()
        assert rig.membership.serving == (0, 2)
        words = "sampler 1 worker 1 staged other weights than the trainer sent for version 0:4: digest 8, not 7"
        assert await rig.samplers[1].asked("fence") == {"reason": words}
        assert rig.samplers[1].verbs() == ["connect", "receive", "commit", "receive"]
        await rig.update(0, 1, 2, step=5)  # in the same group
        assert rig.epoch == 3
        assert rig.membership.reasons == {"mismatch": 1}

    run(scenario)


def test_a_mismatch_after_the_copy_closes_one_sampler_and_again_ends_its_process():
    async def scenario(rig):
        rig.samplers[0].does = {"commit": REFUSES}
        for step in (4, 5):
            await rig.offer(step)
            await rig.stage(0, 1, 2, step=step)
            await rig.sent(step=step)
            await rig.settled()
            assert rig.membership.serving == (1, 2)
        assert rig.membership.reasons == {"mismatch": 2}
        assert rig.membership.to_end == ((0, 0),)
        assert rig.words.count("sampler 0 refused commit: 409 live weights have another digest") == 2

    run(scenario)


@pytest.mark.parametrize("phase", ["staged", "commit"])
def test_other_weights_on_all_samplers_end_the_run(phase):
    async def scenario(rig):
        await rig.update(0, 1, 2, step=3)
        await rig.offer()
        await rig.stage(0, 1, 2, digest="8" if phase == "staged" else "7")
        for sampler in rig.samplers:
            sampler.does = {"commit": REFUSES}
        await rig.sent()
        await rig.settled()
        words = "sampler 0 worker 0 staged other weights" if phase == "staged" else "sampler 0 refused commit: 409"
        assert words in str(rig.errors[0])
        assert rig.updater.current.version == Version(0, 3)

    run(scenario)


def test_an_error_without_anyone_to_blame_builds_another_group_and_the_third_ends_the_run():
    async def scenario(rig):
        for epoch in (3, 4, 5):
            answer = await rig.offer()
            assert (answer["epoch"], answer["transport"]) == (epoch, "filesystem" if epoch == 5 else "gather")
            where = {"replica": 1, "worker": 0}
            if epoch < 5:
                await rig.updater.staged(
                    {**rig.which(4), **where, "error": "connection closed by peer", "missing": [], "halt": None}
                )
                assert "connection closed by peer" in (await rig.updater.sending(rig.which(4)))["broken"]
            await rig.updater.unsent({**rig.which(4), "error": "left", "missing": [], "overdue": False})
            await rig.settled()
            assert len(rig.errors) == (epoch == 5)
        assert "could not send version 0:4: left" in str(rig.errors[0])
        assert any("sampler 1 did not receive the weights: connection closed by peer" in words for words in rig.words)
        assert rig.membership.group == (0, 1, 2)

    run(scenario)


def test_an_error_that_comes_before_all_are_armed_is_not_lost():
    async def scenario(rig):
        rig.samplers[2].does = {"receive": STANDS_STILL}
        offer = asyncio.create_task(rig.offer())
        await rig.samplers[2].asked("receive")
        rig.epoch = 3
        await rig.updater.staged({**rig.which(4), "replica": 0, "worker": 0, "error": "no store", "missing": [], "halt": None})
        rig.desk.fence(2, "silent", "sampler 2 was silent")
        assert (await offer)["epoch"] == 4  # another group, in which all begins anew
        await rig.updater.staged({**rig.which(4), "replica": 0, "worker": 0, "error": "no store", "missing": [], "halt": None})
        assert "no store" in (await rig.updater.sending(rig.which(4)))["broken"]

    run(scenario)


def test_samplers_that_do_not_come_to_the_building_of_the_group_are_named_by_their_rank():
    async def scenario(rig):
        await rig.offer()
        await rig.updater.unsent(
            {**rig.which(4), "error": "waited 2 s for sampler worker of rank 3", "missing": [3], "overdue": False}
        )
        await rig.update(0, 2, step=4)
        assert rig.membership.reasons == {"late": 1}
        assert "sampler 1 did not come to the group of epoch 3" in rig.words

    run(scenario)


def test_samplers_that_others_wait_for_in_vain_are_named_by_their_rank_too():
    """Whose deadline is over first, the trainer's or another sampler's, is chance."""

    async def scenario(rig):
        await rig.offer()
        where, words = {"replica": 0, "worker": 0}, "waited 2 s for sampler worker of rank 3"
        await rig.updater.staged({**rig.which(4), **where, "error": words, "missing": [3], "halt": None})
        await rig.updater.unsent({**rig.which(4), "error": "left", "missing": [], "overdue": False})
        await rig.update(0, 2, step=4)
        assert rig.membership.reasons == {"late": 1}
        assert "sampler 1 did not come to the group of epoch 3" in rig.words

    run(scenario)


def test_without_samplers_the_trainer_goes_on_and_a_restarted_one_gets_the_version_later():
    async def scenario(rig):
        for index in range(3):
            rig.desk.died(index, f"sampler {index} was ended by SIGKILL")
        assert (await rig.offer())["send"] is False
        assert rig.updater.under_way is None
        rig.join(2)
        await rig.update(2, step=4)

    run(scenario)


def test_a_digest_that_the_trainer_never_sends_is_named():
    async def scenario(rig):
        await rig.offer()
        await rig.stage(0, 1, 2)
        await rig.settled()
        assert "waited for the trainer's digest" in str(rig.errors[0])

    run(scenario)
