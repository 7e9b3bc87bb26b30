"""The orchestrator: one attempt of a run from the first join to the last exit, in rank 0's process."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prl.config.schema import Config
from prl.control.server import Bell, ControlServer
from prl.control.tasks import end_tasks
from prl.flow.ending import GOES_ON, NO_MEANS, Decision, Means, Reason, decide
from prl.metrics.progress import steps_before
from prl.orchestrator.binding import Plan
from prl.orchestrator.causes import Causes
from prl.orchestrator.journal import Journal
from prl.orchestrator.lineages import Lineages
from prl.orchestrator.outcome import REPORTED, Cause, conclude
from prl.orchestrator.phases import Phases
from prl.orchestrator.preflight import PreflightDesk
from prl.orchestrator.processes import ProcessDesk
from prl.orchestrator.requests import watch_requests
from prl.orchestrator.resume import Start
from prl.orchestrator.rollouts import LedgerDesk
from prl.orchestrator.samplers import Samplers
from prl.orchestrator.shutdown import GATHER_CAUSES_S, Shutdown
from prl.orchestrator.staging import stage_orders
from prl.orchestrator.updates import Committed, UpdateError
from prl.orchestrator.work import Work
from prl.runfolder.outcome import Outcome
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import LedgerWriter

if TYPE_CHECKING:
    from prl.streams.redis_server import RedisServer  # an extra

PARTS_END_S = 20.0  # that the parts of this process have to end, with all that they have begun to read or write

log = logging.getLogger(__name__)


class Orchestrator:
    """What an attempt is made of, and how its parts hear of each other. `shutdown` is how it is ended."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        plan: Plan,
        start: Start,
        token: str,
        means: Callable[[], Means] = lambda: NO_MEANS,
        redis: "RedisServer | None" = None,
    ) -> None:
        """`means`: by what the run may go on after this attempt, asked at its end. `redis`: the server of the run's own, which
        ends with the attempt, and whose own end ends it."""
        self._run = run
        self._config = config
        self._plan = plan
        self._means = means
        self._redis = redis
        self._started = time.time()
        self._bell = Bell()
        self._causes = Causes(self._bell)
        self._ledger = LedgerWriter(run.ledger(plan.attempt))
        self._ledger_desk = LedgerDesk(self._ledger.append)
        self._journal = Journal(run, plan.attempt, config.metrics)
        self._samplers = Samplers(
            run,
            config,
            plan,
            token,
            work=lambda: self._work,
            leaving=lambda: self.shutdown.leaving,
            on_change=self._journal.samplers_changed,
            on_committed=self._committed,
            on_error=self._update_failed,
        )
        self._samplers.desk.changed.on_ring(self._bell.ring)
        self._lineages = Lineages(
            run,
            config,
            plan,
            start,
            make=self._make_work,
            record=self._ledger_desk.record,
            settled=self._ledger_desk.settled,
            processes=lambda: self._processes,
            causes=self._causes,
            bell=self._bell,
        )
        local = stage_orders(config, run.model, resumes=start.resume.checkpoint is not None)
        self._server = ControlServer(
            token,
            {**self._lineages.handlers(), **self._samplers.handlers()},
            on_join=lambda member: self._processes.joined(member),
            on_fail=lambda member, error, trace: self._processes.failed(member, error, trace),
        )
        self._processes = ProcessDesk(
            self._server,
            plan,
            self._samplers,
            self._causes,
            self._bell,
            config.control,
            on_restarts=self._journal.restarted,
            on_terminated=lambda: self.shutdown.terminated.set(),
            actor_joined=lambda: self._work.rollouts.set_problems(self._server.of_role("actor")),
            actor_lost=lambda actor: self._work.rollouts.lost(actor),
            trainers_lost=self._leave_lineage,
            done_with=lambda role: self.shutdown.is_done_with(role),
            finished=lambda: self._work.steps.finished,
            leaving=lambda: self.shutdown.leaving,
            local=local,
        )
        self.shutdown = Shutdown(
            config,
            plan,
            self._server,
            self._samplers,
            self._processes,
            self._lineages,
            self._causes,
            self._bell,
            running=lambda: self._phases.running,
        )
        preflight = PreflightDesk(run, config, plan, self._causes, self._bell)
        self._phases = Phases(
            config,
            run.logs(plan.attempt),
            self._server,
            preflight,
            self._samplers,
            self._processes,
            self._lineages,
            self.shutdown,
            self._journal,
            self._causes,
            self._bell,
            stage_s=local.limit_s if local else 0.0,
        )
        self._server.add({**self._processes.handlers(), **preflight.handlers()})

    async def serve(self, host: str) -> str:
        """Open the control plane and say where it is."""
        self._lineages.open(host)
        url = await self._server.start(host)
        await self._samplers.prepare()
        self._journal.phase("starting")
        return url

    def watch(self, task: "asyncio.Task[None]") -> None:
        """An error of this task ends the run."""
        task.add_done_callback(self._causes.part_ended)

    async def lead(self) -> Outcome:
        """Through all phases to the end; returns once all nodes have ended their children, or their time is up."""
        background = [
            asyncio.create_task(self._lineages.check(), name="the check of the checkpoint"),
            asyncio.create_task(self._lineages.follow(), name="the return to a checkpoint"),
            asyncio.create_task(self._processes.watch_silence(), name="the watch over silent processes"),
            asyncio.create_task(self._watch_overdue_groups(), name="the watch over groups that do not come back"),
            asyncio.create_task(self._watch_requests(), name="the watch for STOP and SAVE"),
            asyncio.create_task(self._journal.feed_tensorboard(), name="TensorBoard's sink"),
            asyncio.create_task(self._samplers.seed(), name="the seeding of samplers"),
        ]
        if self._redis:
            background.append(asyncio.create_task(self._watch_redis(self._redis), name="the run's Redis server"))
        for task in background:
            self.watch(task)
        try:
            await self._phases.pass_all()
        except Exception as error:
            self._causes.fault(error)
        await self.shutdown.tell_everyone()
        try:
            await end_tasks(background, PARTS_END_S)  # an exception of theirs is a cause already
        except TimeoutError as error:
            self._causes.fault(error)
        return await self.close()

    async def close(self) -> Outcome:
        """Close everything, whatever of it fails, and write the outcome last but surely: behind it nothing of this process
        changes the run folder."""
        try:
            await self._server.close()
            await self._samplers.close()
            if self._redis:
                await asyncio.to_thread(self._redis.close)
            if not self._causes and self._work.ending.reason not in GOES_ON:
                await self._ledger_desk.record(self._work.dispatcher.close("run ended"))
            self._journal.phase("stopped")
            await self._journal.close()
            self._ledger.close()  # else somebody may still write to it
        except Exception as error:
            self._causes.fault(error)
        finally:
            outcome = conclude(self._causes.found, self._work.ending, self._work.steps.trained, self._started, self._decide)
            outcome.write(self._run.exit(self._plan.attempt))
        return outcome

    def _decide(self, reason: Reason) -> Decision:
        return decide(reason, [*steps_before(self._run, self._plan.attempt), self._work.steps.trained], self._means())

    # What is trained

    @property
    def _work(self) -> Work:
        return self._lineages.work

    def _make_work(self, start: Start, before: Work | None) -> Work:
        return Work(
            start,
            run=self._run,
            config=self._config,
            attempt=self._plan.attempt,
            journal=self._journal,
            bell=self._bell,
            record=self._ledger_desk.record,
            settled=self._ledger_desk.settled,
            wants_version=self._samplers.wants_version,
            current=lambda: self._samplers.current,
            before=before,
        )

    def _leave_lineage(self) -> None:
        """The trainers end: nothing is handed out until the samplers have the version at which others begin."""
        self._lineages.leave()
        self._samplers.leave(self._work.lineage)

    # What goes on meanwhile

    async def _watch_overdue_groups(self) -> None:
        while True:
            await asyncio.sleep(self._config.control.heartbeat_s)
            if self._lineages.certain:
                await self._work.rollouts.expire()

    async def _watch_requests(self) -> None:
        await self._bell.until(lambda: self._lineages.certain, self._config.control.wait_s)
        every_s = self._config.control.heartbeat_s
        await watch_requests(
            self._run,
            every_s,
            stop=self.shutdown.stop,
            save=lambda: self._work.checkpoints.ask(),
            saving=lambda: self._work.checkpoints.asked and not self._work.steps.finished,  # whose end saves
        )

    async def _watch_redis(self, server: "RedisServer") -> None:
        """Where the batch system ends processes, the server may be among them: who still trains does without it."""
        try:
            await server.watch()
        except Exception as error:
            await asyncio.sleep(GATHER_CAUSES_S)
            if not self.shutdown.leaving:
                raise
            log.warning("the run's Redis server is gone: %s", error)

    def _committed(self, committed: Committed) -> None:
        self._journal.committed(committed)
        self._phases.open_rollouts()

    def _update_failed(self, error: UpdateError) -> None:
        if self.shutdown.leaving:  # Slurm ends processes of samplers, too, and no checkpoint needs them
            log.warning("no version goes to the samplers any more: %s", error)
        else:
            self._causes.add(Cause(str(error), "sampler", REPORTED))
