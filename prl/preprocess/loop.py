"""The preprocessor's process: announced rollouts in, one step file a step out, one step ahead of the trainer.

Two tasks: one takes rollouts in and orders steps, the other publishes what was built, in order. `Workshop` does the building.
"""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

from prl.config.hf_config import read_model_config
from prl.config.plain_files import read_plain
from prl.control.child import Child
from prl.control.client import ControlClient
from prl.control.server import Bell
from prl.flow.events import to_discard_rows, to_rows
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.preprocess.assemble import Moment, drop_metrics
from prl.preprocess.builder import BuilderSettings, Built, PublishedStep, UnreadableEntry, Workshop
from prl.preprocess.replay import replay
from prl.preprocess.steps import Arrival, StepMaker, StepOrder
from prl.streams.contract import Cursor, Published, announced
from prl.streams.files import StreamError, next_sequence
from prl.streams.opening import open_reader
from prl.streams.records import Group

_VISIBLE_S = 90.0  # a new name may stay unseen on another node for a minute
_LONG_POLL_S = 5.0


async def preprocess(child: Child, client: ControlClient) -> None:
    """Run until the orchestrator says stop."""
    if child.config.run.replay:
        await client.join({})
        await replay(child, client, _data_parallel_size(child))
        return
    options, run = child.config.preprocess, child.config.run
    held_bytes = options.memory_mib * 2**20 if options.processes == 1 else 0  # workers read again for themselves
    maker = StepMaker(options, run.groups_per_step, run.order, held_bytes)
    vocabulary = read_model_config(child.model).vocabulary
    settings = BuilderSettings(
        str(child.run.path), run.mark, child.attempt, options, child.config.streams, _data_parallel_size(child), vocabulary
    )
    workshop = Workshop(settings, options.processes)
    try:
        await client.join({})
        await _Loop(child, client, maker, workshop, vocabulary).run()
    finally:
        workshop.close()


def _data_parallel_size(child: Child) -> int:
    """From the attempt's plan. Another number of ranks could deal the step files as well, only less evenly."""
    return int(json.loads(read_plain(child.run.plan(child.attempt)))["data_parallel"])


@dataclass(frozen=True)
class _Job:
    """A step in the making."""

    order: StepOrder
    built: "asyncio.Future[Built]"

    @property
    def step(self) -> int:
        return self.order.moment.step


