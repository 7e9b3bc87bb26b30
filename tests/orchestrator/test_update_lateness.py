"""Samplers that come to every group and are late in the midst of the transfer."""

import asyncio
import time

import pytest
from update_rig import OFFER, OPTIONS, run

from prl.flow.versions import Version
from prl.orchestrator import lateness

AT = {"reached": 3, "waited_s": 0.01, "overdue": True}  # it was elsewhere, and its deadline had passed when it came back
WAITED = {"reached": 4, "waited_s": 0.4, "overdue": False}


async def leaves(rig, replica, halt, *, step=4, worker=0):
    body = {"replica": replica, "worker": worker, "error": "left in bucket 4", "missing": [], "halt": halt}
    await rig.updater.staged({**rig.which(step), **body})


async def breaks(rig, *, step=4, overdue=True):
    await rig.updater.unsent({**rig.which(step), "error": "deadline passed", "missing": [], "overdue": overdue})


def test_one_that_does_not_say_where_it_is_is_fenced_and_the_others_get_the_version_at_once(monkeypatch):
    monkeypatch.setattr(lateness, "ANSWER_S", 0.3)

    async def scenario(rig):
        await rig.update(0, 1, 2, step=3)
        await rig.offer()
        await asyncio.sleep(OPTIONS.update_s)
        began = time.monotonic()
        await breaks(rig)
        await leaves(rig, 0, WAITED)
        await leaves(rig, 1, WAITED)  # of its two workers
        await leaves(rig, 2, WAITED)
        again = await rig.updater.offer({**OFFER, "step": 4}, newer_comes=True)  # the trainer does so at once
        assert 0.2 < time.monotonic() - began < 1.0
        assert (again["send"], again["world_size"]) == (True, 3)
        assert rig.membership.reasons == {"late": 1}
        assert "sampler 1 did not say within 0.5 s what became of version 0:4: waited for worker 1" in rig.words
        assert rig.errors == []

    run(scenario)


@pytest.mark.parametrize("sent", [False, True])
def test_one_that_holds_up_the_others_twice_is_fenced(sent):
    """Also where the trainer has sent everything by then, and the others have it."""

    async def scenario(rig):
        await rig.update(0, 1, 2, step=3)
        for _ in range(2):
            assert rig.membership.serving == (0, 1, 2)
            await rig.offer()
            if sent:
                await rig.stage(0, 2)
                await rig.stage(1, workers=[0])
                await rig.sent()
            else:
                await leaves(rig, 0, WAITED)
                await leaves(rig, 1, WAITED)
                await leaves(rig, 2, WAITED)
            await leaves(rig, 1, AT, worker=1)
            if not sent:
                await breaks(rig, overdue=False)  # it was told to leave as the first of them did
            await rig.settled()
        words = [words for words in rig.words if "held up" in words]
        waited = "others had it" if sent else "others had waited 0.4 s for it"
        assert words == [f"sampler 1 held up version 0:4: {waited} when the deadline of 0.5 s passed"] * 2
        assert rig.membership.reasons == {"late": 1}
        assert await rig.samplers[1].asked("fence") == {"reason": words[1]}
        assert not rig.membership.by_files
        await rig.update(0, 2, step=4)

    run(scenario)


def test_what_is_slow_for_all_is_nobodys_fault_and_goes_through_files_at_last():
    async def scenario(rig):
        for transport in ("gather", "gather", "filesystem"):
            assert (await rig.offer())["transport"] == transport
            if transport == "gather":
                for replica, worker in ((0, 0), (1, 0), (1, 1), (2, 0)):
                    await leaves(rig, replica, AT | {"waited_s": 0.05, "reached": 3 + (replica == 2)}, worker=worker)
                await breaks(rig)
                await rig.settled()
        assert rig.membership.group == (0, 1, 2)
        assert rig.membership.reasons == {}

    run(scenario)


def test_what_breaks_before_the_deadline_waits_for_nobody():
    async def scenario(rig):
        await rig.offer()
        began = time.monotonic()
        await leaves(rig, 0, AT | {"overdue": False})
        await breaks(rig, overdue=False)
        await rig.settled()
        assert time.monotonic() - began < OPTIONS.update_s
        assert rig.membership.group == (0, 1, 2)
        await rig.update(0, 1, 2, step=4)
        assert rig.committed[-1].version == Version(0, 4)

    run(scenario)


def test_one_that_dies_while_it_is_waited_for_is_not_late():
    async def scenario(rig):
        await rig.offer()
        await leaves(rig, 0, WAITED)
        await leaves(rig, 2, WAITED)
        await breaks(rig)
        await asyncio.sleep(0.05)
        rig.desk.died(1, "sampler 1 was ended by SIGKILL")
        await rig.settled()
        assert rig.membership.reasons == {"died": 1}
        await rig.update(0, 2, step=4)

    run(scenario)
