"""The training groups that were handed out and have not ended, and the ledger's events of everything that happens to them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from prl.flow.events import EventKind, LedgerEvent
from prl.flow.ids import Lease, RolloutId
from prl.flow.problems import DispatcherError, Draw
from prl.flow.versions import Version

Status = Literal["queued", "leased", "received"]


@dataclass(slots=True)
class Flight:
    """A group on its way. `issued` rollouts are those of the current issue without an end; `bytes` it has announced, none
    before it is received."""

    domain: str
    index: int
    epoch: int
    issue: int
    status: Status
    actor: int | None = None
    since_s: float = 0.0
    failures: int = 0
    bytes: int = 0
    issued: list[int] = field(default_factory=list)

    @property
    def problem(self) -> str:
        return f"{self.domain}/{self.index}"


class InFlight:
    """Groups by number: 0, 1, 2, ... without gaps in the order in which they were drawn. A group leaves with the end of its
    last rollout."""

    def __init__(self) -> None:
        self.counts = {"issued": 0, "trained": 0, "discarded": 0, "issued_again": 0}  # rollouts
        self.discard_reasons: dict[str, int] = {}
        self.next_group = 0
        self.events = 0  # told so far
        self.received_bytes = 0  # of all received groups
        self._groups: dict[int, Flight] = {}
        self._numbers: dict[Status, set[int]] = {status: set() for status in get_args(Status)}

    def __len__(self) -> int:
        return len(self._groups)

    # What is on its way

    def at(self, number: int, issue: int) -> Flight | None:
        """The group, if this issue of it was handed out and has not ended."""
        flight = self._groups.get(number)
        return None if flight is None or flight.issue != issue or flight.status == "queued" else flight

    def count(self, *statuses: Status) -> int:
        """How many groups are of these statuses."""
        return sum(len(self._numbers[status]) for status in statuses)

    def having(self, *statuses: Status) -> list[tuple[int, Flight]]:
        """The groups of these statuses, by number."""
        return [(n, self._groups[n]) for n in sorted(n for status in statuses for n in self._numbers[status])]

    def alive(self, ids: Iterable[RolloutId]) -> dict[int, list[int]]:
        """Group to rollouts, of those ids that have begun and not ended, each once."""
        alive: dict[int, list[int]] = {}
        for i in dict.fromkeys(ids):
            flight = self._groups.get(i.group)
            if flight is not None and flight.issue == i.issue and i.rollout in flight.issued:
                alive.setdefault(i.group, []).append(i.rollout)
        return alive

    def ids(self, number: int) -> list[RolloutId]:
        """A group's rollouts that have begun and not ended."""
        f = self._groups[number]
        return [RolloutId(f.epoch, f.problem, number, k, f.issue) for k in f.issued]

    # What happens to it

    def add(self, draw: Draw) -> int:
        """A new group; it waits to be handed out."""
        number, self.next_group = self.next_group, self.next_group + 1
        self._groups[number] = Flight(draw.domain, draw.index, draw.epoch, 0, "queued")
        self._numbers["queued"].add(number)
        return number

    def hand_out(self, number: int, rollouts: int, actor: int, now: float, version: Version) -> tuple[Lease, list[LedgerEvent]]:
        flight = self._move(number, "leased")
        flight.actor, flight.since_s = actor, now
        flight.issued = list(range(rollouts))
        lease = Lease("train", flight.domain, flight.index, flight.epoch, number, flight.issue, rollouts)
        return lease, self._tell(number, flight.issued, "issued", version, "")

    def receive(self, number: int, issue: int, size_bytes: int) -> bool:
        """The result of a group has come; False: not of an issue that is out."""
        if self.at(number, issue) is None:
            return False
        self._move(number, "received", size_bytes).actor = None
        return True

    def queue_again(self, number: int, reason: str, version: Version) -> list[LedgerEvent]:
        """End this issue; the next begins when it is handed out. A group of which some rollouts have ended otherwise (a filter)
        is sampled as a whole again: advantages need all of it."""
        events = self._tell(number, self._groups[number].issued, "issued_again", version, reason)
        self._to_queue(number)
        return events

    def discard(self, number: int, rollouts: Sequence[int], reason: str, version: Version) -> list[LedgerEvent]:
        events = self._tell(number, rollouts, "discarded", version, reason)
        self._remove(number, rollouts)
        return events

    def train(self, ids: Iterable[RolloutId], version: Version) -> list[LedgerEvent]:
        """Ids that are not alive are told as well: they were trained before a rollback, and are once more."""
        ids = list(dict.fromkeys(ids))
        for number, rollouts in self.alive(ids).items():
            self._remove(number, rollouts)
        return self._told([LedgerEvent(i, "trained", version, version.step, "") for i in ids])

    def clear(self, reason: str, version: Version) -> list[LedgerEvent]:
        """Discard everything. Groups that wait for their next issue have ended with the one before."""
        events: list[LedgerEvent] = []
        for number, flight in list(self._groups.items()):
            events += self.discard(number, list(flight.issued), reason, version)
        for number in list(self._groups):
            self._forget(number)
        return events

    # Saving, and going on from what the ledger recorded since

    def state(self) -> dict[str, Any]:
        return {
            "groups": {str(n): asdict(f) for n, f in self._groups.items()},
            "next_group": self.next_group,
            "counts": dict(self.counts),
            "discard_reasons": dict(self.discard_reasons),
            "events": self.events,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._groups = {int(n): Flight(**f) for n, f in state["groups"].items()}
        for number, flight in self._groups.items():
            self._numbers[flight.status].add(number)
            self.received_bytes += flight.bytes
        self.next_group = state["next_group"]
        self.counts = dict(state["counts"])
        self.discard_reasons = dict(state["discard_reasons"])
        self.events = state["events"]

    def replay(self, event: LedgerEvent) -> None:
        """Take in an event that this state has not told. Raises where it does not follow from the state."""
        i = event.rollout
        flight = self._groups.get(i.group)
        if event.kind == "issued":
            if flight is None or (flight.problem, flight.epoch, flight.issue) != (i.problem, i.epoch, i.issue):
                raise _stranger(i)
            self._move(i.group, "leased")
            flight.issued.append(i.rollout)
        elif event.kind == "issued_again":
            if flight is None or flight.issue not in (i.issue, i.issue + 1):
                raise _stranger(i)
            if flight.issue == i.issue:  # the first row of the issue; the others find it done
                self._to_queue(i.group)
        else:
            self._remove(i.group, self.alive([i]).get(i.group, []))
        self._count([event])
        self.events += 1

    def outstanding(self, keep: Collection[int]) -> list[int]:
        """The groups that were handed out, but for those to `keep`, which count as received."""
        numbers = []
        for number, flight in self.having("leased", "received"):
            if number in keep:
                self._move(number, "received", flight.bytes).actor = None
            else:
                numbers.append(number)
        return numbers

    # Within

    def _move(self, number: int, status: Status, size_bytes: int = 0) -> Flight:
        flight = self._groups[number]
        self._numbers[flight.status].remove(number)
        self._numbers[status].add(number)
        self.received_bytes += size_bytes - flight.bytes
        flight.status, flight.bytes = status, size_bytes
        return flight

    def _to_queue(self, number: int) -> None:
        flight = self._move(number, "queued")
        flight.actor, flight.issued = None, []
        flight.issue += 1

    def _forget(self, number: int) -> None:
        flight = self._groups.pop(number)
        self._numbers[flight.status].remove(number)
        self.received_bytes -= flight.bytes

    def _tell(self, number: int, rollouts: Iterable[int], kind: EventKind, version: Version, reason: str) -> list[LedgerEvent]:
        f = self._groups[number]
        ids = [RolloutId(f.epoch, f.problem, number, k, f.issue) for k in rollouts]
        return self._told([LedgerEvent(i, kind, version, -1, reason) for i in ids])

    def _told(self, events: list[LedgerEvent]) -> list[LedgerEvent]:
        self._count(events)
        self.events += len(events)
        return events

    def _count(self, events: Iterable[LedgerEvent]) -> None:
        for event in events:
            self.counts[event.kind] += 1
            if event.kind == "discarded":
                self.discard_reasons[event.reason] = self.discard_reasons.get(event.reason, 0) + 1

    def _remove(self, number: int, rollouts: Collection[int]) -> None:
        """Take ended rollouts out; a group ends with its last one."""
        if rollouts:
            flight = self._groups[number]
            gone = set(rollouts)
            flight.issued = [k for k in flight.issued if k not in gone]
            if not flight.issued:
                self._forget(number)


def _stranger(i: RolloutId) -> DispatcherError:
    return DispatcherError(f"the ledger's {i} does not follow from the saved state: is it another run's?")
