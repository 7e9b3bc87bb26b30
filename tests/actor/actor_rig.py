"""An actor between a real control server, real streams and servers that stand in for samplers."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import asdict

from stand_in import TOKEN, choice, reply

from prl.actor.loop import Actor, Parts
from prl.actor.options import ActorOptions
from prl.actor.publisher import rollout_publisher
from prl.actor.sampler_client import SamplerClient
from prl.actor.tasks import Task, load_tasks
from prl.actor.tokenizer import ModelTokenizer
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.server import Bell, ControlServer
from prl.domains.api import Context, Problem
from prl.domains.options import DomainOptions
from prl.domains.registry import Domain
from prl.flow.ids import Lease
from prl.metrics.events import MetricsWriter
from prl.streams.options import StreamsOptions
from prl.streams.reader import read_rollouts
from prl.verifier.client import VerifierClient


class Orchestrator:
    """Hands out what a test puts in `leases` and notes what comes back."""

    def __init__(self, wanted):
        self.leases = []
        self.asked = []  # groups wanted, of each lease call
        self.announcements = []
        self.failed = []
        self.evaluations = []
        self.samplers = []
        self.wanted_groups = wanted
        self.discarded = []
        self.verifier_url = None
        self.stop = False
        self.working = None  # the actor's task
        self.bell = Bell()

    async def lease(self, member, body):
        self.asked.append(body["groups"])
        await self.bell.until(lambda: self.leases or self.stop, 5.0)
        taken, self.leases = self.leases[: body["groups"]], self.leases[body["groups"] :]
        leases = [asdict(lease) for lease in taken]
        return {"leases": leases, "stop": self.stop}

    async def samplers_that_serve(self, member, body):
        def serving():
            return [[k, s.url] for k, s in enumerate(self.samplers) if s is not None]

        await self.bell.until(lambda: serving() != body["known"] or self.stop, 5.0)
        return {"samplers": serving()}

    async def verifier(self, member, body):
        await self.bell.until(lambda: self.verifier_url != body["known"] or self.stop, 5.0)
        return {"url": self.verifier_url}

    async def wanted(self, member, body):
        await self.bell.until(lambda: self.wanted_groups != body["known"] or self.stop, 5.0)
        return {"groups": self.wanted_groups, "stop": self.stop}

    async def rollouts(self, member, body):
        self.announcements.append(body)
        return {"late": []}

    async def group_failed(self, member, body):
        self.failed.append(body)
        return {}

    async def discard(self, member, body):
        self.discarded += body["discarded"]
        return {}

    async def evaluation(self, member, body):
        self.evaluations.append(body)
        return {}

    def end(self):
        self.stop = True
        self.bell.ring()

    def want(self, groups):
        self.wanted_groups = groups
        self.bell.ring()

    def offer(self, *leases):
        self.leases += leases
        self.bell.ring()

    @property
    def groups(self):
        return [group["group"] for announcement in self.announcements for group in announcement["groups"]]


@asynccontextmanager
async def actor_at_work(run, *samplers, tasks=None, enough=None, streams=None, wanted=1, **options):
    """The orchestrator of a running actor, who wants every group at once unless told otherwise; the actor is awaited at the
    end."""
    orchestrator = Orchestrator(wanted)
    orchestrator.samplers = list(samplers)
    calls = ("lease", "verifier", "wanted", "rollouts", "group_failed", "evaluation", "discard")
    handlers = {name: getattr(orchestrator, name) for name in calls} | {"samplers": orchestrator.samplers_that_serve}
    server = ControlServer(TOKEN, handlers, on_join=lambda member: None, on_fail=lambda *_: None)
    url = await server.start("127.0.0.1")
    tasks = tasks or load_tasks([DomainOptions(name="digits")], 1, ModelTokenizer(run.model), None)
    try:
        with MetricsWriter(run.metrics, "actor", 0, 1) as metrics:
            async with (
                ControlClient(url, TOKEN, "actor", 0, ControlOptions()) as control,
                SamplerClient(TOKEN, request_s=5, max_model_len=64, max_answers=512, vocabulary=16) as samplers,
                VerifierClient(TOKEN, deadline_s=5) as verifier,
            ):
                publisher = rollout_publisher(run, "a run", 1, control, streams or StreamsOptions(), ControlOptions())
                parts = Parts(tasks, control, samplers, verifier, publisher, metrics)
                async with asyncio.timeout(30):
                    working = asyncio.create_task(Actor(parts, ActorOptions(**options), call_s=20, enough=enough).run())
                    orchestrator.working = working
                    try:
                        yield orchestrator
                        orchestrator.end()
                        await working
                    finally:
                        working.cancel()
    finally:
        await server.close()


def train(group, rollouts=4, issue=0, index=None):
    return Lease("train", "digits", group if index is None else index, 0, group, issue, rollouts)


def solve(body):
    """The right answer to every digits prompt, in the model folder's documented ids."""
    answer = [*((d + 1) % 10 for d in body["token_ids"][:4]), 11]
    return reply([choice(answer, spans=[("0:7", 0, 2), ("0:8", 2, 5)])] * body["sampling_params"]["n"])


def read_groups(run, orchestrator):
    files = [read_rollouts(run.path / a["path"], a["bytes"], a["checksum"], run="a run") for a in orchestrator.announcements]
    return {group.group: group for groups in files for group in groups}


def domain_of(generate_rollout, score_group=None):
    domain = Domain("digits", lambda *_: [], generate_rollout, score_group, None, None, needs_verifier=False)
    return {"digits": Task(domain, Context(None, None), [Problem({})] * 100, [])}
