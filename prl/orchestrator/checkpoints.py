"""The orchestrator's part in the trainer's checkpoints: what the run was like when a step had been trained is kept until the
step's files are durable; then the manifest makes them count, and what they make superfluous is deleted."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prl.config.schema import Config
from prl.control.server import Answer, Handler, Member
from prl.control.tasks import thread_to_its_end
from prl.metrics import names
from prl.orchestrator.journal import Journal
from prl.orchestrator.reclaim import Reclaimer
from prl.orchestrator.resume import Start
from prl.runfolder.manifest import Manifest, Part, write_manifest
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import in_words
from prl.runfolder.retire import Keep, retire

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moment:
    """The run when step `step` had been trained, and none after it."""

    step: int
    dispatcher: Mapping[str, Any]  # its state
    streams: Mapping[str, Any]  # how far rollouts and steps had come
    evaluations_reached: int


class Checkpoints:
    """`now` is the run at this moment; `settled` returns once all rows of the ledger that a moment counts on are durable."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        attempt: int,
        start: Start,
        journal: Journal,
        *,
        now: Callable[[], Moment],
        settled: Callable[[], Awaitable[None]],
        before: "Checkpoints | None" = None,
    ) -> None:
        """`before`: of the trainers that these have taken the place of."""
        self._run = run
        self._options = config.train
        self._attempt = attempt
        self._start = start
        self._journal = journal
        self._now = now
        self._settled = settled
        self._moments: dict[int, Moment] = {}  # of the steps whose files are being written
        self._asked: bool = before is not None and before.asked  # somebody wants the next step to be saved
        self._answer: int | None = None  # the step whose save somebody has asked for, while it is on its way
        self._closed = False
        self._counting = asyncio.Lock()  # held while a checkpoint is made to count
        self._failures: int = 0 if before is None else before._failures  # saves that came to nothing, and
        self._retired: int = 0 if before is None else before._retired  # checkpoints that were deleted, so far
        if before is None:
            self._reclaimer = Reclaimer(run, config.run.mark, attempt, in_files=config.streams.backend == "folder")
        else:
            self._reclaimer = before._reclaimer  # which knows what lies in this attempt's files
        self._reclaims = config.streams.keep == "needed"
        # The newest checkpoint. What it makes superfluous in the streams stays until the next one: should that turn out
        # damaged, a resume goes on from this one.
        self._before: Moment | None = None

    def handlers(self) -> dict[str, Handler]:
        return {"checkpoint": self._written, "checkpoint_failed": self._failed}

    async def close(self) -> None:
        """No further checkpoint counts; returns once the last one does."""
        self._closed = True
        async with self._counting:
            pass

    def ask(self) -> None:
        """Save the next step that is trained, whichever it is."""
        self._asked = True

    @property
    def asked(self) -> bool:
        """Whether a save that somebody has asked for neither counts nor has failed yet."""
        return self._asked or self._answer is not None

    def due(self, step: int) -> bool:
        """Whether the step that has just been trained is to be saved. If so, this is the moment that the checkpoint is of."""
        every = self._options.checkpoint_every_steps
        if self._asked:
            self._asked, self._answer = False, step
        elif not every or step % every:
            return False
        self._moments[step] = self._now()
        return True

    def announced(self, announcement: Mapping[str, Any]) -> None:
        """Learn what lies in a rollout file of this attempt."""
        if self._reclaims:
            self._reclaimer.announced(announcement)

    async def _written(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """The trainer's files are durable: the manifest makes them count. Where it cannot be written the trainer goes on,
        unless this was its last save."""
        async with self._counting:
            if self._closed:
                raise ValueError(f"the checkpoint of step {body['step']} does not count: {member.name} is gone")
            return await self._make_count(body)

    async def _make_count(self, body: Mapping[str, Any]) -> Answer:
        step = int(body["step"])
        moment = self._moments.pop(step, None) or self._now()
        if moment.step != step:
            raise ValueError(f"checkpoint of step {step} announced, the run is at step {moment.step}")
        await self._settled()
        manifest = Manifest(
            step=step,
            attempt=self._attempt,
            lineage=self._start.resume.lineage,
            forks=self._start.forks,
            dispatcher=moment.dispatcher,
            streams=moment.streams,
            evaluations_reached=moment.evaluations_reached,
            parts=[Part(**part) for part in body["parts"]],
        )
        try:
            await thread_to_its_end(write_manifest, self._run, manifest)
        except OSError as error:
            if body["last"]:
                raise
            self._alarm(step, in_words(error))
            return {"saved": False}
        self._ended(step)
        await self._delete(moment)
        values = {names.CHECKPOINT_BYTES: float(sum(part.bytes for part in manifest.parts)), **body["metrics"]}
        values |= {names.CHECKPOINT_FAILURES: float(self._failures), names.CHECKPOINTS_RETIRED: float(self._retired)}
        self._journal.checkpointed(step, {**values, **self._reclaimer.metrics()})
        return {"saved": True}

    async def _failed(self, member: Member, body: Mapping[str, Any]) -> Answer:
        step = int(body["step"])
        self._moments.pop(step, None)
        self._alarm(step, str(body["error"]))
        return {}

    def _alarm(self, step: int, words: str) -> None:
        log.error("the checkpoint of step %d failed, and the run goes on: %s", step, words)
        self._failures += 1
        self._ended(step)
        self._journal.save_failed(step, words, {names.CHECKPOINT_FAILURES: float(self._failures)})

    def _ended(self, step: int) -> None:
        """The save of a step counts or has failed, and with it the one that was asked for before."""
        if self._answer is not None and self._answer <= step:
            self._answer = None

    async def _delete(self, newest: Moment) -> None:
        """What is superfluous now that the checkpoint of `newest` counts. Nothing of that can end a run."""
        if self._reclaims and self._before is not None:
            await thread_to_its_end(self._reclaimer.reclaim, self._before.step, self._before.dispatcher)
        self._before = newest
        options = self._options
        keep = Keep(options.checkpoint_keep_last, options.checkpoint_keep_every_steps)
        try:
            self._retired += await thread_to_its_end(retire, self._run, newest.step, keep)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted: %s", error)
