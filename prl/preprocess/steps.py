"""The preprocessor without its process: groups go in, orders for steps come out one after another. No clock, no files.

Groups that wait are held as views of their entries' bytes, the first to come first, up to `memory_mib`. Of those beyond it only
what the choice needs is kept: whoever builds their step reads them again.
"""

from dataclasses import dataclass, replace

from prl.flow.groups import GroupQueue
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.preprocess.assemble import Moment, Prepared, prepare, refusal
from prl.preprocess.options import PreprocessOptions
from prl.streams.contract import Published
from prl.streams.records import Group

_OBJECTS_BYTES = 2048  # of a rollout in memory, besides its arrays


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a group was announced to the orchestrator, when that was heard here, and when the group was read, in seconds of the
    caller's clock."""

    announced_s: float
    heard_s: float
    read_s: float


@dataclass(frozen=True, slots=True)
class Member:
    """A group of a step."""

    entry: Published
    group: int
    issue: int
    prepared: Prepared | None  # None: to be read from its entry again


@dataclass(frozen=True, slots=True)
class StepOrder:
    """What a step is built of."""

    moment: Moment
    members: tuple[Member, ...]
    last: Arrival  # of its last group


@dataclass(slots=True)
class _Waiting:
    member: Member
    arrival: Arrival
    ids: list[RolloutId]
    versions: frozenset[Version]
    newest: int


class StepMaker:
    """Collects groups, drops what cannot be trained in the next step (nor, being older by then, in a later one)."""

    def __init__(self, options: PreprocessOptions, groups_per_step: int, order: str, memory_bytes: int) -> None:
        self._options = options
        self._groups_per_step = groups_per_step
        self._memory_bytes = memory_bytes
        self._queue = GroupQueue("dispatch" if order == "dispatch" else "arrival")
        self._waiting: dict[int, _Waiting] = {}
        self._held: dict[str, int] = {}  # entry -> its groups in memory
        self.held_bytes = 0
        self._step = 0  # that groups are collected for
        # What waits no more, by step and (group, issue), until the step is trained; None: dropped.
        self._done: dict[int, dict[tuple[int, int], _Waiting | None]] = {}
        self._discarded: list[tuple[RolloutId, str]] = []

    def __len__(self) -> int:
        """Groups that wait for a step."""
        return len(self._waiting)

    def knows(self, group: int, issue: int) -> bool:
        """Whether this issue of a group, or a later one, has been taken in: announcements may be repeated."""
        waiting = self._waiting.get(group)
        waits = waiting is not None and waiting.member.issue >= issue
        return waits or any((group, issue) in done for done in self._done.values())

    def add(self, group: Group, entry: Published, arrival: Arrival) -> None:
        """Take a group in. A later issue of one that waits takes its place; what is known is passed over."""
        if self.knows(group.group, group.issue):
            return
        if group.group in self._waiting:
            self._remove(group.group)
        prepared = prepare(group, self._options)
        if not prepared.samples:
            self._done.setdefault(self._step, {})[group.group, group.issue] = None
            self._discarded += prepared.discarded
            return
        held = prepared if self._hold(entry, len(prepared.ids)) else None
        member = Member(entry, group.group, group.issue, held)
        self._queue.add(group.group)
        self._waiting[group.group] = _Waiting(member, arrival, prepared.ids, prepared.versions, prepared.newest)

    def choose(self, moment: Moment, awaited_from: int | None = None) -> list[int] | None:
        """The groups of the step at that moment, or None where there are not enough yet. Groups that are too old or of an
        abandoned version are dropped on the way."""
        self._step = moment.step
        chosen: list[int] = []
        for number in self._queue.in_order(awaited_from):
            waiting = self._waiting[number]
            reason = refusal(waiting.versions, waiting.newest, moment, self._options.too_old)
            if reason is None:
                chosen.append(number)
                if len(chosen) == self._groups_per_step:
                    return chosen
            else:
                self._remove(number)
                self._done.setdefault(self._step, {})[number, waiting.member.issue] = None
                self._discarded += [(i, reason) for i in waiting.ids]
        return None

    def take(self, chosen: list[int], moment: Moment) -> StepOrder:
        """The order for the step of the chosen groups, which wait no more."""
        taken = [self._waiting[number] for number in chosen]
        done = self._done.setdefault(moment.step, {})
        for waiting in taken:
            member = waiting.member
            self._remove(member.group)
            done[member.group, member.issue] = replace(waiting, member=replace(member, prepared=None))
        last = max((waiting.arrival for waiting in taken), key=lambda arrival: arrival.read_s)
        return StepOrder(moment, tuple(waiting.member for waiting in taken), last)

    def give_back(self, order: StepOrder, unreadable: str) -> list[tuple[int, int]]:
        """Undo `take`: the groups wait again, but for those of an entry that cannot be read any more, which are returned."""
        done = self._done[order.moment.step]
        lost = []
        for member in order.members:
            waiting = done.pop((member.group, member.issue))
            if waiting is None or member.entry.name == unreadable:
                lost.append((member.group, member.issue))
            else:
                self._queue.add(member.group)
                self._waiting[member.group] = waiting
        return lost

    def entries(self) -> set[Published]:
        """Those whose groups wait."""
        return {waiting.member.entry for waiting in self._waiting.values()}

    def take_discarded(self) -> list[tuple[RolloutId, str]]:
        """What was dropped since the last call, each rollout with its reason."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def trained(self, step: int) -> None:
        """Steps up to this one are trained: their groups are not announced again."""
        self._step = max(self._step, step + 1)
        self._done = {s: done for s, done in self._done.items() if s > step}

    def _remove(self, number: int) -> None:
        self._queue.remove(number)
        waiting = self._waiting.pop(number)
        if waiting.member.prepared is not None:
            entry = waiting.member.entry
            self.held_bytes -= _OBJECTS_BYTES * len(waiting.ids)
            self._held[entry.name] -= 1
            if not self._held[entry.name]:
                del self._held[entry.name]
                self.held_bytes -= entry.bytes

    def _hold(self, entry: Published, rollouts: int) -> bool:
        """Whether there is room for a group in memory, which keeps all bytes of its entry."""
        size = _OBJECTS_BYTES * rollouts + (0 if entry.name in self._held else entry.bytes)
        if self.held_bytes + size > self._memory_bytes:
            return False
        self.held_bytes += size
        self._held[entry.name] = self._held.get(entry.name, 0) + 1
        return True
