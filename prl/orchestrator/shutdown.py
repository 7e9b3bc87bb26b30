"""How an attempt is ended: by a cause or after the step in hand, as whoever asks for it wants; what a good end waits for; and
how everyone is told to stop."""

import asyncio
import logging
import time
from collections.abc import Callable

from prl.config.schema import Config
from prl.control.server import Bell, ControlServer
from prl.flow.ending import Reason
from prl.orchestrator.binding import Plan
from prl.orchestrator.causes import Causes
from prl.orchestrator.lineages import Lineages
from prl.orchestrator.outcome import CANCEL, ENDED, LOST, Cause
from prl.orchestrator.processes import ProcessDesk
from prl.orchestrator.samplers import Samplers

BEATS = 3  # heartbeats that an agent has missed which is taken for gone where Slurm ends the step
GATHER_CAUSES_S = 1.0  # one death causes others; wait this long before choosing the cause
EXPLAINED_S = 15.0  # that it may take to find out why the batch system ends processes
FAILED_GRACE_S = 0.5  # children of a failed run get this long before SIGTERM

log = logging.getLogger(__name__)


class Shutdown:
    def __init__(
        self,
        config: Config,
        plan: Plan,
        server: ControlServer,
        samplers: Samplers,
        processes: ProcessDesk,
        lineages: Lineages,
        causes: Causes,
        bell: Bell,
        *,
        running: Callable[[], bool],
    ) -> None:
        """`running`: steps are trained, or may be at any time."""
        self.terminated = asyncio.Event()  # the batch system has sent SIGTERM to this process, or to another node's agent
        self.leaving = False  # nothing that is not needed for a checkpoint is started again or waited for
        self._explained = True  # nobody is asking why the batch system ends processes
        self._config = config
        self._plan = plan
        self._server = server
        self._samplers = samplers
        self._processes = processes
        self._lineages = lineages
        self._causes = causes
        self._bell = bell
        self._running = running

    # Who asks for it

    def cancel(self, words: str) -> None:
        """Somebody wants the run to end now."""
        self._end_now(words, "cancelled")

    def leave(self, words: str, reason: Reason) -> None:
        """The nodes are to be taken away: save after the step in hand, and end. Before any step there is nothing to save."""
        log.warning("%s: %s", reason, words)
        self.leaving = True
        work = self._lineages.work
        trains = self._lineages.certain and (work.rollouts.open or self._config.run.replay)
        if trains and not self._causes:
            self._explained = True
            work.leave(words, reason)
        else:
            self._end_now(words, reason)

    def stop(self, words: str) -> None:
        """A colleague asks for the end: after the step in hand, or now, where nothing is trained yet that could end well. It
        may be said again."""
        if self._running():
            self._lineages.work.finish(words, "stopped")
        elif not self._causes:
            self.cancel(f"{words} before it trained")

    def expect_deaths(self) -> None:
        """The batch system is ending processes of this run: what they die of is no cause, nor what some have died of just now.
        Somebody finds out why, and then calls `cancel` or `leave`."""
        self.leaving, self._explained = True, False

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

    # What a good end waits for

    def is_done_with(self, role: str) -> bool:
        """Whether the run can end well without the processes of a role from now on."""
        if not self._lineages.certain and not self.leaving:
            return False
        steps = self._lineages.work.steps
        if role == "trainer":
            return steps.finished
        over = self.leaving or (steps.finishing and self.all_committed() and self.all_evaluated())
        return role != "agent" and over

    def all_committed(self) -> bool:
        return self.leaving or self._samplers.all_committed()

    def all_evaluated(self) -> bool:
        return self.leaving or bool(self._causes) or self._lineages.work.all_evaluated()

    # How it is done

    async def tell_everyone(self) -> None:
        """To stop; failed runs end at once, good ones give their children time. Returns once all nodes have ended their
        children, or their time is up."""
        self._lineages.give_up()
        if self._causes:
            await asyncio.sleep(GATHER_CAUSES_S)
            await self._wait_for_late_agents()
            await self._bell.until(lambda: self._explained, EXPLAINED_S)
        self._lineages.work.rollouts.ended = self._samplers.desk.ended = True
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
