"""The phases of an attempt, from the preflight to the last evaluation, each with a deadline; who is waited for where nothing
goes on."""

import asyncio
import faulthandler
import logging
import sys
from functools import partial
from pathlib import Path

from prl.config.schema import Config
from prl.control.server import Bell, ControlServer
from prl.flow.stall import Queues, waited_for
from prl.orchestrator.causes import Causes
from prl.orchestrator.journal import Journal
from prl.orchestrator.lineages import Lineages
from prl.orchestrator.outcome import ENDED, Cause
from prl.orchestrator.preflight import PreflightDesk
from prl.orchestrator.processes import ProcessDesk
from prl.orchestrator.samplers import Samplers
from prl.orchestrator.shutdown import Shutdown
from prl.orchestrator.work import Work

STACKS_S = 2.0  # that processes have to write their stacks down

log = logging.getLogger(__name__)


class Phases:
    """Starting, seeding (the first version reaches all samplers), running, finishing."""

    def __init__(
        self,
        config: Config,
        logs: Path,
        server: ControlServer,
        preflight: PreflightDesk,
        samplers: Samplers,
        processes: ProcessDesk,
        lineages: Lineages,
        shutdown: Shutdown,
        journal: Journal,
        causes: Causes,
        bell: Bell,
        *,
        stage_s: float,
    ) -> None:
        """`logs`: the attempt's; `stage_s`: what every node may take to bring onto its own disk what its processes read."""
        self.running = False  # rollouts are handed out whenever the samplers serve what is trained
        self._config = config
        self._logs = logs
        self._server = server
        self._preflight = preflight
        self._samplers = samplers
        self._processes = processes
        self._lineages = lineages
        self._shutdown = shutdown
        self._journal = journal
        self._causes = causes
        self._bell = bell
        self._stage_s = stage_s

    @property
    def _work(self) -> Work:
        return self._lineages.work

    async def pass_all(self) -> None:
        """Until the trainer has finished and all that a good end waits for is there, or the run has a cause to end."""
        control, weights, replay = self._config.control, self._config.weights, self._config.run.replay
        if not await self._preflight.passed():
            return
        checking = "the checkpoint's files to be checked"
        if not await self._causes.wait(lambda: self._lineages.certain, control.wait_s, lambda: checking):
            return
        start_s = control.start_s + self._stage_s
        if not await self._causes.wait(self._processes.all_joined, start_s, self._processes.missing):
            return
        self._samplers.begin()
        if not replay:
            self._work.rollouts.set_problems(self._server.of_role("actor"))
        self._journal.phase("seeding")
        deadline_s = 2 * (weights.group_s + weights.update_s)  # twice what it takes: a sampler may have to be left out
        if replay or await self._causes.wait(
            lambda: self._samplers.current is not None, deadline_s, lambda: "the first version at all samplers"
        ):
            self._journal.phase("running")
            self.running = True
            self.open_rollouts()
            await self._run_steps()
            await self._finish()

    def open_rollouts(self) -> None:
        """Whatever was waited for is there, or some of it: rollouts are handed out once nothing is missing."""
        if self.running and self._lineages.certain and self._samplers.serve_lineage:
            self._work.rollouts.open = True
        self._bell.ring()

    async def _run_steps(self) -> None:
        """Until the trainer has finished; a step or some groups have to end within control.no_progress_s."""
        while not self._work.steps.finished and not self._causes:
            if self._lineages.certain and self._work.dispatcher.used_up:
                self._work.finish(f"every problem was used {self._config.run.epochs} times")
            if not await self._bell.until(partial(self._goes_on, self._work.position()), self._config.control.no_progress_s):
                await self._look_into_stall()

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
        words += f"{role}, {why} ({self._processes.doing()}); stacks are in {self._logs}"
        cause = Cause(words, role, ENDED)
        if role == "trainer":
            self._processes.renew_trainers(cause)
        else:
            self._causes.add(cause)

    async def _finish(self) -> None:
        self._journal.phase("finishing")
        update_s, wait_s = self._config.weights.update_s, self._config.control.wait_s
        if not self._causes:
            await self._causes.wait(self._shutdown.all_committed, update_s, lambda: "the last version at all samplers")
        if not self._causes and not await self._bell.until(self._shutdown.all_evaluated, wait_s):
            # No cause to fail: the trained model is safe.
            log.warning("the last evaluation did not end within %.0f s", wait_s)
