"""The steps' side of the control plane: step files from the preprocessor to the trainer, and trained steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prl.control.server import Answer, Bell, Handler, Member
from prl.flow.dispatcher import Dispatcher
from prl.flow.events import from_rows
from prl.flow.ids import RolloutId
from prl.orchestrator.rollouts import LONG_POLL_S, Record, RolloutDesk


@dataclass(frozen=True)
class StepEntry:
    """A durable step file that is trained or will be."""

    file: Mapping[str, Any]  # step, path, bytes, checksum
    trained: Sequence[RolloutId]
    metrics: Mapping[str, float] = field(default_factory=dict)


class StepDesk:
    """`trained` is the last trained step; step files above it wait for the trainer."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        rollouts: RolloutDesk,
        record: Record,
        bell: Bell,
        *,
        trained: int,
        forks: Mapping[int, int],
        lineage: int,
        waiting: Sequence[StepEntry],
        on_trained: Callable[[int, Mapping[str, float], Mapping[str, float]], bool],
        save_now: Callable[[int], bool],
        steps_at_once: int = 1,
        wants_version: Callable[[], bool] = lambda: False,
    ) -> None:
        """`steps_at_once`: so many step files may be in the making. `wants_version`: whether the trainer, while it has nothing
        to do, is to send the samplers the version that it is at."""
        self.trained = trained
        self.finishing = False  # the trainer saves, exports and ends
        self.leaving = False  # it saves and ends
        self.finished = False  # it has
        self._dispatcher = dispatcher
        self._rollouts = rollouts
        self._record = record
        self._bell = bell
        self._forks = forks
        self._lineage = lineage
        self._entries = {int(entry.file["step"]): entry for entry in waiting}
        self._on_trained = on_trained
        self._save_now = save_now
        self._steps_at_once = steps_at_once
        self._wants_version = wants_version
        # The groups of step files that are in flight: what was trained before a rollback is not any more.
        dead = {i.group for entry in waiting for i in dispatcher.ended(entry.trained)}
        self._in_files = {step: {i.group for i in entry.trained} - dead for step, entry in self._entries.items()}
        self._actors: set[int] = set()
        self._wanted: int | None = None  # as the actors were told
        self._wanted_bell = Bell()  # a thousand actors need not wake for everything
        bell.on_ring(self._look_for_wanted)

    def close(self) -> None:
        """Others take its place."""
        self._bell.off_ring(self._look_for_wanted)

    def handlers(self) -> dict[str, Handler]:
        return {
            "wanted": self._wanted_now,
            "next_rollouts": self._next_rollouts,
            "step_file": self._step_file,
            "next_step": self._next_step,
            "trained": self._trained,
            "finished": self._finished,
        }

    @property
    def next_step(self) -> int:
        """The step for which no file exists yet."""
        return max([self.trained, *self._entries]) + 1

    @property
    def waits(self) -> bool:
        """Whether a step file waits that may be trained."""
        return self._may_train(self.trained + 1)

    @property
    def in_files(self) -> int:
        """Groups that lie in step files which wait."""
        return sum(map(len, self._in_files.values()))

    def _look_for_wanted(self) -> None:
        """Find at how many finished groups an actor publishes them at once, for a step that waits; None: no step does. It is
        half an actor's share of what the step lacks. So whenever all actors together hold what it lacks, some of them publish,
        then the others, until it is complete; and the files that come last, which are read while everyone waits, are small.
        While the preprocessor is as far ahead of a trainer that has work as it may be, nobody waits."""
        in_files = set[int]().union(*self._in_files.values())
        ahead = self.next_step > self.trained + 1 + self._steps_at_once and self._may_train(self.trained + 1)
        lacking = 0 if self.finishing or ahead else self._dispatcher.lacking(in_files, self._steps_at_once)
        wanted = math.ceil(lacking / (2 * max(len(self._actors), 1))) or None
        if wanted != self._wanted or self._rollouts.ended:
            self._wanted = wanted
            self._wanted_bell.ring()

    async def _wanted_now(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """Answered as soon as it is not what the actor knows."""
        if member.index not in self._actors:
            self._actors.add(member.index)
            self._look_for_wanted()
        await self._wanted_bell.until(lambda: self._wanted != body["known"] or self._rollouts.ended, LONG_POLL_S)
        return {"groups": self._wanted, "stop": self._rollouts.ended}

    async def _next_rollouts(self, member: Member, body: Mapping[str, Any]) -> Answer:
        after, known_step = int(body["after"]), body.get("trained_step")

        def news() -> bool:
            stepped = known_step is not None and known_step != self.trained
            return self._rollouts.announced > after or self._rollouts.ended or stepped

        await self._bell.until(news, LONG_POLL_S)
        return {
            "announcements": [self._untaken(announcement) for announcement in self._rollouts.announcements(after)],
            "cursor": self._rollouts.announced,
            "announced": self._rollouts.cursors(),
            "trained_step": self.trained,
            "next_step": self.next_step,
            "awaited_from": self._dispatcher.awaited_from,
            "lineage": self._lineage,
            "forks": {str(lineage): step for lineage, step in self._forks.items()},
            "stop": self._rollouts.ended,
        }

    def _untaken(self, announcement: Mapping[str, Any]) -> Mapping[str, Any]:
        """An announcement as a preprocessor that was started again has to hear it: groups that lie in step files, or have
        ended, are `taken`."""
        in_files = set[int]().union(*self._in_files.values())

        def taken(group: int, issue: int) -> bool:
            return group in in_files or not self._dispatcher.waits(group, issue)

        groups = [{**g, "taken": taken(int(g["group"]), int(g["issue"]))} for g in announcement["groups"]]
        return {**announcement, "groups": groups}

    async def _step_file(self, member: Member, body: Mapping[str, Any]) -> Answer:
        step = int(body["step"])
        file = {key: body[key] for key in ("step", "path", "bytes", "checksum")}
        if step != self.next_step:
            raise ValueError(f"step file {step} announced, step {self.next_step} expected")
        trained = from_rows(body["trained"])
        dead = self._dispatcher.ended(trained)
        if dead:
            raise ValueError(f"step file {step} holds rollouts that have ended already, {dead[0]} for one")
        # Before anything is waited for: the sender may die meanwhile, and the next one must not make this step again.
        self._entries[step] = StepEntry(file, trained, dict(body["metrics"]))
        self._in_files[step] = {i.group for i in trained}
        await self._rollouts.discard(body["discarded"])  # rings the bell
        return {}

    async def _next_step(self, member: Member, body: Mapping[str, Any]) -> Answer:
        step, sends = int(body["step"]), body.get("sends", False)  # the version before, already

        def wants_version() -> bool:
            return not sends and self._wants_version()

        await self._bell.until(lambda: self._may_train(step) or self.finishing or wants_version(), LONG_POLL_S)
        if self.finishing:
            return {"file": None, "stop": True, "leave": self.leaving}
        entry = self._entries.get(step) if self._may_train(step) else None
        return {"file": None if entry is None else entry.file, "send": entry is None and wants_version(), "stop": False}

    def _may_train(self, step: int) -> bool:
        """In conventional mode a generation is sampled to its end before its first step begins."""
        settings = self._dispatcher.settings
        begins = settings.mode == "conventional" and (step - 1) % settings.steps_per_generation == 0
        return step in self._entries and (not begins or self._dispatcher.generation_sampled)

    async def _trained(self, member: Member, body: Mapping[str, Any]) -> Answer:
        step = int(body["step"])
        if step != self.trained + 1 or step not in self._entries:
            raise ValueError(f"step {step} reported as trained, step {self.trained + 1} expected")
        self.trained = step
        entry = self._entries.pop(step)
        del self._in_files[step]
        events = self._dispatcher.trained(step, entry.trained)
        self._rollouts.forget()
        await self._record(events)
        data = {**body["data"], **entry.metrics}  # the file's own; of one made in this attempt, its making too
        self.finishing = self._on_trained(step, body["metrics"], data) or self.finishing
        self._bell.ring()
        return {"stop": self.finishing, "leave": self.leaving, "save": self._save_now(step)}

    async def _finished(self, member: Member, body: Mapping[str, Any]) -> Answer:
        self.finished = True
        self._bell.ring()
        return {}
