"""HTTP servers that stand for samplers, to have the faults that real ones do not show on demand, around the weight updater and
the samplers' membership."""

import asyncio

from aiohttp import web

from prl.control.server import Member
from prl.control.token import is_authorized
from prl.flow.membership import Membership, MembershipSettings
from prl.flow.versions import Version
from prl.orchestrator.replicas import ReplicaDesk
from prl.orchestrator.sampler_calls import SamplerCalls
from prl.orchestrator.updates import WeightUpdater
from prl.weights.options import WeightsOptions

TOKEN = "t"
OPTIONS = WeightsOptions(group_s=2, update_s=0.5, bucket_mib=1)
FACTS = {"who": "the trainer", "host": "node7", "settings": {"torch": "2.9.0"}}
MEETING = {"master_address": "127.0.0.1", "master_port": 1, "facts": FACTS}
OFFER = {"lineage": 0, "step": 4, "senders": 1, "tensors": [["a", "float32", [2]]], "whole": True, **MEETING}
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

    async def stage(self, *replicas, digest="7", step=4, workers=None, direct_share=1.0):
        for replica in replicas:
            for worker in workers or range(WORKERS[replica]):
                where = {"replica": replica, "worker": worker}
                said = {"digest": digest, "receive_s": 0.1 * (worker + 1), "direct_share": direct_share}
                await self.updater.staged({**self.which(step), **where, **said})

    async def sent(self, digest="7", step=4, changed_share=None, lanes=None, gathered_bytes=0):
        """By lanes, without others given, the digest of each."""
        lanes = lanes or [digest] * 2 * (self.options.transport == "lanes")
        said = {"digest": digest, "lanes": lanes, "send_s": 0.3, "bytes": 8, "changed_share": changed_share}
        said["gathered_bytes"] = gathered_bytes
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
