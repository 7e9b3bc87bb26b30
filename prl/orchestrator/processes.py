"""The processes of an attempt as the orchestrator knows them: who has joined, who died, failed or fell silent, and whether that
ends the run or another process takes its place."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from prl.control.options import ControlOptions
from prl.control.server import Answer, Bell, ControlServer, Handler, Member
from prl.flow.membership import IN_GROUP
from prl.flow.patience import Patience
from prl.flow.restarts import RestartRule, Restarts, Together
from prl.orchestrator.binding import Plan
from prl.orchestrator.causes import Causes
from prl.orchestrator.outcome import AGENT, ENDED, LOST, REPORTED, Cause, child_cause
from prl.orchestrator.replicas import SERVING_POLL_S
from prl.orchestrator.samplers import Samplers
from prl.orchestrator.staging import StageOrders
from prl.runfolder.publish import says_full

RESTARTED = ("actor", "verifier", "preprocess")  # each by itself, beside samplers, which have their membership
LATE_S = 1.0  # later than this after a sleep, this process was held up
log = logging.getLogger(__name__)


class ProcessDesk:
    def __init__(
        self,
        server: ControlServer,
        plan: Plan,
        samplers: Samplers,
        causes: Causes,
        bell: Bell,
        options: ControlOptions,
        *,
        on_restarts: Callable[[int, str], None],
        on_terminated: Callable[[], None],
        actor_joined: Callable[[], None],
        actor_lost: Callable[[int], Awaitable[None]],
        trainers_lost: Callable[[], None],
        done_with: Callable[[str], bool],
        finished: Callable[[], bool],
        leaving: Callable[[], bool],
        local: StageOrders | None = None,
    ) -> None:
        """`on_restarts`: how many there were, and what happened in words. `on_terminated`: the batch system has sent SIGTERM to
        a node's agent. `actor_joined`: another one has its problems; `actor_lost`: what it held has to be handed out again;
        `trainers_lost`: they are all ended, and others take their place. `done_with` a role: the run can end well without its
        processes from now on; `finished`: so can it without anyone who samples; `leaving`: there is no time to train anything
        again; `local`: what every node is to have on its own disk."""
        self.nodes_done: set[int] = set()
        self._server = server
        self._plan = plan
        self._samplers = samplers
        self._causes = causes
        self._bell = bell
        self._options = options
        self._done_with = done_with
        self._finished = finished
        self._on_restarts = on_restarts
        self._on_terminated = on_terminated
        self._actor_joined = actor_joined
        self._actor_lost = actor_lost
        self._trainers_lost = trainers_lost
        self._leaving = leaving
        self._local = local
        rule = RestartRule(options.restarts, options.restart_pause_s, options.start_s)
        self._trainers = Together(
            replace(rule, start_s=options.trainers_s), [child.name for child in plan.children if child.role == "trainer"]
        )
        self._restarts = Restarts(rule, [child.name for child in plan.children if child.role in RESTARTED])
        self._dumps = 0
        self._said: dict[str, Cause] = {}  # by such a process, or of it, before it ended
        self._expected = {(child.role, child.index) for child in plan.children}

    def handlers(self) -> dict[str, Handler]:
        return {
            "children": self._children,
            "child_ended": self._child_ended,
            "node_done": self._node_done,
            "terminated": self._terminated,
            "orders": self._orders,
            "verifier": self._verifier,
        }

    # Joins

    def joined(self, member: Member) -> None:
        if member.role == "sampler":
            self._samplers.desk.joined(member)
        if member.name in self._restarts:
            again = self._restarts.state(member.name) == "restarting"
            if member.role == "actor" and again:
                self._actor_joined()
            self._restarts.join(member.name)
            if again:
                self._note(f"{member.name} is there again")
        if member.name in self._trainers:
            self._trainers.join(member.name)
            if self._trainers.again and self._trainers.complete:
                self._note("all trainer ranks are there again")
        (self._samplers.desk.changed if member.role == "verifier" else self._bell).ring()

    def all_joined(self) -> bool:
        return self._expected <= self._joined_keys()

    def missing(self) -> str:
        late = ", ".join(f"{role} {index}" for role, index in sorted(self._expected - self._joined_keys()))
        return f"these processes to join: {late} (see the ends of their logs; control.start_s says how long they may take)"

    def doing(self) -> str:
        """What everyone is doing, in words."""
        return "; ".join(f"{m.name} is {m.doing}" for m in self._server.members.values() if m.role != "agent")

    def _joined_keys(self) -> set[tuple[str, int]]:
        return {key for key, member in self._server.members.items() if member.joined}

    # Ends

    def failed(self, member: Member, error: str, trace: str) -> None:
        """A process says what ends it."""
        if member.role == "sampler" and self._samplers.has_joined(member.index):
            self._samplers.desk.fence(member.index, "failed", f"{member.name}: {error}")
            return
        cause = Cause(f"{member.name}: {error}", member.role, AGENT if member.role == "agent" else REPORTED, trace)
        by_itself = member.name in self._restarts and self._restarts.state(member.name) != "starting"
        restarts = by_itself or (member.name in self._trainers and self._may_restart_trainers())
        restarts |= member.name in self.trainers_to_end  # by the last restart that there may be, too
        if restarts and not member.ends_run and not says_full(error):
            self._said[member.name] = cause  # it ends now, and may be started again
        else:
            self._causes.add(cause)

    async def _child_ended(self, member: Member, body: Mapping[str, Any]) -> Answer:
        code, child = int(body["code"]), str(body["child"])
        role, index = child.split()[0], int(child.split()[1])
        self._server.forget(role, index, int(body["number"]))
        if self._causes.closed:
            return {}
        if role == "actor":
            await self._actor_lost(index)
        if self._done_with(role) and (code == 0 or role != "trainer"):
            if role == "sampler":
                self._samplers.desk.fence(index, "died", str(body["words"]))  # whoever sends to it need not wait for it
            return {}
        if child in self._restarts:
            return self._restarted(child, body)
        if child in self._trainers:
            return self._trainer_ended(child, body)
        cause, words = child_cause(body), str(body["words"])
        if role != "sampler" or not self._samplers.has_joined(index):
            self._causes.add(cause)
            return {}
        membership = self._samplers.membership
        pause_s = self._samplers.desk.died(index, words)
        last = membership.last  # what it was given up for, where that came before
        if not membership.serving and (self._finished() or membership.over(time.monotonic()) is not None):
            self._causes.add(cause if last == words else replace(cause, words=f"{last}; then {words}"))
        return {"restart_after_s": pause_s}

    def _restarted(self, child: str, body: Mapping[str, Any]) -> Answer:
        """Another process for an actor, verifier or preprocessor that died; once it was started often enough, the end."""
        ended = child_cause(body)
        cause = self._said.pop(child, ended)
        pause_s = self._restarts.died(child, time.monotonic())
        words = cause.words if cause is ended else f"{cause.words}; then {ended.words}"
        if pause_s is None:
            again = self._restarts.again(child)
            often = f"; it had been started again {again} times (control.restarts)" if again else ""
            self._causes.add(replace(cause, words=f"{cause.words}{often}"))
            return {}
        self._note(f"{words}; it is started again in {pause_s:g} s")
        self._samplers.desk.changed.ring()  # nobody is to send the token to where a verifier listened
        return {"restart_after_s": pause_s}

    # Trainers

    @property
    def trainer_starts(self) -> int:
        """How often they were started again."""
        return self._trainers.again

    @property
    def trainers_to_end(self) -> list[str]:
        """Who of them, and of the preprocessors that work for them, has to end before others may begin."""
        preprocessors = [name for name, _ in self._restarts.to_end if name.startswith("preprocess ")]
        return [*(name for name, _ in self._trainers.to_end), *preprocessors]

    @property
    def trainers_complete(self) -> bool:
        return self._trainers.complete

    def renew_trainers(self, cause: Cause) -> None:
        """They are not trusted any more, since one of them stands still: all begin again, or the run ends with this cause."""
        if self._trainers.to_end:
            return  # that is known
        if self._may_restart_trainers() and self._trainers.renew(time.monotonic()):
            self._begin_again(cause.words)
        else:
            self._causes.add(self._worn_out(cause))

    def _may_restart_trainers(self) -> bool:
        return self._trainers.may_restart and not self._causes and not self._leaving() and not self._finished()

    def _trainer_ended(self, child: str, body: Mapping[str, Any]) -> Answer:
        """One of a crew that ends, or the first one, with which all of them have to end and begin again."""
        ended = child_cause(body)
        cause = self._said.pop(child, ended)
        words = cause.words if cause is ended else f"{cause.words}; then {ended.words}"
        expected = child in [name for name, _ in self._trainers.to_end]
        if not expected and not self._may_restart_trainers():
            self._causes.add(self._worn_out(cause))
            return {}
        pause_s = self._trainers.died(child, time.monotonic())
        if expected:
            self._note(words)
            self._bell.ring()  # it may have been the last one
        else:
            self._begin_again(words)
        return {"restart_after_s": pause_s}

    def _begin_again(self, words: str) -> None:
        self._note(f"{words}; all trainer ranks are started again, from the newest checkpoint")
        for child in self._plan.children:
            if child.role == "preprocess":
                self._restarts.renew(child.name)
        self._trainers_lost()
        self._samplers.desk.changed.ring()  # who is to end

    def _worn_out(self, cause: Cause) -> Cause:
        again = self._trainers.again
        often = f"; the trainer had been started again {again} times (control.restarts)" if again else ""
        return replace(cause, words=f"{cause.words}{often}")

    def _look_after_trainers(self) -> None:
        """Those that were started again have to join in time."""
        if self._trainers.late(time.monotonic()):
            to_end = self.trainers_to_end
            words = f"{', '.join(to_end)} did not end" if to_end else "the trainer was started again and did not join"
            cause = Cause(f"{words} within {self._options.trainers_s:g} s", "trainer", ENDED)
            if to_end:
                self._causes.add(cause)
            else:
                self.renew_trainers(cause)

    # Silence

    def _give_up(self, name: str, words: str) -> None:
        """Have a process end that is not trusted any more."""
        if self._restarts.fence(name):
            self._said[name] = Cause(words, name.split()[0], ENDED)
            self._note(words)
            self._samplers.desk.changed.ring()

    def _note(self, words: str) -> None:
        log.warning("%s", words)
        self._on_restarts(self._restarts.granted + self._trainers.again, words)

    async def watch_silence(self) -> None:
        """A member that was silent for too long is as good as dead; unless this process itself was held up, and has not read
        what they sent meanwhile. Until cancelled."""
        options = self._options
        patience = Patience(options.lost_after_s)
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(options.heartbeat_s)
            self._look_after_samplers()
            self._look_after_trainers()
            for name in self._restarts.late(time.monotonic()):
                self._give_up(name, f"{name} was started again and did not join in time")
            now = time.monotonic()
            if (late_s := now - asleep - options.heartbeat_s) > LATE_S:
                log.warning("the orchestrator was held up for %.1f s", late_s)
                patience.held_up(late_s, now)
            for member in self._server.silent(patience.limit_s(now)):
                words = f"{member.name} on {member.host} was silent for {options.lost_after_s:.0f} s; it was {member.doing}"
                if member.role == "sampler":
                    if self._samplers.membership.state(member.index) in IN_GROUP:  # else it is known, or awaited anew
                        self._samplers.desk.fence(member.index, "silent", words)
                elif self._done_with(member.role):
                    continue
                elif member.name in self._restarts:
                    self._give_up(member.name, words)
                elif member.name in self._trainers:
                    self.renew_trainers(Cause(words, member.role, ENDED))
                elif member.role == "agent":
                    host = self._plan.name_of(member.index)
                    self._causes.add(Cause(words, member.role, LOST, reason="node failure", host=host))
                else:
                    self._causes.add(Cause(words, member.role, ENDED))

    def _look_after_samplers(self) -> None:
        """End the run where nobody is left to serve and nobody has come back in time."""
        self._samplers.desk.fence_late()
        over = self._samplers.membership.over(time.monotonic())
        if over is not None and not self._done_with("sampler"):
            self._causes.add(Cause(over, "sampler", ENDED))

    # Nodes, and what others need to know of processes

    def dump_stacks(self) -> None:
        """Have every process write into its log what it is at."""
        self._dumps += 1
        self._samplers.desk.changed.ring()

    async def _orders(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """{known: [[name, start]...], dumps}: more of the agent's processes that have to end, and how often all were to write
        their stacks down, as soon as that is more often than `dumps`."""
        own = {child.name for child in self._plan.on_node(member.index)}
        known = [tuple(entry) for entry in body["known"]]

        def to_end() -> list[tuple[str, int]]:
            wanted = [*self._samplers.desk.to_end, *self._restarts.to_end, *self._trainers.to_end]
            return [entry for entry in wanted if entry[0] in own and entry not in known]

        def news() -> bool:
            return bool(to_end()) or self._dumps > int(body["dumps"]) or self._samplers.desk.ended

        await self._samplers.desk.changed.until(news, SERVING_POLL_S)
        return {"end": to_end(), "dumps": self._dumps, "stop": self._samplers.desk.ended}

    async def _verifier(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """{known: url or null}: where the verifier listens, as soon as it is elsewhere; null: nowhere at the moment."""

        def url() -> str | None:
            verifiers = self._server.of_role("verifier")
            return str(verifiers[0].facts["url"]) if verifiers else None

        await self._samplers.desk.changed.until(lambda: url() != body["known"] or self._samplers.desk.ended, SERVING_POLL_S)
        return {"url": url(), "stop": self._samplers.desk.ended}

    async def _children(self, member: Member, body: Mapping[str, Any]) -> Answer:
        local = None if self._local is None else asdict(self._local)
        return {"children": [child.__dict__ for child in self._plan.on_node(member.index)], "local": local}

    async def _terminated(self, member: Member, body: Mapping[str, Any]) -> Answer:
        log.warning("%s on %s got SIGTERM from the batch system", member.name, member.host)
        self._on_terminated()
        return {}

    async def _node_done(self, member: Member, body: Mapping[str, Any]) -> Answer:
        self.nodes_done.add(member.index)
        self._bell.ring()
        return {}
