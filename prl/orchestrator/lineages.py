"""Where the trainers of an attempt begin: at its start, and again in a new lineage whenever they were started again, all
together. What depends on it is held until it is certain."""

import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from prl.config.schema import Config
from prl.control.ports import free_port
from prl.control.server import Answer, Bell, Handler, Member
from prl.control.tasks import thread_to_its_end
from prl.orchestrator.binding import Plan
from prl.orchestrator.causes import Causes
from prl.orchestrator.processes import ProcessDesk
from prl.orchestrator.resume import Start, checked_start, find_remains, go_back, publish_plan
from prl.orchestrator.rollouts import Record
from prl.orchestrator.work import Work
from prl.runfolder.manifest import NotWanted
from prl.runfolder.paths import RunFolder

LOOK_S = 60.0  # between two looks at whether trainers were started again, which the bell tells
AGAIN = "trainer ended"  # why rollouts that lie in no step file are sampled again


@dataclass(frozen=True)
class Launch:
    """What a trainer rank has to know before it meets the others."""

    lineage: int
    resumes: bool  # from a checkpoint; which one it is told once that is certain
    port: int  # of their rendezvous


class Lineages:
    """`work` is what the trainers of the newest lineage are at."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        plan: Plan,
        start: Start,
        *,
        make: Callable[[Start, Work | None], Work],
        record: Record,
        settled: Callable[[], Awaitable[None]],
        processes: Callable[[], ProcessDesk],
        causes: Causes,
        bell: Bell,
    ) -> None:
        """`make` the work from a start on, given that of the trainers before; `record`, `settled`: of the ledger's desk."""
        self.work = make(start, None)
        self.certain = start.resume.checkpoint is None  # where the trainers begin; all else may be used
        self._run = run
        self._config = config
        self._plan = plan
        self._make = make
        self._record = record
        self._settled = settled
        self._processes = processes
        self._causes = causes
        self._bell = bell
        self._begun = 0  # of how many restarts of the trainers it was looked where they begin
        self._host = ""
        self._launch: Launch | None = None
        self._given_up = threading.Event()

    def handlers(self) -> dict[str, Handler]:
        held = {name: self._once_certain(name) for name in self.work.handlers}
        return {**held, "training": self._training, "resume": self._resume}

    def open(self, host: str) -> None:
        """Trainer rank 0 meets the others at this address, of its node and this process's."""
        self._host = host
        resume = self.work.start.resume
        self._launch = Launch(resume.lineage, resume.checkpoint is not None, free_port(host))

    def give_up(self) -> None:
        """Nobody wants to know any more: what is still read is left, and nothing is set aside."""
        self._given_up.set()

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise NotWanted("the run ends")

    async def check(self) -> None:
        """Read the checkpoint while the processes of the run start. None of it, and nothing that depends on it, has been used
        where it turns out damaged: the attempt then begins at an older one. Trainers are not started again meanwhile: those
        are that have all joined, which they do once they know where they begin."""
        if self.certain:
            return
        before = self.work
        try:
            start = await thread_to_its_end(checked_start, self._run, self._config, before.start, self._go_on)
        except NotWanted:
            return
        if self._given_up.is_set():  # all that `work` was has been told to end: no other takes its place
            return
        if start is not before.start:
            await before.close()
            self.work = self._make(start, None)
            await thread_to_its_end(publish_plan, self._run, self._plan, start)
        await self._record(start.reissued)
        self.certain = True
        self._bell.ring()

    def leave(self) -> None:
        """The trainers end, and what they were at comes to nothing."""
        self.certain = self.work.rollouts.open = False
        self._launch = None

    async def follow(self) -> None:
        """Whenever trainers were started again, find where they begin. Until cancelled."""
        while True:
            if await self._bell.until(lambda: self._processes().trainer_starts > self._begun, LOOK_S):
                await self._begin_again()

    async def _begin_again(self) -> None:
        """Once all trainers and preprocessors of before have ended: from then on nobody adds to what lies there."""
        processes, before = self._processes(), self.work
        starts = self._begun = processes.trainer_starts

        def waited_for() -> str:
            return f"these processes to end: {', '.join(processes.trainers_to_end)}"

        limit_s = self._config.control.start_s
        if not await self._causes.wait(lambda: not processes.trainers_to_end, limit_s, waited_for):
            return
        await before.close()
        await self._settled()
        lineage, resumes = before.lineage + 1, bool(await thread_to_its_end(self._run.manifests))
        if processes.trainer_starts == starts:  # else these, too, have failed by now
            self._launch = Launch(lineage, resumes, free_port(self._host))
            self._bell.ring()
        try:
            remains = await thread_to_its_end(find_remains, self._run, self._config, lineage, self._go_on)
        except NotWanted:
            return
        start = go_back(remains, before.dispatcher, AGAIN)
        start = replace(start, refused=[*before.start.refused, *start.refused])
        self.work = self._make(start, before)
        await self._record(start.reissued)
        await thread_to_its_end(publish_plan, self._run, self._plan, start)
        if processes.trainer_starts == starts:
            self.certain = True
            self._bell.ring()

    # What processes ask

    def _once_certain(self, name: str) -> Handler:
        """The call to a desk that is held until it is certain where the trainers begin. Nothing could be handed out before,
        and what actors have to tell of is sampled again, but for what lies in step files. They wait as long as trainers may
        take to be there again: if those do not come, it is they who are to be named, and nobody else is to end of it."""

        async def call(member: Member, body: Mapping[str, Any]) -> Answer:
            await self._until(lambda: self.certain, member, f"/{name}", self._config.control.trainers_s)
            return await self.work.handlers[name](member, body)

        return call

    async def _training(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """To every trainer rank, before it meets the others."""
        await self._until(lambda: self._launch is not None, member, "where the trainer begins", self._config.control.wait_s)
        assert self._launch is not None
        return asdict(self._launch)

    async def _resume(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """{checkpoint}: its folder; null: the model's own weights."""
        await self._until(lambda: self.certain, member, "the checkpoint to go on from", self._config.control.wait_s)
        return {"checkpoint": self.work.start.resume.checkpoint}

    async def _until(self, condition: Callable[[], bool], member: Member, what: str, wait_s: float) -> None:
        """Raises ValueError: an answer would be of no use to a process that has ended meanwhile."""
        if not condition() and not await self._bell.until(lambda: condition() or member.gone, wait_s):
            raise ValueError(f"{what}: it was not certain within {wait_s:g} s where the trainers begin")
        if member.gone:
            raise ValueError(f"{what}: start {member.start} of {member.name} has ended")
