"""Several real samplers under the orchestrator's own parts (membership, updates, seeding); the test is the trainer."""

import asyncio
import os
import queue
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from lab import HOST, OPTIONS, Weights, event_loop, run_folder, started, tiny_model, wait_for_join

from prl.config.hf_config import read_model_config
from prl.config.tensors import tensor_shapes
from prl.control.server import ControlServer, Member
from prl.control.token import authorization, create_token
from prl.flow.membership import Membership, MembershipSettings
from prl.orchestrator.replicas import ReplicaDesk
from prl.orchestrator.sampler_calls import SamplerCalls
from prl.orchestrator.seeding import Seeder
from prl.orchestrator.updates import Committed, UpdateError, WeightUpdater
from prl.runfolder.paths import RunFolder
from prl.weights.agreement import facts
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec, to_json
from prl.weights.transport import SendReport, TrainerEnd, libraries, spec_of

WAIT_S = 30.0


class Fleet:
    def __init__(self, run: RunFolder, token: str, weights: WeightsOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.token, self.loop = token, loop
        self.urls: dict[int, str] = {}
        self.words: list[str] = []  # what happened to the samplers
        self.committed: list[Committed] = []
        self.errors: list[UpdateError] = []
        self._weights = weights
        self._trainer, self._epoch = TrainerEnd(HOST, weights), -1
        shapes = tensor_shapes(read_model_config(run.model))
        self._facts = facts(
            "the trainer",
            os.uname().nodename,
            libraries=libraries("cpu"),
            dtype="float32",
            tensors=[TensorSpec(name, "float32", shape) for name, shape in shapes.items()],
            bucket_bytes=weights.bucket_mib * 2**20,
            environment=os.environ,
        )

    async def open(self, run: RunFolder, count: int) -> str:
        """The address of the control plane."""
        self.membership = Membership(MembershipSettings(count, restarts=0, pause_s=1.0, start_s=WAIT_S))
        self.desk = ReplicaDesk(
            self.membership,
            dict.fromkeys(range(count), 0),
            tell=lambda replica, reason: self._calls.tell_fenced(replica, reason),
            on_change=self.words.append,
        )
        self._calls = SamplerCalls(self.token, self.desk)
        self._updater = WeightUpdater(
            self._calls,
            self._weights,
            self.desk,
            start_s=WAIT_S,
            on_committed=self._on_committed,
            on_error=self.errors.append,
        )
        self._seeder = Seeder(
            run.weights,
            self._calls,
            self._weights,
            self.desk,
            current=lambda: self._updater.current,
            busy=lambda: self._updater.under_way is not None,
        )
        await self._seeder.begin()
        self._seeding = asyncio.create_task(self._seeder.run())

        async def staged(member: Member, body: Mapping[str, Any]) -> Mapping[str, Any]:
            return await (self._seeder if body.get("seed") else self._updater).staged(body)

        async def stored(member: Member, body: Mapping[str, Any]) -> Mapping[str, Any]:
            return await self._seeder.stored(body)

        self.joined: queue.Queue[Member] = queue.Queue()
        handlers = {"staged": staged, "stored": stored}
        self.server = ControlServer(self.token, handlers, on_join=self._on_join, on_fail=self._on_fail)
        return await self.server.start(HOST)

    async def close(self) -> None:
        self._seeding.cancel()
        await asyncio.gather(self._seeding, return_exceptions=True)
        await self.desk.close()
        await self._updater.close()
        await self._calls.close()
        await self._seeder.close()
        await self.server.close()

    def begin(self) -> None:
        self.loop.call_soon_threadsafe(self._updater.begin)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(2 * WAIT_S)

    def publish(self, step: int, weights: Weights, *, newer_comes: bool = False) -> SendReport | None:
        """What the trainer does with a version; returns once the update has ended. None: it was not wanted."""
        report = self.send(step, weights, newer_comes=newer_comes)
        if report is not None:
            assert self.run(self.desk.changed.until(lambda: self._updater.under_way is None, WAIT_S))
        return report

    def send(self, step: int, weights: Weights, *, newer_comes: bool = False, tell: bool = True) -> SendReport | None:
        """Offer a version, send it, and with `tell` say that it is sent: without, the update stays under way."""
        specs = [spec_of(name, tensor) for name, tensor in weights.items()]
        meeting = {"master_address": self._trainer.master_address, "master_port": self._trainer.master_port}
        body = {"lineage": 0, "step": step, "senders": 1, "tensors": to_json(specs), "facts": self._facts.to_json(), **meeting}
        answer = self.run(self._updater.offer(body, newer_comes=newer_comes))
        if not answer["send"]:
            return None
        if answer["epoch"] != self._epoch:
            self._trainer.join(answer["epoch"], answer["world_size"])
            self._epoch = answer["epoch"]
        report = self._trainer.send(weights, None if answer["held"] is None else int(answer["held"]))
        if tell:
            self.tell_sent(step, report)
        return report

    def tell_sent(self, step: int, report: SendReport) -> None:
        took = {"send_s": report.send_s, "bytes": report.bytes, "changed_share": report.changed_share}
        which = {"lineage": 0, "step": step, "epoch": self._epoch}
        self.run(self._updater.sent({**which, "digest": str(report.digest), "lanes": [], **took}))

    def wait_until_serving(self, *replicas: int) -> None:
        assert self.run(self.desk.changed.until(lambda: self.membership.serving == replicas, WAIT_S)), self.words

    def post(self, replica: int, path: str, body: Any) -> tuple[int, Any]:
        async def ask() -> tuple[int, Any]:
            async with (
                aiohttp.ClientSession(headers=authorization(self.token)) as session,
                session.post(self.urls[replica] + path, json=body) as response,
            ):
                return response.status, await response.json()

        return self.run(ask())

    def _on_committed(self, committed: Committed) -> None:
        self.committed.append(committed)
        self._seeder.committed(committed)

    def _on_join(self, member: Member) -> None:
        self.urls[member.index] = member.facts["url"]
        self.desk.joined(member)
        self.joined.put(member)

    def _on_fail(self, member: Member, error: str, trace: str) -> None:
        self.words.append(f"{member.name} failed: {error}\n{trace}")


@contextmanager
def fleet(folder: Path, count: int, weights: WeightsOptions) -> Iterator[Fleet]:
    """So many samplers of `tiny_model`s that have joined; they end as they are told to."""
    run = run_folder(folder, OPTIONS, tiny_model(0), weights)
    with event_loop() as loop, ExitStack() as stack:
        made = Fleet(run, create_token(run.token), weights, loop)
        url = made.run(made.open(run, count))
        stack.callback(lambda: made.run(made.close()))
        samplers = [stack.enter_context(started(run, index, url)) for index in range(count)]
        for _ in samplers:
            wait_for_join(made.joined, samplers)
        made.begin()
        yield made
        made.server.stopping = True
        for one in samplers:
            one.check_end()
