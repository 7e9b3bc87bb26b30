"""The weight updater and the samplers' membership against HTTP servers that stand for samplers, to have the faults that real
ones do not show on demand."""

import asyncio
import time
from dataclasses import replace

import pytest
from aiohttp import web

from prl.control.server import Member
from prl.control.token import is_authorized
from prl.flow.membership import Membership, MembershipSettings
from prl.flow.versions import Version
from prl.orchestrator.replicas import ReplicaDesk
from prl.orchestrator.sampler_calls import SamplerCalls
from prl.orchestrator.updates import PATIENCE_S, WeightUpdater
from prl.weights.options import WeightsOptions

TOKEN = "t"
OPTIONS = WeightsOptions(group_s=2, update_s=0.5, bucket_mib=1)
FACTS = {"who": "the trainer", "host": "node7", "settings": {"torch": "2.9.0"}}
MEETING = {"master_address": "127.0.0.1", "master_port": 1, "facts": FACTS}
OFFER = {"lineage": 0, "step": 4, "senders": 1, "tensors": [["a", "float32", [2]]], **MEETING}
WORKERS = [1, 2, 1]
REFUSES, STANDS_STILL, FAILS, DIES = "refuses", "stands still", "fails", "dies"


class Sampler:
    """Notes what it is asked, and does with a verb what it is told to do."""

    def __init__(self):
        self.calls, self.does, self.changed = [], {}, asyncio.Event()

    async def answer(self, request):
        verb = request.match_info["verb"]
        assert is_authorized(request.headers["Authorization"], TOKEN)
        self.calls.append((verb, await request.json()))
        self.changed.set()
        match self.does.get(verb):
            case "refuses":
                return web.Response(status=409, text="live weights have another digest")
            case "fails":
                return web.Response(status=504, text="vLLM's engine did not answer in time")
            case "stands still":
                await asyncio.Event().wait()
            case "dies":
                request.transport.abort()
        return web.json_response({"pause_s": 0.01 * len(self.calls)})

    async def start(self):
        app = web.Application()
        app.router.add_post("/prl/weights/{verb}", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def verbs(self):
        return [verb for verb, _ in self.calls if verb != "fence"]

    async def asked(self, verb):
        """Its body, once it has been asked."""
        async with asyncio.timeout(5):
            while verb not in [name for name, _ in self.calls]:
                self.changed.clear()
                await self.changed.wait()
        return next(body for name, body in reversed(self.calls) if name == verb)


class Rig:
    """Three samplers of one, two and one workers that have joined; the test is the trainer and what is in the samplers."""

    def __init__(self, restarts=1, options=OPTIONS):
        self.options = options
        self.settings = MembershipSettings(replicas=3, restarts=restarts, pause_s=1.0, start_s=60.0)

    async def __aenter__(self):
        self.committed, self.errors, self.words = [], [], []
        self.membership = Membership(self.settings)
        self.desk = ReplicaDesk(
            self.membership,
            {0: 0, 1: 0, 2: 1},
            tell=lambda replica, reason: self.calls.tell_fenced(replica, reason),
            on_change=self.words.append,
        )
        self.calls = SamplerCalls(TOKEN, self.desk)
        self.updater = WeightUpdater(
            self.calls, self.options, self.desk, start_s=5, on_committed=self.committed.append, on_error=self.errors.append
        )
        self.samplers = [Sampler() for _ in WORKERS]
        self.urls = [await sampler.start() for sampler in self.samplers]
        for index in range(3):
            self.join(index)
        self.updater.begin()
        return self

    async def __aexit__(self, *_):
        await self.desk.close()
        await self.updater.close()
        await self.calls.close()
        for sampler in self.samplers:
            await sampler.runner.cleanup()

    def join(self, index):
        self.desk.joined(Member("sampler", index, facts={"url": self.urls[index], "workers": WORKERS[index]}))

    async def offer(self, step=4, senders=1):
        answer = await self.updater.offer({**OFFER, "step": step, "senders": senders})
        self.epoch = answer["epoch"]
        return answer

    def which(self, step):
        return {"lineage": 0, "step": step, "epoch": self.epoch}

    async def stage(self, *replicas, digest="7", step=4, workers=None):
        for replica in replicas:
            for worker in workers or range(WORKERS[replica]):
                where = {"replica": replica, "worker": worker}
                await self.updater.staged({**self.which(step), **where, "digest": digest, "receive_s": 0.1 * (worker + 1)})

    async def sent(self, digest="7", step=4, changed_share=None, lanes=None):
        """By lanes, without others given, the digest of each."""
        lanes = lanes or [digest] * 2 * (self.options.transport == "lanes")
        said = {"digest": digest, "lanes": lanes, "send_s": 0.3, "bytes": 8, "changed_share": changed_share}
        await self.updater.sent({**self.which(step), **said})

    async def settled(self):
        """The update has ended."""
        async with asyncio.timeout(5):
            await self.desk.changed.until(lambda: self.updater.under_way is None, 5)

    async def update(self, *replicas, step):
        """A whole update that all of these take part in, and nobody else."""
        answer = await self.offer(step)
        assert answer["send"]
        assert answer["world_size"] == 1 + sum(WORKERS[replica] for replica in replicas)
        await self.stage(*replicas, step=step)
        await self.sent(step=step)
        await self.settled()
        assert self.errors == []
        assert self.committed[-1].version == Version(0, step)
        assert self.membership.serving == replicas
        return answer


def run(scenario, **options):
    async def main():
        async with Rig(**options) as rig:
            await scenario(rig)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_version_is_armed_verified_and_committed_on_all_samplers():
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
        await rig.stage(0, 1, 2)
        assert not rig.committed  # not before the trainer has said what it sent
        assert rig.membership.serving == ()
        await rig.sent()
        await rig.settled()
        assert rig.committed[0].version == Version(0, 4)
        assert rig.committed[0].values["weights/receive_s"] == pytest.approx(0.2)
        assert rig.samplers[0].calls[-1] == ("commit", {"lineage": 0, "step": 4, "digest": "7", "clear_cache": False})
        assert rig.membership.serving == (0, 1, 2)
        await rig.update(0, 1, 2, step=5)
        assert rig.samplers[0].verbs() == ["connect", "receive", "commit", "receive", "commit"]  # one group for all versions

    run(scenario)


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
        await rig.updater.unsent({**rig.which(4), "error": "left", "missing": []})
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
        orders = asyncio.create_task(rig.desk.handlers()["orders"](Member("agent", 0), {"known": []}))
        elsewhere = asyncio.create_task(rig.desk.handlers()["orders"](Member("agent", 1), {"known": []}))
        rig.desk.fence(1, "silent", "sampler 1 was silent for 30 s")
        rig.desk.fence(1, "silent", "sampler 1 was silent for 30 s")  # told once
        assert (await rig.updater.sending(rig.which(4)))["broken"] == "sampler 1 left the group"
        assert rig.membership.reasons == {"silent": 1}
        await rig.update(0, 2, step=4)
        assert (await rig.samplers[1].asked("fence")) == {"reason": "sampler 1 was silent for 30 s"}
        assert await orders == {"end": [(1, 0)], "stop": False}
        assert not elsewhere.done()  # it is no process of that node
        elsewhere.cancel()

    run(scenario)


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
        await rig.updater.unsent({**rig.which(6), "error": "a deadline passed", "missing": []})  # it reached some, perhaps
        await rig.settled()
        assert await update("12", 0, 1, 2, step=6) is None
        rig.desk.died(1, "sampler 1 was ended by SIGKILL")
        assert await update("13", 0, 2, step=7) is None
        rig.join(1)  # a newcomer
        assert await update("14", 0, 1, 2, step=8) is None
        assert await update("14", 0, 1, 2, step=8) == "14"
        assert rig.errors == []

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
        await rig.updater.staged({**rig.which(4), **where, "error": "connection closed by peer"})
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
                await rig.updater.staged({**rig.which(4), **where, "error": "connection closed by peer"})
                assert "connection closed by peer" in (await rig.updater.sending(rig.which(4)))["broken"]
            await rig.updater.unsent({**rig.which(4), "error": "left", "missing": []})
            await rig.settled()
            assert len(rig.errors) == (epoch == 5)
        assert "could not send version 0:4: left" in str(rig.errors[0])
        assert any("sampler 1 did not receive the weights: connection closed by peer" in words for words in rig.words)
        assert rig.membership.group == (0, 1, 2)

    run(scenario)


FILES = WeightsOptions(transport="filesystem", group_s=2, update_s=0.5)


async def share(rig, replica, digests, step=4):
    """What the workers of a replica add to the digest."""
    for worker, digest in enumerate(digests):
        where = {"replica": replica, "worker": worker, "seed": 0}
        await rig.updater.staged({**rig.which(step), **where, "digest": str(digest), "receive_s": 0.1})


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
        assert (await rig.offer(5))["held"] is None  # each of their workers has a part of it alone

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
            assert (answer["transport"], answer["held"]) == (transport, "7" if (transport, epoch) == ("gather", 3) else None)
            assert rig.epoch == epoch
            await rig.updater.unsent({**rig.which(4), "error": "no route to host", "missing": []})
            await rig.settled()
        assert any("go through files" in words and "no route to host" in words for words in rig.words)
        for step in (4, 5):
            answer = await rig.offer(step)
            assert (answer["transport"], answer["held"]) == ("filesystem", None)
            await rig.sent(step=step)
            await rig.samplers[1].asked("load")
            for replica, digests in enumerate([[7], [3, 4], [7]]):
                await share(rig, replica, digests, step)
            await rig.settled()
            assert rig.committed[-1].version == Version(0, step)
        rig.desk.died(1, "sampler 1 was ended by SIGKILL")
        assert (await rig.update(0, 2, step=6))["held"] is None  # what came by files is no base
        assert rig.samplers[0].verbs()[-3:] == ["connect", "receive", "commit"]
        assert (await rig.update(0, 2, step=7))["held"] == ("7" if transport == "gather" else None)
        assert rig.committed[-1].values["weights/by_files"] == 0

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
        await rig.updater.unsent({**rig.which(4), "error": "waited 2 s", "missing": missing})
        await rig.settled()
        assert [index for index in range(3) if rig.membership.state(index) == "fenced"] == fenced

    run(scenario, options=LANES)


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


def test_an_error_that_comes_before_all_are_armed_is_not_lost():
    async def scenario(rig):
        rig.samplers[2].does = {"receive": STANDS_STILL}
        offer = asyncio.create_task(rig.offer())
        await rig.samplers[2].asked("receive")
        rig.epoch = 3
        await rig.updater.staged({**rig.which(4), "replica": 0, "worker": 0, "error": "no store"})
        rig.desk.fence(2, "silent", "sampler 2 was silent")
        assert (await offer)["epoch"] == 4  # another group, in which all begins anew
        await rig.updater.staged({**rig.which(4), "replica": 0, "worker": 0, "error": "no store"})
        assert "no store" in (await rig.updater.sending(rig.which(4)))["broken"]

    run(scenario)


def test_samplers_that_do_not_come_to_the_building_of_the_group_are_named_by_their_rank():
    async def scenario(rig):
        await rig.offer()
        await rig.updater.unsent({**rig.which(4), "error": "waited 2 s for sampler worker of rank 3", "missing": [3]})
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
            {0: 0},
            tell=lambda *_: asyncio.sleep(0),
            on_change=lambda words: None,
        )
        calls = SamplerCalls(TOKEN, desk)
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

    run(scenario)


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
