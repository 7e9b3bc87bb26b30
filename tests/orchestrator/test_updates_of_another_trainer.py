"""A trainer that dies while it brings a version to the samplers, and the one that takes its place in a new lineage."""

import asyncio

import pytest
from update_rig import OFFER, WORKERS, run

from prl.flow.versions import Version


async def serve_lineage(rig, lineage, step):
    """Its trainer meets all samplers in another group, and they commit its version."""
    before = rig.epoch
    answer = await rig.updater.offer({**OFFER, "lineage": lineage, "step": step, "master_port": 2})
    assert (answer["send"], answer["world_size"], answer["held"]) == (True, 1 + sum(WORKERS), None)
    assert answer["epoch"] > before
    places = [body for name, body in rig.samplers[0].calls if name == "connect"]
    assert (places[-1]["epoch"], places[-1]["master_port"]) == (answer["epoch"], 2)
    which = {"lineage": lineage, "step": step, "epoch": answer["epoch"]}
    for replica, workers in enumerate(WORKERS):
        for worker in range(workers):
            said = {"digest": "7", "receive_s": 0.1, "direct_share": 1.0}
            await rig.updater.staged({**which, "replica": replica, "worker": worker, **said})
    said = {"digest": "7", "lanes": [], "send_s": 0.1, "bytes": 8, "changed_share": None, "gathered_bytes": 0}
    await rig.updater.sent({**which, **said})
    await rig.settled()
    assert rig.committed[-1].version == Version(lineage, step)


@pytest.mark.parametrize("deaths", [1, 4])
def test_a_transfer_whose_trainer_died_is_given_up_at_once_and_nobody_is_to_blame(deaths):
    async def scenario(rig):
        await rig.update(0, 1, 2, step=3)
        for lineage in range(deaths):
            answer = await rig.updater.offer({**OFFER, "lineage": lineage, "step": 4})
            rig.epoch = answer["epoch"]
            assert answer["send"]
            rig.updater.leave(lineage)
            async with asyncio.timeout(1):
                await rig.settled()
        assert rig.committed[-1].version == Version(0, 3)
        assert rig.errors == []
        assert (rig.membership.serving, rig.membership.by_files, rig.membership.reasons) == ((0, 1, 2), False, {})
        await serve_lineage(rig, deaths, 2)
        commits = [body for name, body in rig.samplers[2].calls if name == "commit"]
        assert [body["clear_cache"] for body in commits] == [False, True]  # what an abandoned past computed is forgotten
        assert [(body["lineage"], body["step"]) for body in commits] == [(0, 3), (deaths, 2)]

    run(scenario)


def test_what_a_trainer_that_is_gone_still_offered_is_refused():
    async def scenario(rig):
        await rig.offer(3)
        waiting = asyncio.create_task(rig.offer(4))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        rig.updater.leave(0)
        with pytest.raises(ValueError, match="version 0:4 is not sent: its trainer has ended"):
            await waiting
        with pytest.raises(ValueError, match="version 0:5 is not sent: its trainer has ended"):
            await rig.offer(5)
        assert [name for name, _ in rig.samplers[0].calls] == ["connect", "receive"]
        await serve_lineage(rig, 1, 2)

    run(scenario)


def test_a_version_that_is_being_committed_when_the_trainer_dies_is_served_until_the_next_one():
    async def scenario(rig):
        await rig.offer(3)
        await rig.stage(0, 1, 2, step=3)
        committing = asyncio.create_task(rig.sent(step=3))
        await rig.samplers[0].asked("commit")
        rig.updater.leave(0)
        await committing
        await rig.settled()
        assert rig.committed[-1].version == Version(0, 3)
        await serve_lineage(rig, 1, 1)

    run(scenario)
