"""The orchestrator: one attempt of a run from the first join to the last exit, in rank 0's process."""

import asyncio
import faulthandler
import logging
import sys
import time
from collections.abc import Callable
from functools import partial

from prl.config.schema import Config
from prl.control.server import Bell, ControlServer
from prl.control.tasks import end_tasks
from prl.flow.ending import GOES_ON, NO_MEANS, Decision, Means, Reason, decide
from prl.flow.stall import Queues, waited_for
from prl.orchestrator.binding import Plan
from prl.orchestrator.causes import Causes
from prl.orchestrator.journal import Journal
from prl.orchestrator.lineages import Lineages
from prl.orchestrator.outcome import CANCEL, ENDED, LOST, REPORTED, Cause, conclude
from prl.orchestrator.preflight import PreflightDesk
from prl.orchestrator.processes import ProcessDesk
from prl.orchestrator.requests import watch_requests
from prl.orchestrator.resume import Start
from prl.orchestrator.rollouts import LedgerDesk
from prl.orchestrator.samplers import Samplers
from prl.orchestrator.staging import stage_orders
from prl.orchestrator.updates import Committed, UpdateError
from prl.orchestrator.work import Work
from prl.runfolder.outcome import Outcome, steps_before
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import LedgerWriter

BEATS = 3  # heartbeats that an agent has missed which is taken for gone where Slurm ends the step
GATHER_CAUSES_S = 1.0  # one death causes others; wait this long before choosing the cause
EXPLAINED_S = 15.0  # that it may take to find out why the batch system ends processes
PARTS_END_S = 20.0  # that the parts of this process have to end, with all that they have begun to read or write
STACKS_S = 2.0  # that processes have to write their stacks down
FAILED_GRACE_S = 0.5  # children of a failed run get this long before SIGTERM

log = logging.getLogger(__name__)