class _Loop:
    def __init__(self, child: Child, client: ControlClient, maker: StepMaker, workshop: Workshop, vocabulary: int) -> None:
        self._child = child
        self._client = client
        self._maker = maker
        self._workshop = workshop
        self._cursor = 0
        self._next_step: int | None = None  # to be ordered
        self._trained_step: int | None = None
        self._opened_s: dict[int, float] = {}  # step -> when the trainer was near enough for it to be published
        self._jobs: deque[_Job] = deque()
        self._broken: UnreadableEntry | None = None  # what keeps the first job from being built
        self._bell = Bell()
        self._dropped: Counter[str] = Counter()  # reason to rollouts, since the last step
        self._wait_s = child.config.control.wait_s
        self._sequence = next_sequence(child.run.steps)
        self._reader = open_reader(child.run, child.config.run.mark, child.attempt, child.config.streams, vocabulary)
        self._unreadable: set[str] = set()  # entries
        self._released: tuple[Cursor, Set[Published]] = {}, frozenset()  # what is done with, and what of it is not

    async def run(self) -> None:
        tasks = [asyncio.create_task(self._order_steps()), asyncio.create_task(self._publish_steps())]
        try:
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await self._ended(*tasks, *(job.built for job in self._jobs))

    async def _ended(self, *work: "asyncio.Future[Any]") -> None:
        """Wait for work whose outcome no longer matters. Raises TimeoutError."""
        if not work:
            return
        _, pending = await asyncio.wait(work, timeout=self._wait_s)
        if pending:
            raise TimeoutError(f"{len(pending)} pieces of the preprocessor's work did not end within {self._wait_s:.0f} s")
        for done in work:
            if not done.cancelled():
                done.exception()  # looked at, so that asyncio does not speak of it

    # Rollouts in

    async def _order_steps(self) -> None:
        self._client.progress("letting go of what earlier attempts left")
        await asyncio.to_thread(self._reader.release_before, self._child.attempt)
        while not self._client.stopping.is_set():
            if self._broken is not None:
                await self._rebuild(self._broken)
            body = {"after": self._cursor, "trained_step": self._trained_step}
            deadline_s = _LONG_POLL_S + self._child.config.control.trainers_s
            answer = await self._client.call("next_rollouts", body, deadline_s=deadline_s, reason="waiting for rollouts")
            heard_s = time.monotonic()
            if answer["stop"]:
                return
            if self._next_step is None:
                self._next_step = int(answer["next_step"])
                self._client.progress(f"waiting for rollouts of step {self._next_step}")
            self._note_trained(int(answer["trained_step"]), heard_s)
            awaited = [int(answer["awaited_from"])]
            for announcement in answer["announcements"]:
                awaited += await self._take_in(announcement, int(answer["lineage"]), heard_s - announcement["age_s"], heard_s)
                if self._child.config.run.order == "arrival":
                    self._order(answer, min(awaited))  # what follows may be for a later step
            self._cursor = int(answer["cursor"])
            self._order(answer, min(awaited))
            await self._report_dropped()
            await self._release(answer["announced"])

    def _note_trained(self, step: int, now_s: float) -> None:
        if self._trained_step is not None:
            self._opened_s |= dict.fromkeys(range(self._trained_step + 3, step + 3), now_s)
        self._trained_step = step
        self._maker.trained(step)
        self._bell.ring()

    async def _take_in(self, announcement: Mapping[str, Any], lineage: int, announced_s: float, heard_s: float) -> list[int]:
        """Read an announced entry; the groups that could not be read and are awaited anew."""
        entry = announced(announcement, self._child.attempt)
        wanted = {
            (int(g["group"]), int(g["issue"]))
            for g in announcement["groups"]
            if not g["taken"] and not self._maker.knows(int(g["group"]), int(g["issue"]))
        }
        if not wanted or entry.name in self._unreadable:
            return []
        self._client.progress(f"reading {entry.name}")
        assert self._next_step is not None
        newest = Version(lineage, self._next_step - 1)  # any later one is made by a step that has yet to be ordered
        try:
            groups: list[Group] = await asyncio.to_thread(self._reader.read, entry, _VISIBLE_S, newest)
            missing = wanted - {(g.group, g.issue) for g in groups}
            if missing:
                raise StreamError(f"{entry.name}: announced groups {sorted(missing)} are not in it")
        except StreamError as error:
            await self._sample_again(entry.name, sorted(wanted), error)
            return [group for group, _ in wanted]
        arrival = Arrival(announced_s, heard_s, time.monotonic())
        for group in groups:
            if (group.group, group.issue) in wanted:
                self._maker.add(group, entry, arrival)
        return []

    async def _sample_again(self, name: str, groups: Sequence[tuple[int, int]], error: StreamError) -> None:
        """An entry that cannot be read costs its groups, which are sampled again, and not the run."""
        print(f"unreadable: {error}", flush=True)
        self._unreadable.add(name)
        for group, issue in groups:
            body = {"group": group, "issue": issue, "reason": "rollout file unreadable"}
            await self._client.call("group_failed", body, deadline_s=self._wait_s, reason=f"group {group} cannot be read")

    async def _report_dropped(self) -> None:
        discarded = self._count_dropped(self._maker.take_discarded())
        if discarded:
            body = {"discarded": to_discard_rows(discarded)}
            await self._client.call("discard", body, deadline_s=self._wait_s, reason="reporting dropped rollouts")

    def _count_dropped(self, discarded: list[tuple[RolloutId, str]]) -> list[tuple[RolloutId, str]]:
        self._dropped.update(reason for _, reason in discarded)
        return discarded

    async def _release(self, announced: Mapping[str, int]) -> None:
        """Entries of which nothing waits and nothing is in the making are done with: what was published is durable. Also those
        that were announced before this process began."""
        building = (member.entry for job in self._jobs for member in job.order.members)
        done = dict(announced), frozenset(chain(self._maker.entries(), building))
        if done != self._released:
            await asyncio.to_thread(self._reader.release, *done)
            self._released = done

    def _order(self, answer: Mapping[str, Any], awaited_from: int) -> None:
        """Have every step built that can be: for one process as many as may be published, else as many more as there are."""
        assert self._next_step is not None
        assert self._trained_step is not None
        forks = {int(later): int(step) for later, step in answer["forks"].items()}
        while self._broken is None and self._next_step <= self._trained_step + 1 + self._workshop.processes:
            moment = Moment(self._next_step, int(answer["lineage"]), forks, self._child.config.run.lag_limit)
            chosen = self._maker.choose(moment, awaited_from)
            if chosen is None:
                break
            order = self._maker.take(chosen, moment)
            self._jobs.append(_Job(order, self._workshop.build(order, self._sequence)))
            self._sequence += 1
            self._next_step += 1
            self._bell.ring()

    async def _rebuild(self, error: UnreadableEntry) -> None:
        """The first job lacks groups, which are sampled again. It and those behind it, whose turn comes later, are given up."""
        jobs = list(self._jobs)
        self._jobs.clear()
        self._broken = None
        self._next_step = jobs[0].step
        lost = [lost for job in jobs for lost in self._maker.give_back(job.order, error.name)]
        await self._ended(*(job.built for job in jobs))
        await self._sample_again(error.name, lost, error)

    # Steps out

    async def _publish_steps(self) -> None:
        while True:
            if not await self._bell.until(self._may_publish, self._wait_s):
                continue  # who waits for what is the orchestrator's to judge: it knows what this process is doing
            job = self._jobs[0]
            self._client.progress(f"writing step {job.step}")
            try:
                async with asyncio.timeout(self._wait_s):
                    built = await job.built
                    published = await self._workshop.publish(job.step)
            except UnreadableEntry as error:
                self._broken = error
                continue
            except TimeoutError:
                raise TimeoutError(f"step {job.step} was not built and written within {self._wait_s:.0f} s") from None
            await self._announce(job, built, published, time.monotonic())
            self._jobs.popleft()
            self._client.progress(f"waiting for rollouts of step {job.step + 1}")

    def _may_publish(self) -> bool:
        """One step ahead of the trainer, no more."""
        near = self._trained_step is not None and bool(self._jobs) and self._jobs[0].step <= self._trained_step + 2
        return near and self._broken is None

    async def _announce(self, job: _Job, built: Built, published: PublishedStep, now_s: float) -> None:
        last = job.order.last
        opened_s = self._opened_s.pop(job.step, last.announced_s)
        discarded = self._count_dropped(built.discarded)
        metrics = {  # what the file itself cannot say
            "held_back_s": max(0.0, opened_s - last.announced_s),
            "ready_s": now_s - max(opened_s, last.announced_s),
            "heard_s": last.heard_s - last.announced_s,
            "read_s": last.read_s - last.heard_s,
            "build_s": built.seconds,
            "publish_s": published.seconds,
            "quarantined_files": float(len(self._unreadable)),
            **drop_metrics(self._dropped),
        }
        self._dropped.clear()
        body = {
            "step": job.step,
            "path": published.file.path.relative_to(self._child.run.path).as_posix(),
            "bytes": published.file.bytes,
            "checksum": published.file.checksum,
            "trained": to_rows(built.trained),
            "discarded": to_discard_rows(discarded),
            "metrics": metrics,
        }
        await self._client.call("step_file", body, deadline_s=self._wait_s, reason=f"announcing step {job.step}")
