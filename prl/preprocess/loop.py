"""The preprocessor's process: announced rollout files in, one step file a step out, one step ahead of the trainer."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from prl.control.child import Child
from prl.control.client import ControlClient
from prl.flow.events import to_discard_rows, to_rows
from prl.preprocess.assemble import Moment
from prl.preprocess.steps import Made, StepMaker
from prl.streams.contract import announced
from prl.streams.files import StreamError, StreamFile, next_sequence
from prl.streams.opening import open_reader
from prl.streams.records import Group
from prl.streams.steps import write_step

_VISIBLE_S = 90.0  # a new name may stay unseen on another node for a minute
_LONG_POLL_S = 5.0


async def preprocess(child: Child, client: ControlClient) -> None:
    """Run until the orchestrator says stop."""
    run = child.config.run
    ranks = _data_parallel_size(child)
    maker = StepMaker(child.config.preprocess, run.groups_per_step, run.order, ranks)
    await client.join({})
    await _Loop(child, client, maker).run()


def _data_parallel_size(child: Child) -> int:
    """From the attempt's plan. Another number of ranks could deal the step files as well, only less evenly."""
    plan = json.loads(child.run.plan(child.attempt).read_text())
    ranks = [process for process in plan["children"] if process["role"] == "trainer"]
    return max(1, len(ranks) // child.config.train.tensor_parallel)


class _Loop:
    def __init__(self, child: Child, client: ControlClient, maker: StepMaker) -> None:
        self._child = child
        self._client = client
        self._maker = maker
        self._cursor = 0
        self._next_step: int | None = None
        self._wait_s = child.config.control.wait_s
        self._sequence = next_sequence(child.run.steps)
        self._reader = open_reader(child.run, child.config.run.name, child.attempt, child.config.streams)
        self._unreadable: set[str] = set()  # paths

    async def run(self) -> None:
        trained_step: int | None = None
        while not self._client.stopping.is_set():
            body = {"after": self._cursor, "trained_step": trained_step}
            answer = await self._client.call(
                "next_rollouts", body, deadline_s=_LONG_POLL_S + self._wait_s, reason="waiting for rollouts"
            )
            came_s = time.monotonic()
            if answer["stop"]:
                return
            trained_step = int(answer["trained_step"])
            if self._next_step is None:
                self._next_step = int(answer["next_step"])
                self._client.progress(f"waiting for rollouts of step {self._next_step}")
            self._maker.trained(trained_step)
            awaited = [int(answer["awaited_from"])]
            for announcement in answer["announcements"]:
                awaited += await self._take_in(announcement)
            self._cursor = int(answer["cursor"])
            await self._make_steps(answer, min(awaited), came_s)

    # Rollouts in

    async def _take_in(self, announcement: Mapping[str, Any]) -> list[int]:
        """Read an announced file; the groups that could not be read and are awaited anew."""
        wanted = {
            (int(g["group"]), int(g["issue"]))
            for g in announcement["groups"]
            if not g["late"] and not self._maker.knows(int(g["group"]), int(g["issue"]))
        }
        if not wanted or announcement["path"] in self._unreadable:
            return []
        self._client.progress(f"reading {announcement['path']}")
        try:
            groups = await asyncio.to_thread(self._read, announcement)
            missing = wanted - {(g.group, g.issue) for g in groups}
            if missing:
                raise StreamError(f"{announcement['path']}: announced groups {sorted(missing)} are not in it")
        except StreamError as error:
            self._unreadable.add(announcement["path"])
            await self._sample_again(sorted(wanted), error)
            return [group for group, _ in wanted]
        for group in groups:
            if (group.group, group.issue) in wanted:
                self._maker.add(group)
        return []

    def _read(self, announcement: Mapping[str, Any]) -> list[Group]:
        return self._reader.read(announced(announcement, self._child.attempt), _VISIBLE_S)

    async def _sample_again(self, groups: list[tuple[int, int]], error: StreamError) -> None:
        """A file that cannot be read costs its groups, which are sampled again, and not the run."""
        print(f"unreadable: {error}", flush=True)
        for group, issue in groups:
            body = {"group": group, "issue": issue, "reason": "rollout file unreadable"}
            await self._client.call("group_failed", body, deadline_s=self._wait_s, reason=f"group {group} cannot be read")

    # Steps out

    async def _make_steps(self, answer: Mapping[str, Any], awaited_from: int, came_s: float) -> None:
        """Write every step that can be written now, at most one ahead of the trainer, and report what was dropped."""
        trained_step, lineage = int(answer["trained_step"]), int(answer["lineage"])
        forks = {int(later): int(step) for later, step in answer["forks"].items()}
        while self._next_step is not None:
            moment = Moment(self._next_step, lineage, forks, self._max_lag())
            chosen = self._maker.choose(moment, awaited_from)
            if chosen is None or trained_step < moment.step - 2:
                break
            self._client.progress(f"writing step {moment.step}")
            made, published = await asyncio.to_thread(self._write, chosen, moment)
            await self._announce(made, published, time.monotonic() - came_s)
            self._next_step += 1
            self._client.progress(f"waiting for rollouts of step {self._next_step}")
        discarded = self._maker.take_discarded()
        if discarded:
            body = {"discarded": to_discard_rows(discarded)}
            await self._client.call("discard", body, deadline_s=self._wait_s, reason="reporting dropped rollouts")

    def _max_lag(self) -> int:
        run = self._child.config.run
        return run.max_lag if run.mode == "pipeline" else run.steps_per_generation - 1

    def _write(self, chosen: list[int], moment: Moment) -> tuple[Made, StreamFile]:
        made = self._maker.make(chosen, moment)
        published = write_step(
            self._child.run.steps,
            moment.step,
            made.step.microbatches,
            made.step.facts,
            run=self._child.config.run.name,
            attempt=self._child.attempt,
            sequence=self._sequence,
        )
        self._sequence += 1
        return made, published

    async def _announce(self, made: Made, published: StreamFile, preprocess_s: float) -> None:
        """`preprocess_s` runs from the orchestrator's answer that made the step possible to its durable file."""
        step = made.step.facts.step
        metrics = {**made.step.metrics, "preprocess_s": preprocess_s, "unreadable_files": float(len(self._unreadable))}
        body = {
            "step": step,
            "path": published.path.relative_to(self._child.run.path).as_posix(),
            "bytes": published.bytes,
            "checksum": published.checksum,
            "trained": to_rows(made.trained),
            "discarded": to_discard_rows([*self._maker.take_discarded(), *made.discarded]),
            "metrics": metrics,
        }
        await self._client.call("step_file", body, deadline_s=self._wait_s, reason=f"announcing step {step}")