class Orchestrator:
    """Owns the control server, the dispatcher and the ledger, and leads the run through its phases:
    starting, seeding (the first version reaches all samplers), running, finishing, ended."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        plan: Plan,
        start: Start,
        token: str,
        means: Callable[[], Means] = lambda: NO_MEANS,
    ) -> None:
        """`means`: by what the run may go on after this attempt, asked at its end."""
        self._run = run
        self._config = config
        self._plan = plan
        self._means = means
        self._started = time.time()
        self._bell = Bell()
        self._causes = Causes(self._bell)
        self._ledger = LedgerWriter(run.ledger(plan.attempt))
        self._ledger_desk = LedgerDesk(self._ledger.append)
        self._journal = Journal(run, plan.attempt, config.metrics)
        self.terminated = asyncio.Event()  # the batch system has sent SIGTERM to this process, or to another node's agent
        self._leaving = False  # nothing that is not needed for a checkpoint is started again or waited for
        self._explained = True  # nobody is asking why the batch system ends processes
        self._running = False  # rollouts are handed out whenever the samplers serve what is trained
        self._samplers = Samplers(
            run,
            config,
            plan,
            token,
            work=lambda: self._work,
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
        self._local = stage_orders(config, run.model, resumes=start.resume.checkpoint is not None)
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
            on_terminated=self.terminated.set,
            actor_joined=self._set_problems,
            actor_lost=lambda actor: self._work.rollouts.lost(actor),
            trainers_lost=self._leave_lineage,
            done_with=self._is_done_with,
            finished=lambda: self._work.steps.finished,
            leaving=lambda: self._leaving,
            local=self._local,
        )
        self._preflight = PreflightDesk(run, config, plan, self._causes, self._bell)
        self._server.add({**self._processes.handlers(), **self._preflight.handlers()})

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

    def cancel(self, words: str) -> None:
        """Somebody wants the run to end now."""
        self._end_now(words, "cancelled")

    def leave(self, words: str, reason: Reason) -> None:
        """The nodes are to be taken away: save after the step in hand, and end. Before any step there is nothing to save."""
        log.warning("%s: %s", reason, words)
        self._leaving = True
        trains = self._lineages.certain and (self._work.rollouts.open or self._config.run.replay)
        if trains and not self._causes:
            self._explained = True
            self._work.leave(words, reason)
        else:
            self._end_now(words, reason)

    def stop(self, words: str) -> None:
        """A colleague asks for the end: after the step in hand, or now, where nothing is trained yet that could end well. It
        may be said again."""
        if self._running:
            self._work.finish(words, "stopped")
        elif not self._causes:
            self.cancel(f"{words} before it trained")

    def expect_deaths(self) -> None:
        """The batch system is ending processes of this run: what they die of is no cause, nor what some have died of just now.
        Somebody finds out why, and then calls `cancel` or `leave`."""
        self._leaving, self._explained = True, False

    @property
    def missed_nodes(self) -> list[str]:
        """The names of nodes whose agents have been silent for long."""
        silent = self._server.silent(self._config.control.lost_after_s / 2, "agent")
        return [self._plan.name_of(member.index) for member in silent]

    async def blame_lost_agent(self, otherwise: str) -> None:
        """The batch system ends the step of a job that goes on. Where a node's agent is gone, that is why; else somebody has
        asked for the end, in these words."""
        heartbeat_s = self._config.control.heartbeat_s
        await asyncio.sleep(BEATS * heartbeat_s)
        if gone := self._server.silent((BEATS - 1) * heartbeat_s, "agent"):
            words = f"{gone[0].name} on {gone[0].host} has ended without a word, and Slurm has ended the others"
            self._end_now(words, "killed", "agent")
        else:
            self.cancel(otherwise)

    def _end_now(self, words: str, reason: Reason, role: str | None = None) -> None:
        self._causes.add(Cause(words, role, CANCEL, reason=reason))
        self._explained = True
        self._bell.ring()
        self._server.grace_s = min(self._server.grace_s, FAILED_GRACE_S)  # also where it is ending already

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
        for task in background:
            self.watch(task)
        try:
            await self._through_phases()
        except Exception as error:
            self._causes.fault(error)
        await self._end()
        try:
            await end_tasks(background, PARTS_END_S)  # an exception of theirs is a cause already
        except TimeoutError as error:
            self._causes.fault(error)
        return await self.close()

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

    def _open_rollouts(self) -> None:
        if self._running and self._lineages.certain and self._samplers.serve_lineage:
            self._work.rollouts.open = True
        self._bell.ring()

    # The phases

    async def _through_phases(self) -> None:
        control, weights = self._config.control, self._config.weights
        if not await self._preflight.passed():
            return
        checking = "the checkpoint's files to be checked"
        if not await self._causes.wait(lambda: self._lineages.certain, control.wait_s, lambda: checking):
            return
        start_s = control.start_s + (self._local.limit_s if self._local else 0.0)
        if not await self._causes.wait(self._processes.all_joined, start_s, self._processes.missing):
            return
        self._samplers.begin()
        if not self._config.run.replay:
            self._set_problems()
        self._journal.phase("seeding")
        deadline_s = 2 * (weights.group_s + weights.update_s)  # twice what it takes: a sampler may have to be left out
        if self._config.run.replay or await self._causes.wait(
            lambda: self._samplers.current is not None, deadline_s, lambda: "the first version at all samplers"
        ):
            self._journal.phase("running")
            self._running = True
            self._open_rollouts()
            await self._run_steps()

    async def _run_steps(self) -> None:
        """Until the trainer has finished; a step or some groups have to end within control.no_progress_s."""
        wait_s, no_progress_s = self._config.control.wait_s, self._config.control.no_progress_s
        while not self._work.steps.finished and not self._causes:
            if self._lineages.certain and self._work.dispatcher.used_up:
                self._work.finish(f"every problem was used {self._config.run.epochs} times")
            if not await self._bell.until(partial(self._goes_on, self._work.position()), no_progress_s):
                await self._look_into_stall()
        self._journal.phase("finishing")
        if not self._causes:
            limit_s = self._config.weights.update_s
            await self._causes.wait(self._all_committed, limit_s, lambda: "the last version at all samplers")
        if not self._causes and not await self._bell.until(self._all_evaluated, wait_s):
            # No cause to fail: the trained model is safe.
            log.warning("the last evaluation did not end within %.0f s", wait_s)

    def _goes_on(self, since: tuple[int, int, int, bool]) -> bool:
        return bool(self._causes) or self._work.position() != since or self._work.steps.finished

    async def _look_into_stall(self) -> None:
        """Nothing goes on: leave in the logs what everyone is at. Where the trainer is waited for it begins again; anyone else
        ends the run, with its name."""
        if not self._processes.trainers_complete:
            return  # their start has a deadline of its own
        work, samplers = self._work, self._samplers
        queues = Queues(
            serving=len(samplers.membership.serving),
            updating=not samplers.all_committed(),
            held=work.dispatcher.held,
            received=work.dispatcher.received - work.steps.in_files,
            groups_per_step=self._config.run.groups_per_step,
            step_waits=work.steps.waits or work.steps.finishing,
            replays=bool(self._config.run.replay),
        )
        role, why = waited_for(queues)
        self._processes.dump_stacks()
        faulthandler.dump_traceback(file=sys.stderr)
        await asyncio.sleep(STACKS_S)
        words = f"no progress for {self._config.control.no_progress_s:g} s at step {work.steps.trained + 1}: waited for "
        words += f"{role}, {why} ({self._processes.doing()}); stacks are in {self._run.logs(self._plan.attempt)}"
        cause = Cause(words, role, ENDED)
        if role == "trainer":
            self._processes.renew_trainers(cause)
        else:
            self._causes.add(cause)

    async def _end(self) -> None:
        """Tell everyone to stop; failed runs end at once, good ones give their children time."""
        self._lineages.give_up()
        if self._causes:
            await asyncio.sleep(GATHER_CAUSES_S)
            await self._wait_for_late_agents()
            await self._bell.until(lambda: self._explained, EXPLAINED_S)
        self._work.rollouts.ended = self._samplers.desk.ended = True
        self._samplers.desk.changed.ring()
        self._server.stopping = self._causes.closed = True
        self._server.grace_s = FAILED_GRACE_S if self._causes else self._config.control.stop_s
        self._bell.ring()
        joined = {member.index for member in self._server.of_role("agent")}
        left_s = self._server.grace_s + 10.0
        if not await self._bell.until(lambda: joined <= self._processes.nodes_done, left_s):
            late = sorted(joined - self._processes.nodes_done)
            self._causes.found.append(Cause(f"nodes {late} did not end within {left_s:.0f} s", "agent", ENDED))

    async def _wait_for_late_agents(self) -> None:
        """What misses a process of a lost node fails long before that node's silence counts, and would be taken for the cause:
        an agent that is late is heard again, or becomes one."""
        control = self._config.control
        end = time.monotonic() + control.lost_after_s
        explained = any(cause.rank <= LOST for cause in self._causes.found)
        while not explained and not self.terminated.is_set() and time.monotonic() < end:
            if not self._server.silent(control.heartbeat_s, "agent"):
                break
            await asyncio.sleep(control.heartbeat_s)

    async def close(self) -> Outcome:
        """Close everything, whatever of it fails, and write the outcome last but surely: behind it nothing of this process
        changes the run folder."""
        try:
            await self._server.close()
            await self._samplers.close()
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
            stop=self.stop,
            save=lambda: self._work.checkpoints.ask(),
            saving=lambda: self._work.checkpoints.asked and not self._work.steps.finished,  # whose end saves
        )

    def _committed(self, committed: Committed) -> None:
        self._journal.committed(committed)
        self._open_rollouts()

    def _update_failed(self, error: UpdateError) -> None:
        self._causes.add(Cause(str(error), "sampler", REPORTED))

    def _is_done_with(self, role: str) -> bool:
        """Whether the run can end well without the processes of a role from now on."""
        if not self._lineages.certain and not self._leaving:
            return False
        steps = self._work.steps
        if role == "trainer":
            return steps.finished
        over = self._leaving or (steps.finishing and self._all_committed() and self._all_evaluated())
        return role != "agent" and over

    def _all_committed(self) -> bool:
        return self._leaving or self._samplers.all_committed()

    def _all_evaluated(self) -> bool:
        return self._leaving or bool(self._causes) or self._work.all_evaluated()

    # What actors have told

    def _set_problems(self) -> None:
        actors = self._server.of_role("actor")
        problems, held_out = actors[0].facts["problems"], actors[0].facts["evaluation"]
        for actor in actors[1:]:
            if (actor.facts["problems"], actor.facts["evaluation"]) != (problems, held_out):
                raise ValueError(
                    f"{actor.name} has other problems than {actors[0].name}: load_problems must not depend on the process"
                )
        self._work.dispatcher.problems(problems, held_out)
