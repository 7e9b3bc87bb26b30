"""The processes of an attempt as the orchestrator knows them: who has joined, who died, failed or fell silent, and whether that
ends the run."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from prl.control.options import ControlOptions
from prl.control.server import Answer, Bell, ControlServer, Handler, Member
from prl.flow.membership import IN_GROUP
from prl.orchestrator.binding import Plan
from prl.orchestrator.causes import Causes
from prl.orchestrator.outcome import AGENT, ENDED, REPORTED, Cause, child_cause
from prl.orchestrator.samplers import Samplers

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
        done_with: Callable[[str], bool],
        exported: Callable[[], bool],
    ) -> None:
        """`done_with` a role: the run can end well without its processes from now on; `exported`: so can it without anyone
        who samples."""
        self.nodes_done: set[int] = set()
        self._server = server
        self._plan = plan
        self._samplers = samplers
        self._causes = causes
        self._bell = bell
        self._options = options
        self._done_with = done_with
        self._exported = exported
        self._expected = {(child.role, child.index) for child in plan.children}

    def handlers(self) -> dict[str, Handler]:
        return {"children": self._children, "child_ended": self._child_ended, "node_done": self._node_done}

    # Joins

    def joined(self, member: Member) -> None:
        if member.role == "sampler":
            self._samplers.desk.joined(member)
        self._bell.ring()

    def all_joined(self) -> bool:
        return self._expected <= self._joined_keys()

    def missing(self) -> str:
        return "these processes to join: " + ", ".join(f"{r} {i}" for r, i in sorted(self._expected - self._joined_keys()))

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
        self._causes.add(Cause(f"{member.name}: {error}", member.role, AGENT if member.role == "agent" else REPORTED, trace))

    async def _child_ended(self, member: Member, body: Mapping[str, Any]) -> Answer:
        code, child = int(body["code"]), str(body["child"])
        if self._causes.closed:
            return {}
        if self._done_with(child.split()[0]) and (code == 0 or not child.startswith("trainer")):
            return {}
        role, index = child.split()
        cause, words = child_cause(body), str(body["words"])
        if role != "sampler" or not self._samplers.has_joined(int(index)):
            self._causes.add(cause)
            return {}
        membership = self._samplers.membership
        pause_s = self._samplers.desk.died(int(index), words)
        last = membership.last  # what it was given up for, where that came before
        if not membership.serving and (self._exported() or membership.over(time.monotonic()) is not None):
            self._causes.add(cause if last == words else replace(cause, words=f"{last}; then {words}"))
        return {"restart_after_s": pause_s}

    async def watch_silence(self) -> None:
        """A member that was silent for too long is as good as dead; unless this process itself was held up, and has not read
        what they sent meanwhile. Until cancelled."""
        options = self._options
        trusted = time.monotonic()  # from then on silence means something
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(options.heartbeat_s)
            self._look_after_samplers()
            if time.monotonic() - asleep > options.heartbeat_s + LATE_S:
                log.warning("the orchestrator was held up for %.1f s", time.monotonic() - asleep - options.heartbeat_s)
                trusted = time.monotonic()
            if time.monotonic() - trusted < options.lost_after_s:
                continue
            for member in self._server.silent(options.lost_after_s):
                words = f"{member.name} on {member.host} was silent for {options.lost_after_s:.0f} s; it was {member.doing}"
                if member.role == "sampler":
                    if self._samplers.membership.state(member.index) in IN_GROUP:  # else it is known, or awaited anew
                        self._samplers.desk.fence(member.index, "silent", words)
                elif not self._done_with(member.role):
                    self._causes.add(Cause(words, member.role, ENDED))

    def _look_after_samplers(self) -> None:
        """End the run where nobody is left to serve and nobody has come back in time."""
        self._samplers.desk.fence_late()
        over = self._samplers.membership.over(time.monotonic())
        if over is not None:
            self._causes.add(Cause(over, "sampler", ENDED))

    # Nodes

    async def _children(self, member: Member, body: Mapping[str, Any]) -> Answer:
        return {"children": [child.__dict__ for child in self._plan.on_node(member.index)]}

    async def _node_done(self, member: Member, body: Mapping[str, Any]) -> Answer:
        self.nodes_done.add(member.index)
        self._bell.ring()
        return {}
