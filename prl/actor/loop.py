"""An actor: leases groups, works on many of them at once, hands what is done to the stream.

No group waits for another: each is a task of its own with a deadline, a finished one goes to the publisher at once, and room
for new ones is leased as soon as there is some.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from prl.actor.groups import GroupFailed, Limits, SampledGroup, evaluate, sample_group
from prl.actor.options import ActorOptions
from prl.actor.publisher import Publisher
from prl.actor.sampler_client import SamplerClient
from prl.actor.tasks import Task
from prl.actor.troubles import Troubles
from prl.control.client import ControlClient
from prl.flow.events import to_discard_rows
from prl.flow.ids import Lease
from prl.metrics.events import MetricsWriter
from prl.metrics.names import FIRST_ROLLOUT_REQUEST, PHASE
from prl.verifier.client import VerifierClient

_GATHER_S = 0.01  # groups of one lease end close together: their room is leased with one call
_DOMAIN_FAULTS = 16  # groups in a row that fail by the domain's own code end the actor: it would go on for ever
_REPORT_S = 1.0  # seconds between two lines of metrics
_NEWS_S = 120.0  # deadline of a call that the orchestrator answers after half a minute, with news or without
_TICK_S = 0.05  # seconds between two looks at the event loop's lag


@dataclass(frozen=True, slots=True)
class Parts:
    """What an actor works with, all of it open."""

    tasks: Mapping[str, Task]
    control: ControlClient
    samplers: SamplerClient
    verifier: VerifierClient
    publisher: Publisher
    metrics: MetricsWriter


class Actor:
    def __init__(self, parts: Parts, options: ActorOptions, *, call_s: float, enough: int | None = None) -> None:
        """`call_s`: deadline of a call to the orchestrator, in seconds. `enough`: rollouts that make a group where others
        fail; None: all."""
        self._parts = parts
        self._options = options
        self._call_s = call_s
        self._limits = Limits(options.rollout_s, options.rollout_tries, enough)
        self._train_sampler = parts.samplers.sampler(options.max_tokens, options.temperature, options.top_p)
        self._evaluate_sampler = parts.samplers.sampler(options.max_tokens, 1.0, 1.0)
        self._in_flight: set[asyncio.Task[None]] = set()
        self._began = False
        self._ended = asyncio.Event()  # a group did
        self._faults_in_a_row = 0
        self._rollouts = 0  # since the last report
        self._output_tokens = 0
        self._troubles = Troubles()
        self._lag_s = 0.0

    async def run(self) -> None:
        """Works until the run ends: groups that are done by then are published and announced, others are dropped."""
        parts = self._parts
        try:
            async with asyncio.TaskGroup() as tasks:
                publishing = tasks.create_task(parts.publisher.run(), name="publish")
                reporting = tasks.create_task(self._report(), name="report")
                watching = tasks.create_task(self._watch_loop(), name="watch the event loop")
                hearing = tasks.create_task(self._hear_what_is_wanted(), name="hear what is wanted")
                learning = tasks.create_task(self._learn_of_samplers(), name="learn of samplers")
                finding = tasks.create_task(self._learn_of_verifier(), name="learn of the verifier")
                leasing = tasks.create_task(self._lease_groups(tasks), name="lease")
                await parts.control.stopping.wait()
                hearing.cancel()
                learning.cancel()
                finding.cancel()
                leasing.cancel()
                for task in self._in_flight:
                    task.cancel()
                parts.control.progress("publishing the last rollouts")
                parts.publisher.close()
                await publishing
                reporting.cancel()
                watching.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _lease_groups(self, tasks: asyncio.TaskGroup) -> None:
        parts = self._parts
        while True:
            while len(self._in_flight) >= self._options.max_groups:
                self._ended.clear()
                await self._ended.wait()  # every group has a deadline
                await asyncio.sleep(_GATHER_S)
            room = self._options.max_groups - len(self._in_flight)
            answer = await parts.control.call(
                "lease",
                {"groups": min(room, self._options.lease_groups)},
                deadline_s=self._call_s,
                reason="leasing groups to sample",
            )
            if answer["leases"] and not self._began:
                self._began = True
                parts.metrics.write({}, kind=PHASE, labels={"name": FIRST_ROLLOUT_REQUEST})
            for fields in answer["leases"]:
                task = tasks.create_task(self._work(Lease(**fields)))
                self._in_flight.add(task)
                task.add_done_callback(self._forget)
            if answer["leases"]:
                parts.control.progress(f"sampling {len(self._in_flight)} groups")

    async def _learn_of_samplers(self) -> None:
        """Keeps to the samplers that serve, whatever else the actor does: all of its groups may wait for one that is gone."""
        known: list[list[int | str]] | None = None
        while True:
            answer = await self._parts.control.call(
                "samplers", {"known": known}, deadline_s=_NEWS_S, reason="which samplers serve"
            )
            known = answer["samplers"]
            self._parts.samplers.set_replicas({int(replica): str(url) for replica, url in answer["samplers"]})

    async def _learn_of_verifier(self) -> None:
        """Keeps to the verifier that listens: all groups may wait for one that was started again elsewhere."""
        url: str | None = None
        while True:
            answer = await self._parts.control.call(
                "verifier", {"known": url}, deadline_s=_NEWS_S, reason="where the verifier listens"
            )
            url = answer["url"]
            self._parts.verifier.set_url(url)

    async def _hear_what_is_wanted(self) -> None:
        """Tells the publisher when a step begins or ceases to wait for groups, whatever else the actor does. Who has finished
        nothing does not ask: of a thousand actors few have to be told at one time."""
        wanted: int | None = None
        while True:
            await self._parts.publisher.gathered()  # every group has a deadline
            answer = await self._parts.control.call(
                "wanted", {"known": wanted}, deadline_s=self._call_s, reason="waiting for a step to want groups"
            )
            wanted = answer["groups"]
            self._parts.publisher.want(wanted)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._ended.set()

    async def _work(self, lease: Lease) -> None:
        """One lease to its end. Whatever the domain, the samplers and the verifier do ends in a result or in `group_failed`;
        what is raised here ends the actor."""
        try:
            task = self._parts.tasks[lease.domain]
            if lease.kind == "evaluate":
                await self._evaluate(task, lease)
            else:
                await self._hand_in(lease, await sample_group(task, lease, self._train_sampler, self._limits, self._troubles))
            self._faults_in_a_row = 0
        except GroupFailed as failure:
            await self._fail(lease, failure)

    async def _hand_in(self, lease: Lease, sampled: SampledGroup) -> None:
        group = sampled.group
        self._rollouts += len(group.rollouts)
        self._output_tokens += sum(len(turn.output_ids) for rollout in group.rollouts for turn in rollout.turns)
        if sampled.given_up:
            lacking = [(i, sampled.given_up[i.rollout]) for i in lease.rollout_ids() if i.rollout in sampled.given_up]
            body = {"discarded": to_discard_rows(lacking)}
            await self._call("discard", body, reason=f"giving up rollouts of group {lease.group}")
        await self._parts.publisher.put(group)

    async def _evaluate(self, task: Task, lease: Lease) -> None:
        result = await evaluate(task, lease, self._evaluate_sampler, self._limits, self._troubles)
        await self._call(
            "evaluation",
            {
                "group": lease.group,
                "issue": lease.issue,
                "reward_mean": result.reward_mean,
                "reward_std": result.reward_std,
                "problems": result.problems,
                "version_start": str(result.version_start),
                "version_end": str(result.version_end),
                "output_tokens": result.output_tokens,
            },
            reason=f"reporting evaluation {lease.group}",
        )

    async def _fail(self, lease: Lease, failure: GroupFailed) -> None:
        trace = failure if failure.domain_fault else None
        words = f"group {lease.group}, issue {lease.issue} failed ({failure.reason}): {failure}"
        self._troubles.add(f"group_{failure.reason}", words, trace=trace)
        await self._call(
            "group_failed",
            {"group": lease.group, "issue": lease.issue, "reason": failure.reason},
            reason=f"giving up group {lease.group}",
        )
        self._faults_in_a_row = self._faults_in_a_row + 1 if failure.domain_fault else 0
        if self._faults_in_a_row >= _DOMAIN_FAULTS:
            raise RuntimeError(
                f"{_DOMAIN_FAULTS} groups in a row failed by the code of their domain; the last: {failure}"
            ) from failure

    async def _call(self, name: str, body: Mapping[str, object], *, reason: str) -> None:
        await self._parts.control.call(name, body, deadline_s=self._call_s, reason=reason)

    async def _report(self) -> None:
        """Writes the actor's metrics at regular times, until it is cancelled."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(_REPORT_S)
            now = time.monotonic()
            values = {
                "actor/rollouts_per_s": self._rollouts / (now - began),
                "actor/output_tokens_per_s": self._output_tokens / (now - began),
                "actor/groups_in_flight": float(len(self._in_flight)),
                "actor/loop_lag_s": self._lag_s,
            }
            for name, count in (self._troubles.counts + self._parts.samplers.counts).items():
                values[f"actor/errors/{name}"] = float(count)  # since the actor started
            self._parts.metrics.write(values)
            self._rollouts = self._output_tokens = 0
            self._lag_s = 0.0
            began = now

    async def _watch_loop(self) -> None:
        """Keeps the longest time by which the event loop was late, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lag_s = max(self._lag_s, loop.time() - due)
