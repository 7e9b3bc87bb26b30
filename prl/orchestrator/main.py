"""The orchestrator: one attempt of a run from the first join to the last exit, in rank 0's process."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prl.config.schema import Config
from prl.control.server import Answer, Bell, ControlServer, Handler, Member
from prl.flow.evaluations import Evaluation
from prl.flow.membership import IN_GROUP, Membership, MembershipSettings
from prl.flow.versions import Version
from prl.orchestrator.binding import Plan
from prl.orchestrator.causes import Causes
from prl.orchestrator.checkpoints import Checkpoints, Moment
from prl.orchestrator.journal import Journal
from prl.orchestrator.outcome import AGENT, CANCEL, ENDED, REPORTED, Cause, child_cause, conclude
from prl.orchestrator.replicas import ReplicaDesk
from prl.orchestrator.resume import Start, checked_start, publish_plan
from prl.orchestrator.rollouts import LedgerDesk, RolloutDesk
from prl.orchestrator.sampler_calls import SamplerCalls
from prl.orchestrator.seeding import Seeder
from prl.orchestrator.steps import StepDesk
from prl.orchestrator.stop_rule import Score, StopRule
from prl.orchestrator.updates import Committed, UpdateError, WeightUpdater
from prl.runfolder.outcome import Outcome
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import LedgerWriter

LATE_S = 1.0  # later than this after a sleep, this process was held up
GATHER_CAUSES_S = 1.0  # one death causes others; wait this long before choosing the cause
FAILED_GRACE_S = 0.5  # children of a failed run get this long before SIGTERM

log = logging.getLogger(__name__)


class Orchestrator:
    """Owns the control server, the dispatcher and the ledger, and leads the run through its phases:
    starting, seeding (the first version reaches all samplers), running, finishing, ended."""

    def __init__(self, run: RunFolder, config: Config, plan: Plan, start: Start, token: str) -> None:
        self._run = run
        self._config = config
        self._plan = plan
        self._started = time.time()
        self._bell = Bell()
        self._causes = Causes(self._bell)
        self._nodes_done: set[int] = set()
        self._last_version: Version | None = None  # that the dispatcher knows of
        self._done_words = f"all {config.run.steps} steps trained"
        self._ledger = LedgerWriter(run.ledger(plan.attempt))
        self._ledger_desk = LedgerDesk(self._ledger.append)
        self._record = self._ledger_desk.record
        self._journal = Journal(run, plan.attempt, config.metrics)
        self._begin_at(start)
        self._check_given_up = threading.Event()
        self._checked = asyncio.Event()  # the checkpoint is whole: what comes of it may be used
        if start.resume.checkpoint is None:
            self._checked.set()
        samplers = {child.index: child.node for child in plan.children if child.role == "sampler"}
        self._membership = Membership(
            MembershipSettings(len(samplers), config.sample.restarts, config.sample.restart_pause_s, config.control.start_s)
        )
        self._replicas = ReplicaDesk(
            self._membership,
            samplers,
            tell=lambda replica, reason: self._calls.tell_fenced(replica, reason),
            on_change=self._samplers_changed,
        )
        self._replicas.changed.on_ring(self._bell.ring)
        self._calls = SamplerCalls(token, self._replicas)
        self._updater = WeightUpdater(
            self._calls,
            config.weights,
            self._replicas,
            start_s=config.control.start_s,
            on_committed=self._committed,
            on_error=self._update_failed,
        )
        self._seeder = Seeder(
            run.weights,
            self._calls,
            config.weights,
            self._replicas,
            current=lambda: self._updater.current,
            busy=lambda: self._updater.under_way is not None,
        )
        self._server = ControlServer(
            token,
            {
                **{name: self._once_checked(name) for name in self._desk_calls},
                "resume": self._resume,
                **self._replicas.handlers(),
                "children": self._children,
                "child_ended": self._child_ended,
                "node_done": self._node_done,
                "offer_version": self._offer_version,
                "sending": lambda member, body: self._updater.sending(body),
                "version_sent": lambda member, body: self._updater.sent(body),
                "version_unsent": lambda member, body: self._updater.unsent(body),
                "staged": lambda member, body: (self._seeder if body.get("seed") else self._updater).staged(body),
                "stored": lambda member, body: self._seeder.stored(body),
            },
            on_join=self._joined,
            on_fail=self._failed,
        )

    def _begin_at(self, start: Start) -> None:
        """Everything that depends on where the attempt starts."""
        config = self._config
        self._start = start
        self._dispatcher = start.dispatcher
        self._stop_rule = StopRule(config.run.stop_at_reward, config.run.stop_after_evaluations, start.evaluations_reached)
        self._checkpoints = Checkpoints(
            self._run, config, self._plan.attempt, start, self._journal, now=self._moment, settled=self._ledger_desk.settled
        )
        self._rollouts = RolloutDesk(
            self._dispatcher,
            self._record,
            self._bell,
            facts=self._facts_for_actors,
            on_evaluation=self._evaluated,
            on_announced=self._checkpoints.announced,
        )
        self._steps = StepDesk(
            self._dispatcher,
            self._rollouts,
            self._record,
            self._bell,
            trained=start.resume.step,
            forks=start.forks,
            lineage=start.resume.lineage,
            waiting=start.waiting,
            on_trained=self._trained,
            save_now=self._checkpoints.due,
            wants_version=self._wants_version,
            steps_at_once=config.preprocess.processes,
        )
        self._desk_calls = {**self._rollouts.handlers(), **self._steps.handlers(), **self._checkpoints.handlers()}

    async def serve(self, host: str) -> str:
        """Open the control plane and say where it is."""
        url = await self._server.start(host)
        await self._seeder.begin()
        self._journal.phase("starting")
        return url

    def watch(self, task: "asyncio.Task[None]") -> None:
        """An error of this task ends the run."""
        task.add_done_callback(self._causes.part_ended)

    def cancel(self, words: str) -> None:
        """Somebody wants the run to end now."""
        self._causes.add(Cause(words, None, CANCEL))
        self._server.grace_s = min(self._server.grace_s, FAILED_GRACE_S)  # also where it is ending already

    async def lead(self) -> Outcome:
        """Through all phases to the end; returns once all nodes have ended their children, or their time is up."""
        background = [
            asyncio.create_task(self._check_start(), name="the check of the checkpoint"),
            asyncio.create_task(self._watch_silence(), name="the watch over silent processes"),
            asyncio.create_task(self._watch_stop_file(), name="the watch for the STOP file"),
            asyncio.create_task(self._journal.feed_tensorboard(), name="TensorBoard's sink"),
            asyncio.create_task(self._seeder.run(), name="the seeding of samplers"),
        ]
        for task in background:
            self.watch(task)
        try:
            await self._through_phases()
        except Exception as error:
            self._causes.fault(error)
        await self._end()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)  # an exception of theirs is a cause already
        return await self._close()

    async def _through_phases(self) -> None:
        control = self._config.control
        expected = {(child.role, child.index) for child in self._plan.children}
        if not await self._causes.wait(self._checked.is_set, control.wait_s, lambda: "the checkpoint's files to be checked"):
            return
        if await self._causes.wait(lambda: expected <= self._joined_keys(), control.start_s, lambda: self._missing(expected)):
            self._updater.begin()
            if not self._config.run.replay:
                self._set_problems()
            await self._record(self._start.reissued)
            self._journal.phase("seeding")
            # Twice what it takes: a sampler may have to be left out.
            deadline_s = 2 * (self._config.weights.group_s + self._config.weights.update_s)
            if self._config.run.replay or await self._causes.wait(
                lambda: self._updater.current is not None, deadline_s, lambda: "the first version at all samplers"
            ):
                self._journal.phase("running")
                self._rollouts.open = True
                self._bell.ring()
                await self._run_steps()

    async def _check_start(self) -> None:
        """Read the checkpoint while the processes of the run start. None of it, and nothing that depends on it, has been used
        where it turns out damaged: the attempt then begins at an older one."""
        if self._checked.is_set():
            return
        start = await asyncio.to_thread(checked_start, self._run, self._config, self._start, self._check_given_up)
        if self._check_given_up.is_set():
            return
        if start is not self._start:
            self._begin_at(start)
            await asyncio.to_thread(publish_plan, self._run, self._plan, start)
        self._checked.set()
        self._bell.ring()

    def _once_checked(self, name: str) -> Handler:
        """The call to a desk that is held until it is certain where the attempt starts."""

        async def call(member: Member, body: Mapping[str, Any]) -> Answer:
            await self._checked.wait()
            return await self._desk_calls[name](member, body)

        return call

    async def _resume(self, member: Member, body: Mapping[str, Any]) -> Answer:
        await self._checked.wait()
        return {"checkpoint": self._start.resume.checkpoint}

    async def _run_steps(self) -> None:
        """Until the trainer has finished; a step or some groups have to end within the deadline of a wait."""
        wait_s = self._config.control.wait_s
        while not self._steps.exported and not self._causes:
            if self._dispatcher.used_up and not self._steps.finishing:
                self._done_words = f"every problem was used {self._config.run.epochs} times"
                self._finish()
            await self._causes.wait(partial(self._has_moved, self._position()), wait_s, self._waiting_for)
        self._journal.phase("finishing")
        if not self._causes:
            await self._causes.wait(
                self._all_committed, self._config.weights.update_s, lambda: "the last version at all samplers"
            )
        if not self._causes and not await self._bell.until(self._all_evaluated, wait_s):
            # No cause to fail: the trained model is safe.
            log.warning("the last evaluation did not end within %.0f s", wait_s)

    def _position(self) -> tuple[int, int, bool]:
        return self._steps.trained, self._rollouts.announced, self._dispatcher.used_up

    def _has_moved(self, since: tuple[int, int, bool]) -> bool:
        return self._position() != since or self._steps.exported

    def _all_committed(self) -> bool:
        return self._updater.under_way is None

    def _all_evaluated(self) -> bool:
        return bool(self._causes) or not self._dispatcher.evaluations_pending

    async def _end(self) -> None:
        """Tell everyone to stop; failed runs end at once, good ones give their children time."""
        self._check_given_up.set()
        if self._causes:
            await asyncio.sleep(GATHER_CAUSES_S)
        self._rollouts.ended = self._replicas.ended = True
        self._replicas.changed.ring()
        self._server.stopping = self._causes.closed = True
        self._server.grace_s = FAILED_GRACE_S if self._causes else self._config.control.stop_s
        self._bell.ring()
        joined = {member.index for member in self._server.of_role("agent")}
        left_s = self._server.grace_s + 10.0
        if not await self._bell.until(lambda: joined <= self._nodes_done, left_s):
            self._causes.found.append(
                Cause(f"nodes {sorted(joined - self._nodes_done)} did not end within {left_s:.0f} s", "agent", ENDED)
            )

    async def _close(self) -> Outcome:
        """Close everything, whatever of it fails, and write the outcome last but surely."""
        await self._server.close()
        await self._replicas.close()
        await self._updater.close()
        await self._calls.close()
        await self._seeder.close()
        try:
            if not self._causes:
                await self._record(self._dispatcher.close("run ended"))
            self._journal.phase("stopped")
            await self._journal.close()
        except Exception as error:
            self._causes.fault(error)
        finally:
            self._ledger.close()
            outcome = conclude(self._causes.found, self._done_words, self._steps.trained, self._started)
            outcome.write(self._run.exit(self._plan.attempt))
        return outcome

    # What ends a run

    def _failed(self, member: Member, error: str, trace: str) -> None:
        if member.role == "sampler" and self._has_joined(member.index):
            self._replicas.fence(member.index, "failed", f"{member.name}: {error}")
            return
        self._causes.add(Cause(f"{member.name}: {error}", member.role, AGENT if member.role == "agent" else REPORTED, trace))

    def _update_failed(self, error: UpdateError) -> None:
        self._causes.add(Cause(str(error), "sampler", REPORTED))

    async def _child_ended(self, member: Member, body: Mapping[str, Any]) -> Answer:
        code, child = int(body["code"]), str(body["child"])
        if self._causes.closed:
            return {}
        if self._is_done_with(child.split()[0]) and (code == 0 or not child.startswith("trainer")):
            return {}
        role, index = child.split()
        cause, words = child_cause(body), str(body["words"])
        if role != "sampler" or not self._has_joined(int(index)):
            self._causes.add(cause)
            return {}
        pause_s = self._replicas.died(int(index), words)
        last = self._membership.last  # what it was given up for, where that came before
        if not self._membership.serving and (self._steps.exported or self._membership.over(time.monotonic()) is not None):
            self._causes.add(cause if last == words else replace(cause, words=f"{last}; then {words}"))
        return {"restart_after_s": pause_s}

    def _has_joined(self, sampler: int) -> bool:
        """Whether its first process came so far: what fails before that is the configuration's fault."""
        return self._membership.state(sampler) != "starting"

    def _samplers_changed(self, words: str) -> None:
        self._journal.samplers_changed(self._membership, words)

    def _look_after_samplers(self) -> None:
        """End the run where nobody is left to serve and nobody has come back in time."""
        self._replicas.fence_late()
        over = self._membership.over(time.monotonic())
        if over is not None:
            self._causes.add(Cause(over, "sampler", ENDED))

    def _is_done_with(self, role: str) -> bool:
        """Whether the run can end well without the processes of a role from now on."""
        if role == "trainer":
            return self._steps.exported
        return self._steps.finishing and role != "agent" and self._all_committed() and self._all_evaluated()

    async def _watch_silence(self) -> None:
        """A member that was silent for too long is as good as dead; unless this process itself was held up, and has not read
        what they sent meanwhile."""
        control = self._config.control
        trusted = time.monotonic()  # from then on silence means something
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(control.heartbeat_s)
            if self._checked.is_set():
                await self._rollouts.expire()
            self._look_after_samplers()
            if time.monotonic() - asleep > control.heartbeat_s + LATE_S:
                log.warning("the orchestrator was held up for %.1f s", time.monotonic() - asleep - control.heartbeat_s)
                trusted = time.monotonic()
            if time.monotonic() - trusted < control.lost_after_s:
                continue
            for member in self._server.silent(control.lost_after_s):
                words = f"{member.name} on {member.host} was silent for {control.lost_after_s:.0f} s; it was {member.doing}"
                if member.role == "sampler":
                    if self._membership.state(member.index) in IN_GROUP:  # else it is known, or its next process is awaited
                        self._replicas.fence(member.index, "silent", words)
                elif not self._is_done_with(member.role):
                    self._causes.add(Cause(words, member.role, ENDED))

    async def _watch_stop_file(self) -> None:
        """control/STOP ends the run after the step in hand."""
        await self._checked.wait()
        while not self._steps.finishing:
            await asyncio.sleep(self._config.control.heartbeat_s)
            if await asyncio.to_thread(os.path.exists, self._run.stop):
                self._done_words = f"asked to stop by {self._run.stop}"
                self._finish()

    # Joins

    def _joined(self, member: Member) -> None:
        if member.role == "sampler":
            self._replicas.joined(member)
        self._bell.ring()

    def _joined_keys(self) -> set[tuple[str, int]]:
        return {key for key, member in self._server.members.items() if member.joined}

    def _missing(self, expected: set[tuple[str, int]]) -> str:
        return "these processes to join: " + ", ".join(f"{r} {i}" for r, i in sorted(expected - self._joined_keys()))

    def _waiting_for(self) -> str:
        doing = "; ".join(f"{m.name} is {m.doing}" for m in self._server.members.values() if m.role != "agent")
        return f"step {self._steps.trained + 1} to be trained ({doing})"

    def _set_problems(self) -> None:
        actors = self._server.of_role("actor")
        problems, held_out = actors[0].facts["problems"], actors[0].facts["evaluation"]
        for actor in actors[1:]:
            if (actor.facts["problems"], actor.facts["evaluation"]) != (problems, held_out):
                raise ValueError(
                    f"{actor.name} has other problems than {actors[0].name}: load_problems must not depend on the process"
                )
        self._dispatcher.problems(problems, held_out)

    def _facts_for_actors(self) -> Mapping[str, Any]:
        verifiers = self._server.of_role("verifier")
        return {
            "verifier": verifiers[0].facts["url"] if verifiers else None,
        }

    async def _children(self, member: Member, body: Mapping[str, Any]) -> Answer:
        return {"children": [child.__dict__ for child in self._plan.on_node(member.index)]}

    async def _node_done(self, member: Member, body: Mapping[str, Any]) -> Answer:
        self._nodes_done.add(member.index)
        self._bell.ring()
        return {}

    # Progress

    async def _offer_version(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """In conventional mode samplers get the first version and those that end a generation; a replay has none."""
        if not self._is_sent(int(body["step"])):
            return {"epoch": int(body["epoch"]), "world_size": 0, "send": False}
        return await self._updater.offer(body, newer_comes=not self._must_arrive(int(body["step"])))

    def _must_arrive(self, step: int) -> bool:
        """Whether a version may not be passed over for a newer one: there is none, or it is to be evaluated."""
        run = self._config.run
        evaluated = run.evaluate_every_steps and step % run.evaluate_every_steps == 0
        return run.mode == "conventional" or step == run.steps or self._steps.finishing or bool(evaluated)

    def _is_sent(self, step: int) -> bool:
        run = self._config.run
        inside = run.mode == "conventional" and step % run.steps_per_generation and step != run.steps
        return not run.replay and not (inside and self._updater.current is not None)

    def _wants_version(self) -> bool:
        """Whether the trainer is to send the version that it is at, though it has done so: a sampler came (back) later, or the
        transfer broke when the trainer had gone on already."""
        step, current = self._steps.trained, self._updater.current
        if self._updater.under_way is not None or not self._membership.group or not self._is_sent(step):
            return False
        return current is None or current.version.step != step or bool(self._membership.to_send)

    def _committed(self, committed: Committed) -> None:
        self._seeder.committed(committed)
        if committed.version != self._last_version:  # else it was sent again
            self._last_version = committed.version
            self._dispatcher.committed(committed.version)
        self._journal.committed(committed)
        self._bell.ring()

    def _trained(self, step: int, train: Mapping[str, float], data: Mapping[str, float]) -> bool:
        """Note a trained step; whether it was the last."""
        self._journal.trained(step, train, data, self._updater.current)
        return step >= self._config.run.steps

    def _evaluated(self, evaluation: Evaluation, body: Mapping[str, Any]) -> None:
        self._journal.evaluated(evaluation, body)
        self._stop_rule = self._stop_rule.scored(Score(evaluation.step, int(body["problems"]), float(body["reward_mean"])))
        self._stop_rule = self._stop_rule.closed(self._dispatcher.evaluating)
        if self._stop_rule.fulfilled and not self._steps.finishing:
            rule = self._stop_rule
            self._done_words = f"held-out reward reached {rule.reward} in {rule.needed} evaluations in a row"
            self._finish()

    def _finish(self) -> None:
        self._steps.finishing = True
        self._bell.ring()

    def _moment(self) -> Moment:
        """What a checkpoint of the last trained step has to say of the run."""
        streams = {"rollouts": self._rollouts.cursors(), "steps": self._steps.next_step - 1}
        return Moment(self._steps.trained, self._dispatcher.state(), streams, self._stop_rule.reached)
