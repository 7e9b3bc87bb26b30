"""The weight updater against HTTP servers that stand for samplers, to have the faults that real ones do not show on demand."""

import asyncio

import pytest
from aiohttp import web

from prl.control.token import is_authorized
from prl.flow.versions import Version
from prl.orchestrator.updates import Replica, WeightUpdater
from prl.weights.options import WeightsOptions

TOKEN = "t"
OPTIONS = WeightsOptions(group_s=2, update_s=0.5, bucket_mib=1)
OFFER = {"lineage": 0, "step": 4, "tensors": [["a", "float32", [2]]], "master_address": "127.0.0.1", "master_port": 1}


class Sampler:
    """Notes what it is asked, and refuses what it is told to refuse."""

    def __init__(self, refuse=None):
        self.calls, self.refuse = [], refuse

    async def answer(self, request):
        verb = request.match_info["verb"]
        assert is_authorized(request.headers["Authorization"], TOKEN)
        self.calls.append((verb, await request.json()))
        if verb == self.refuse:
            return web.Response(status=409, text="live weights have another digest")
        return web.json_response({"pause_s": 0.01 * len(self.calls)})

    async def start(self):
        app = web.Application()
        app.router.add_post("/prl/weights/{verb}", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def verbs(self):
        return [verb for verb, _ in self.calls]


class Rig:
    async def __aenter__(self):
        self.committed, self.errors, self.changed = [], [], asyncio.Event()
        self.updater = WeightUpdater(
            TOKEN, OPTIONS, start_s=5, on_committed=self.note(self.committed), on_error=self.note(self.errors)
        )
        self.samplers = [Sampler(), Sampler()]
        urls = [await sampler.start() for sampler in self.samplers]
        self.updater.set_replicas([Replica(0, urls[0], 1), Replica(1, urls[1], 2)])
        return self

    def note(self, where):
        def keep(value):
            where.append(value)
            self.changed.set()

        return keep

    async def __aexit__(self, *_):
        await self.updater.close()
        for sampler in self.samplers:
            await sampler.runner.cleanup()

    async def stage(self, digests, step=4):
        for (replica, worker), digest in digests.items():
            await self.updater.staged(
                {
                    "lineage": 0,
                    "step": step,
                    "replica": replica,
                    "worker": worker,
                    "digest": digest,
                    "receive_s": 0.1 * (worker + 1),
                }
            )

    async def sent(self, digest="7", step=4):
        await self.updater.sent({"lineage": 0, "step": step, "digest": digest, "send_s": 0.3, "bytes": 8})

    async def settled(self):
        await asyncio.wait_for(self.changed.wait(), 5)
        self.changed.clear()


ALL = {(0, 0): "7", (1, 0): "7", (1, 1): "7"}


def run(scenario):
    async def main():
        async with Rig() as rig:
            await scenario(rig)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_version_is_armed_verified_and_committed_on_all_samplers():
    async def scenario(rig):
        answer = await rig.updater.offer(OFFER)
        assert answer == {"epoch": 1, "world_size": 4, "send": True}
        offsets = [sampler.calls[0][1]["rank_offset"] for sampler in rig.samplers]
        assert offsets == [1, 2]  # rank 0 is the trainer, the first sampler has one worker
        assert all(sampler.verbs() == ["connect", "receive"] for sampler in rig.samplers)
        await rig.stage(ALL)
        assert not rig.committed  # not before the trainer has said what it sent
        await rig.sent()
        await rig.settled()
        assert rig.committed[0].version == Version(0, 4)
        assert rig.committed[0].values["weights/receive_s"] == pytest.approx(0.2)
        assert rig.samplers[0].calls[-1] == ("commit", {"lineage": 0, "step": 4, "digest": "7", "clear_cache": False})
        await rig.updater.offer({**OFFER, "step": 5})
        assert rig.samplers[0].verbs() == ["connect", "receive", "commit", "receive"]  # one group for all versions

    run(scenario)


def test_another_digest_on_one_worker_commits_nothing():
    async def scenario(rig):
        await rig.updater.offer(OFFER)
        await rig.stage({**ALL, (1, 1): "8"})
        await rig.sent()
        await rig.settled()
        assert "sampler 1 worker 1 staged other weights" in str(rig.errors[0])
        assert all("commit" not in sampler.verbs() for sampler in rig.samplers)
        assert rig.updater.current is None

    run(scenario)


@pytest.mark.parametrize(("refuse", "words"), [("connect", "refused connect: 409"), ("receive", "refused receive: 409")])
def test_a_sampler_that_does_not_arm_fails_the_offer(refuse, words):
    async def scenario(rig):
        rig.samplers[1].refuse = refuse
        with pytest.raises(ValueError, match=words):
            await rig.updater.offer(OFFER)
        assert "sampler 1" in str(rig.errors[0])

    run(scenario)


def test_a_mismatch_after_the_copy_is_an_error_with_the_samplers_words():
    async def scenario(rig):
        rig.samplers[0].refuse = "commit"
        await rig.updater.offer(OFFER)
        await rig.stage(ALL)
        await rig.sent()
        await rig.settled()
        assert "sampler 0 refused commit: 409 live weights have another digest" in str(rig.errors[0])
        assert not rig.committed

    run(scenario)


def test_what_never_comes_is_named():
    async def scenario(rig):
        await rig.updater.offer(OFFER)
        await rig.stage({(0, 0): "7"})
        await rig.sent()
        await rig.settled()
        assert "waited for sampler 1 worker 0, sampler 1 worker 1" in str(rig.errors[0])

    run(scenario)


def test_a_digest_that_the_trainer_never_sends_is_named():
    async def scenario(rig):
        await rig.updater.offer(OFFER)
        await rig.stage(ALL)
        await rig.settled()
        assert "waited for the trainer's digest" in str(rig.errors[0])

    run(scenario)


def test_a_workers_error_reaches_the_run():
    async def scenario(rig):
        await rig.updater.offer(OFFER)
        await rig.updater.staged({"lineage": 0, "step": 4, "replica": 1, "worker": 0, "error": "connection closed by peer"})
        assert "sampler 1 did not receive the weights: connection closed by peer" in str(rig.errors[0])

    run(scenario)


def test_reports_of_another_version_are_refused():
    async def scenario(rig):
        await rig.updater.offer(OFFER)
        with pytest.raises(ValueError, match="0:3 is not under way"):
            await rig.stage({(0, 0): "7"}, step=3)

    run(scenario)


def test_the_first_offer_waits_for_the_samplers():
    async def main():
        updater = WeightUpdater(TOKEN, OPTIONS, start_s=0.2, on_committed=lambda c: None, on_error=lambda e: None)
        with pytest.raises(ValueError, match="version 0:4 waits for the samplers to start"):
            await updater.offer(OFFER)
        assert updater.current is None
        await updater.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_the_next_offer_waits_for_the_commit_before_it():
    async def scenario(rig):
        await rig.updater.offer(OFFER)
        second = asyncio.create_task(rig.updater.offer({**OFFER, "step": 5}))
        await asyncio.sleep(0.1)
        assert not second.done()
        await rig.stage(ALL)
        await rig.sent()
        assert (await second)["send"] is True
        assert rig.committed[0].version == Version(0, 4)

    run(scenario)
