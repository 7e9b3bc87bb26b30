"""Several real samplers under the orchestrator's own half for them; the test is the trainer."""

import asyncio
import os
import queue
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from launch import HOST, OPTIONS, event_loop, run_folder, started, wait_for_join
from tiny_models import Weights, tiny_model

from prl.config.hf_config import read_model_config
from prl.config.load import load
from prl.config.schema import Config
from prl.config.tensors import tensor_shapes
from prl.control.server import ControlServer, Member
from prl.control.token import authorization, create_token
from prl.flow.dispatcher import Dispatcher
from prl.orchestrator.binding import Plan
from prl.orchestrator.children import ChildPlan
from prl.orchestrator.resume import dispatcher_settings
from prl.orchestrator.samplers import Samplers
from prl.orchestrator.updates import Committed, UpdateError
from prl.runfolder.paths import RunFolder
from prl.weights.agreement import facts
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec, to_json
from prl.weights.transport import SendReport, TrainerEnd, libraries, spec_of

WAIT_S = 30.0


class Fleet:
    def __init__(self, run: RunFolder, config: Config, token: str, count: int, loop: asyncio.AbstractEventLoop) -> None:
        """In the event loop that is given; the methods that are no coroutines are for another thread."""
        self.token, self.loop = token, loop
        self.urls: dict[int, str] = {}
        self.joined: queue.Queue[Member] = queue.Queue()
        self.words: list[str] = []  # what happened to the samplers
        self.committed: list[Committed] = []
        self.errors: list[UpdateError] = []
        self._trainer, self._epoch = TrainerEnd(HOST, config.weights), -1
        self._facts = facts(
            "the trainer",
            os.uname().nodename,
            libraries=libraries("cpu"),
            dtype="float32",
            tensors=[TensorSpec(name, "float32", shape) for name, shape in tensor_shapes(read_model_config(run.model)).items()],
            bucket_bytes=config.weights.bucket_mib * 2**20,
            environment=os.environ,
        )
        plan = Plan(1, (), tuple(ChildPlan("sampler", index, 0, (), {}) for index in range(count)), 1)
        steps = SimpleNamespace(finishing=False, leaving=False)  # nothing is trained
        work = SimpleNamespace(dispatcher=Dispatcher(dispatcher_settings(config)), steps=steps, lineage=0)
        self._samplers = Samplers(
            run,
            config,
            plan,
            token,
            work=lambda: work,
            leaving=lambda: False,
            on_change=lambda membership, words: self.words.append(words),
            on_committed=self.committed.append,
            on_error=self.errors.append,
        )
        self.membership, self._handlers = self._samplers.membership, self._samplers.handlers()
        self.server = ControlServer(token, self._handlers, on_join=self._on_join, on_fail=self._on_fail)

    async def open(self) -> str:
        """The address of the control plane."""
        await self._samplers.prepare()
        self._seeding = asyncio.create_task(self._samplers.seed())
        return await self.server.start(HOST)

    async def begin(self) -> None:
        """All are there."""
        self._samplers.begin()

    async def close(self) -> None:
        self._seeding.cancel()
        await asyncio.gather(self._seeding, return_exceptions=True)
        await self._samplers.close()
        await self.server.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(2 * WAIT_S)

    def publish(self, step: int, weights: Weights) -> SendReport | None:
        """What the trainer does with a version; returns once the update has ended. None: it was not wanted."""
        report = self.send(step, weights)
        if report is not None:
            self.tell_sent(step, report)
            assert self._until(self._samplers.all_committed), f"the update to version {step} lasts"
        return report

    def send(self, step: int, weights: Weights) -> SendReport | None:
        """Offer a version and send it. The update stays under way until it is told that it was sent."""
        specs = [spec_of(name, tensor) for name, tensor in weights.items()]
        meeting = {"master_address": self._trainer.master_address, "master_port": self._trainer.master_port}
        offer = {"lineage": 0, "step": step, "senders": 1, "tensors": to_json(specs), "facts": self._facts.to_json()}
        answer = self._tell("offer_version", {**offer, **meeting, "epoch": self._epoch, "whole": True})
        if not answer["send"]:
            return None
        if answer["epoch"] != self._epoch:
            self._trainer.join(answer["epoch"], answer["world_size"])
            self._epoch = answer["epoch"]
        return self._trainer.send(weights, None if answer["held"] is None else int(answer["held"]))

    def tell_sent(self, step: int, report: SendReport) -> None:
        took = {"send_s": report.send_s, "bytes": report.bytes, "changed_share": report.changed_share, "gathered_bytes": 0}
        which = {"lineage": 0, "step": step, "epoch": self._epoch}
        self._tell("version_sent", {**which, "digest": str(report.digest), "lanes": [], **took})

    def wait_until_serving(self, *replicas: int) -> None:
        assert self._until(lambda: self.membership.serving == replicas), self.words

    def _until(self, condition: Callable[[], bool]) -> bool:
        there: bool = self.run(self._samplers.desk.changed.until(condition, WAIT_S))
        return there

    def _tell(self, call: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self.run(self._handlers[call](Member("trainer", 0), body))
        return answer

    def post(self, replica: int, path: str, body: Any) -> tuple[int, Any]:
        async def ask() -> tuple[int, Any]:
            async with (
                aiohttp.ClientSession(headers=authorization(self.token)) as session,
                session.post(self.urls[replica] + path, json=body) as response,
            ):
                return response.status, await response.json()

        return self.run(ask())

    def _on_join(self, member: Member) -> None:
        self.urls[member.index] = member.facts["url"]
        self._samplers.desk.joined(member)
        self.joined.put(member)

    def _on_fail(self, member: Member, error: str, trace: str) -> None:
        self.words.append(f"{member.name} failed: {error}\n{trace}")


@contextmanager
def fleet(folder: Path, count: int, weights: WeightsOptions) -> Iterator[Fleet]:
    """So many samplers of `tiny_model`s that have joined; they end as they are told to."""
    run = run_folder(folder, OPTIONS, tiny_model(0), weights)
    with event_loop() as loop, ExitStack() as stack:

        async def make() -> tuple[Fleet, str]:
            made = Fleet(run, load(run.config), create_token(run.token), count, loop)
            return made, await made.open()

        made, url = asyncio.run_coroutine_threadsafe(make(), loop).result(WAIT_S)
        stack.callback(lambda: made.run(made.close()))
        samplers = [stack.enter_context(started(run, index, url)) for index in range(count)]
        for _ in samplers:
            wait_for_join(made.joined, samplers)
        made.run(made.begin())
        yield made
        made.server.stopping = True
        for one in samplers:
            one.check_end()
