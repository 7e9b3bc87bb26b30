"""The preprocessor without its process: groups go in, steps come out one after another. No clock, no files, no calls."""

from dataclasses import dataclass

from prl.flow.groups import GroupQueue
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.preprocess.assemble import Moment, Prepared, Step, build_step, prepare, refusal, versions_of
from prl.preprocess.options import PreprocessOptions
from prl.streams.records import Group


@dataclass(frozen=True, slots=True)
class Made:
    """A step, and how every rollout of its groups ends."""

    step: Step
    trained: list[RolloutId]
    discarded: list[tuple[RolloutId, str]]


@dataclass(slots=True)
class _Waiting:
    prepared: Prepared
    versions: frozenset[Version]


class StepMaker:
    """Collects groups for step `next_step`, drops what cannot be trained in it (nor, being older by then, in a later one)."""

    def __init__(self, options: PreprocessOptions, groups_per_step: int, order: str, data_parallel_size: int) -> None:
        self._options = options
        self._groups_per_step = groups_per_step
        self._data_parallel_size = data_parallel_size
        self._queue = GroupQueue("dispatch" if order == "dispatch" else "arrival")
        self._waiting: dict[int, _Waiting] = {}
        self._taken: dict[int, set[tuple[int, int]]] = {}  # step -> (group, issue), until the step is trained
        self._discarded: list[tuple[RolloutId, str]] = []

    def __len__(self) -> int:
        """Groups that wait for a step."""
        return len(self._waiting)

    def knows(self, group: int, issue: int) -> bool:
        """Whether this issue of a group has been taken in: announcements may be repeated."""
        waiting = self._waiting.get(group)
        waits = waiting is not None and waiting.prepared.group.issue == issue
        return waits or any((group, issue) in taken for taken in self._taken.values())

    def add(self, group: Group) -> None:
        """Take a group in. Another issue of one that waits takes its place."""
        prepared = prepare(group, self._options)
        if not prepared.samples:
            self._discarded += prepared.discarded
            return
        self._queue.add(group.group)
        self._waiting[group.group] = _Waiting(prepared, versions_of(group))

    def choose(self, moment: Moment, awaited_from: int | None = None) -> list[int] | None:
        """The groups of the step at that moment, or None where there are not enough yet. Groups that are too old or of an
        abandoned version are dropped on the way."""
        chosen: list[int] = []
        for number in self._queue.in_order(awaited_from):
            group = self._waiting[number].prepared.group
            reason = refusal(self._waiting[number].versions, moment)
            if reason is None:
                chosen.append(number)
                if len(chosen) == self._groups_per_step:
                    return chosen
            else:
                self._remove(number)
                self._discarded += [(i, reason) for i in group.rollout_ids()]
        return None

    def make(self, chosen: list[int], moment: Moment) -> Made:
        """The step of the chosen groups, which leave the queue."""
        groups = [self._waiting[number].prepared for number in chosen]
        step = build_step(groups, moment, self._options, self._data_parallel_size)
        for number in chosen:
            self._remove(number)
        self._taken[moment.step] = {(g.group.group, g.group.issue) for g in groups}
        trained = [sample.rollout for g in groups for sample in g.samples]
        discarded = [end for g in groups for end in g.discarded]
        return Made(step, trained, discarded)

    def take_discarded(self) -> list[tuple[RolloutId, str]]:
        """What was dropped since the last call, each rollout with its reason."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def trained(self, step: int) -> None:
        """Steps up to this one are trained: their groups are not announced again."""
        self._taken = {s: taken for s, taken in self._taken.items() if s > step}

    def _remove(self, number: int) -> None:
        self._queue.remove(number)
        del self._waiting[number]
