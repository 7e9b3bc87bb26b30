"""The samplers' side of an attempt, put together: who of them serves, which versions of the trainer's they get, and how."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from prl.config.schema import Config
from prl.control.server import Answer, Handler, Member
from prl.flow.membership import Membership, MembershipSettings
from prl.flow.versions import Version
from prl.orchestrator.binding import Plan
from prl.orchestrator.replicas import ReplicaDesk
from prl.orchestrator.sampler_calls import SamplerCalls
from prl.orchestrator.seeding import Seeder
from prl.orchestrator.updates import Committed, UpdateError, WeightUpdater
from prl.orchestrator.work import Work
from prl.runfolder.paths import RunFolder

log = logging.getLogger(__name__)


class Samplers:
    def __init__(
        self,
        run: RunFolder,
        config: Config,
        plan: Plan,
        token: str,
        *,
        work: Callable[[], Work],
        leaving: Callable[[], bool],
        on_change: Callable[[Membership, str], None],
        on_committed: Callable[[Committed], None],
        on_error: Callable[[UpdateError], None],
    ) -> None:
        """`leaving`: Slurm takes the nodes away; `on_change`: the membership, and what happened in words; `on_committed`: each
        time that samplers serve a version, also one that was sent again."""
        self._options = config.run
        self._work = work
        self._leaving = leaving
        self._on_committed = on_committed
        self._last: Version | None = None  # that the dispatcher knows of
        replicas = sum(child.role == "sampler" for child in plan.children)
        self.membership = Membership(
            MembershipSettings(replicas, config.sample.restarts, config.sample.restart_pause_s, config.control.start_s)
        )
        self.desk = ReplicaDesk(
            self.membership,
            tell=lambda replica, reason: self._calls.tell_fenced(replica, reason),
            on_change=lambda words: on_change(self.membership, words),
        )
        self._calls = SamplerCalls(token, self.desk)
        self._updater = WeightUpdater(
            self._calls,
            config.weights,
            self.desk,
            start_s=config.control.start_s,
            on_committed=self._committed,
            on_error=on_error,
        )
        self._seeder = Seeder(
            run.weights,
            self._calls,
            config.weights,
            self.desk,
            current=lambda: self._updater.current,
            busy=lambda: self._updater.under_way is not None,
        )
        self.prepare = self._seeder.begin
        self.seed = self._seeder.run  # those that come (back), until cancelled
        self.begin = self._updater.begin  # all are there
        self.leave = self._updater.leave  # the trainer of a lineage is gone

    def handlers(self) -> dict[str, Handler]:
        return {
            **self.desk.handlers(),
            "offer_version": self._offer_version,
            "sending": lambda member, body: self._updater.sending(body),
            "version_sent": lambda member, body: self._updater.sent(body),
            "version_unsent": lambda member, body: self._updater.unsent(body),
            "staged": lambda member, body: (self._seeder if body.get("seed") else self._updater).staged(body),
            "stored": lambda member, body: self._seeder.stored(body),
        }

    async def close(self) -> None:
        await self.desk.close()
        await self._updater.close()
        await self._calls.close()
        await self._seeder.close()

    @property
    def current(self) -> Committed | None:
        """The version that they serve."""
        return self._updater.current

    @property
    def serve_lineage(self) -> bool:
        """Whether they serve a version of the lineage that is trained."""
        return self.current is not None and self.current.version.lineage == self._work().lineage

    def all_committed(self) -> bool:
        """Whether no version is on its way."""
        return self._updater.under_way is None

    def has_joined(self, index: int) -> bool:
        """Whether its first process came so far: what fails before that is the configuration's fault."""
        return self.membership.state(index) != "starting"

    def wants_version(self) -> bool:
        """Whether the trainer is to send the version that it is at, though it has done so: a sampler came (back) later, or the
        transfer broke when the trainer had gone on already."""
        step, current = self._work().steps.trained, self.current
        if not self.all_committed() or not self.membership.group or not self._is_sent(step):
            return False
        return current is None or current.version != Version(self._work().lineage, step) or bool(self.membership.to_send)

    async def _offer_version(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """In conventional mode samplers get the first version of a lineage and those that end a generation; a replay has none.
        A run that leaves its nodes has no time for it, and its samplers may refuse it: Slurm ends their engines with all else.
        The trainer is to save the step all the same."""
        nobody = {"epoch": int(body["epoch"]), "world_size": 0, "send": False}
        if self._work().steps.leaving or not self._is_sent(int(body["step"])):
            return nobody
        try:
            return await self._updater.offer(body, newer_comes=not self._must_arrive(int(body["step"])))
        except ValueError as error:
            if not self._leaving():
                raise
            log.warning("no version goes to the samplers any more: %s", error)
            return nobody

    def _must_arrive(self, step: int) -> bool:
        """Whether a version may not be passed over for a newer one: there is none, or it is to be evaluated, or it is the first
        of its lineage, before which nothing is sampled."""
        run = self._options
        evaluated = run.evaluate_every_steps and step % run.evaluate_every_steps == 0
        last = step == run.steps or self._work().steps.finishing
        before = self._updater.under_way
        first = not self.serve_lineage and (before is None or before.lineage < self._work().lineage)
        return run.mode == "conventional" or last or bool(evaluated) or first

    def _is_sent(self, step: int) -> bool:
        run = self._options
        inside = run.mode == "conventional" and step % run.steps_per_generation and step != run.steps
        return not run.replay and not (inside and self.serve_lineage)

    def _committed(self, committed: Committed) -> None:
        self._seeder.committed(committed)
        if committed.version != self._last:  # else it was sent again
            self._last = committed.version
            self._work().dispatcher.committed(committed.version)
        self._on_committed(committed)
