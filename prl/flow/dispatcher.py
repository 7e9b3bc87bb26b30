"""The one dispatcher: which problem comes next, who works on it, and how every rollout id ends.

A pure state machine in the orchestrator's process: no clock, no tasks, no files. Every method that begins or ends rollout ids
returns the ledger events for it, which are to be durable before the caller answers anyone. The methods, in the order in which
a run calls them:

    problems(train, evaluation)         how many problems each domain has; once, before the first lease
    committed(version)                  all samplers carry this version now; nothing is handed out before the first
    lease(actor, groups, now)           -> Leased(leases, events): evaluations first, then groups to be sampled again, then new
    result(group, issue)                -> whether a finished group is taken; False: late or unknown, never to be trained
    failed(group, issue, reason)        -> events: the group is issued again, or discarded after `max_issues` failures
    lost(actor)                         -> events: the same for all groups that this actor held
    discarded(ids, reason)              -> events: whole groups or single rollouts end without training; gives the budget back
    trained(step, ids)                  -> events
    evaluated(group, issue)             -> the Evaluation that this result belongs to; None: late or unknown
    close(reason)                       -> events: everything still in flight is discarded at the end of a run
    state()                             JSON-able; Dispatcher(settings, state) goes on from it; after a crash
    replay(events)                      takes the ledger's rows behind state()["events"], and
    reissue_outstanding(reason, keep)   -> events: all in flight is issued again, but for the groups `keep` of step files

Calls may be repeated (by a client that lost the answer): a repeated result is taken again, a repeated end has no events.

**Admission.** Groups in flight and groups trained in steps whose version the samplers do not carry yet may together be no more
than groups_per_step times
    pipeline:      max_lag + 1
    conventional:  the steps that are left of the generation (steps_per_generation after its last step's version is committed);
                   the trainer begins once `generation_sampled`
and never more than the steps left of the run can use. A group that is sampled by the newest version is thus trained at most
max_lag steps later, as long as groups are trained in the order in which they were handed out; the preprocessor holds the limit
for those that are overtaken. Every step is taken to train groups_per_step groups.

**Order.** Training groups are numbered 0, 1, 2, ... without gaps. Each domain goes through its problems in a permutation of
(seed, domain, epoch); the next group comes from the domain that is furthest behind its weight. `awaited_from` is the smallest
number whose result is still to come: under `order: dispatch` groups below it are taken in the order of their numbers.

**Evaluations** are leases of kind "evaluate", no part of stream and ledger, numbered -1, -2, ...; `epoch` is the step
at which the evaluation fell due, `index` the first held-out problem and `rollouts` how many problems from there on get one
answer each. They fall due with the first version that has reached 0, evaluate_every_steps, 2 * evaluate_every_steps, ..., and
with the last one.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from prl.flow.events import EventKind, LedgerEvent
from prl.flow.ids import Lease, RolloutId
from prl.flow.versions import Version


class DispatcherError(Exception):
    """A call that does not fit the state: a fault of the caller."""


@dataclass(frozen=True, kw_only=True)
class DispatcherSettings:
    """The options that the dispatcher goes by; see their words in the configuration."""

    weights: Mapping[str, float]  # of the domains, in the configuration's order
    steps: int
    groups_per_step: int
    rollouts_per_group: int
    mode: Literal["pipeline", "conventional"] = "pipeline"
    max_lag: int = 4
    steps_per_generation: int = 4
    seed: int = 1
    evaluate_every_steps: int = 0
    evaluate_problems: int = 0
    max_issues: int = 3


@dataclass(frozen=True, slots=True)
class Leased:
    leases: list[Lease]
    events: list[LedgerEvent]


@dataclass(frozen=True, slots=True)
class Evaluation:
    step: int
    domain: str


@dataclass(slots=True)
class _InFlight:
    """A group that was handed out and has not ended. `issued` rollouts are those of the current issue without an end."""

    domain: str
    index: int
    epoch: int
    issue: int
    status: Literal["queued", "leased", "received"]
    actor: int | None = None
    since_s: float = 0.0
    failures: int = 0
    issued: list[int] = field(default_factory=list)

    @property
    def problem(self) -> str:
        return f"{self.domain}/{self.index}"


@dataclass(slots=True)
class _Evaluation:
    step: int
    domain: str
    problems: int
    issue: int = 0
    actor: int | None = None
    leased: bool = False
    failures: int = 0


class Dispatcher:
    def __init__(self, settings: DispatcherSettings, state: Mapping[str, Any] | None = None) -> None:
        if not settings.weights or min(settings.weights.values()) <= 0:
            raise DispatcherError(f"every domain needs a weight above 0, at least one domain: {dict(settings.weights)}")
        self.settings = settings
        self.counts = {"issued": 0, "trained": 0, "discarded": 0, "issued_again": 0}  # rollouts
        self.discard_reasons: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._evaluation_sizes: dict[str, int] = {}
        self._drawn = dict.fromkeys(settings.weights, 0)  # groups ever drawn from each domain
        self._permutations: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
        self._groups: dict[int, _InFlight] = {}
        self._next_group = 0
        self._version: Version | None = None
        self._trained = Version(0, 0)
        self._furthest_trained = 0
        self._evaluations: dict[int, _Evaluation] = {}
        self._next_evaluation = -1
        self._evaluations_due: list[int] = []  # steps, until the next lease
        self._evaluated_step = -1
        self.evaluations_lost = 0  # given up after max_issues failures
        self._events = 0
        if state is not None:
            self._restore(state)

    # What the run looks at

    @property
    def version(self) -> Version | None:
        """The version that all samplers carry."""
        return self._version

    @property
    def trained_step(self) -> int:
        """The last step that was trained in this lineage."""
        return self._trained.step

    @property
    def awaited_from(self) -> int:
        """The smallest number of a training group whose result has not come, or the next new group's number."""
        return min((n for n, g in self._groups.items() if g.status != "received"), default=self._next_group)

    @property
    def in_flight(self) -> int:
        """Training groups handed out without an end."""
        return len(self._groups)

    @property
    def evaluations_pending(self) -> int:
        """Evaluations that fell due and have no result yet, handed out or not."""
        return len(self._evaluations) + len(self._evaluations_due)

    @property
    def evaluating(self) -> set[int]:
        """Steps whose evaluations have not all come back."""
        return {evaluation.step for evaluation in self._evaluations.values()} | set(self._evaluations_due)

    @property
    def generation_sampled(self) -> bool:
        """conventional: whether all that this generation trains on was handed out and has come back."""
        return self.budget() <= 0 and self.awaited_from == self._next_group

    def held_by(self, actor: int) -> list[tuple[int, int, float]]:
        """(group, issue, time of the lease) of the training groups that an actor works on, oldest first."""
        held = [(n, g.issue, g.since_s) for n, g in self._groups.items() if g.status == "leased" and g.actor == actor]
        return sorted(held, key=lambda h: h[2])

    def budget(self) -> int:
        """Training groups that may be handed out now: new ones only, those to be sampled again have their place already."""
        if self._version is None:
            return 0
        s, done = self.settings, self._version.step
        allowed = s.max_lag + 1 if s.mode == "pipeline" else s.steps_per_generation - done % s.steps_per_generation
        ahead = max(self._furthest_trained - done, 0)
        return s.groups_per_step * (min(allowed, s.steps - done) - ahead) - len(self._groups)

    # What happens in a run

    def problems(self, train: Mapping[str, int], evaluation: Mapping[str, int] | None = None) -> None:
        """Problems of each domain. Raises where a domain has none, or where a resumed run finds other numbers than before."""
        evaluation = evaluation or {}
        missing = [d for d in self.settings.weights if train.get(d, 0) < 1]
        if missing:
            raise DispatcherError(f"no problems to train on in domain {', '.join(missing)}")
        sizes = {d: int(train[d]) for d in self.settings.weights}
        if self._sizes and sizes != self._sizes:
            raise DispatcherError(
                f"the problems have changed: {self._sizes} before, {sizes} now; their numbers would mean others"
            )
        self._sizes = sizes
        self._evaluation_sizes = {d: int(evaluation.get(d, 0)) for d in self.settings.weights}
        if self.settings.evaluate_every_steps and not any(self._evaluation_sizes.values()):
            raise DispatcherError("evaluations are asked for, but no domain has held-out problems")

    def committed(self, version: Version) -> None:
        """All samplers carry `version`. A version of a new lineage is the checkpoint that the trainer went back to."""
        if self._version is not None and version < self._version:
            raise DispatcherError(f"version {version} was committed after {self._version}")
        if self._version is None or version.lineage > self._version.lineage:
            self._evaluated_step = min(self._evaluated_step, version.step)
        if version.lineage > self._trained.lineage:
            self._trained = version
        self._version = version
        every = self.settings.evaluate_every_steps
        if every and (
            version.step // every > self._evaluated_step // every or self._evaluated_step < version.step == self.settings.steps
        ):
            self._evaluated_step = version.step
            self._evaluations_due.append(version.step)

    def lease(self, actor: int, groups: int, now: float) -> Leased:
        """Hand out up to `groups` groups to `actor`; `now` (seconds) is kept as the time of the lease."""
        if self._version is None:
            return Leased([], [])
        if not self._sizes:
            raise DispatcherError("lease before problems: no actor has said how many problems there are")
        leases = self._lease_evaluations(actor, groups)
        events: list[LedgerEvent] = []
        again = sorted(n for n, g in self._groups.items() if g.status == "queued")[: groups - len(leases)]
        for number in again:
            leases.append(self._hand_out(number, actor, now, events))
        for _ in range(min(groups - len(leases), self.budget())):
            number = self._draw()
            leases.append(self._hand_out(number, actor, now, events))
        return Leased(leases, events)

    def result(self, group: int, issue: int) -> bool:
        """Whether this issue of a training group is taken. A repeated result of the same issue is taken again."""
        flight = self._groups.get(group)
        if flight is None or flight.issue != issue or flight.status == "queued":
            return False
        flight.status, flight.actor = "received", None
        return True

    def failed(self, group: int, issue: int, reason: str) -> list[LedgerEvent]:
        """An issue of a group (of either kind) came to nothing, or its result cannot be read."""
        if group < 0:
            self._evaluation_failed(group, issue)
            return []
        flight = self._groups.get(group)
        if flight is None or flight.issue != issue or flight.status == "queued":
            return []
        flight.failures += 1
        if flight.failures >= self.settings.max_issues:
            return self._end(group, list(flight.issued), "discarded", reason)
        return self._queue_again(group, reason)

    def lost(self, actor: int) -> list[LedgerEvent]:
        """An actor is gone, with all that it held."""
        for number, evaluation in list(self._evaluations.items()):
            if evaluation.leased and evaluation.actor == actor:
                self._evaluation_failed(number, evaluation.issue)
        events: list[LedgerEvent] = []
        for number, flight in list(self._groups.items()):
            if flight.status == "leased" and flight.actor == actor:
                events += self.failed(number, flight.issue, f"actor {actor} lost")
        return events

    def discarded(self, ids: Iterable[RolloutId], reason: str) -> list[LedgerEvent]:
        """These rollouts end without training. Ids that have ended already are passed over."""
        events: list[LedgerEvent] = []
        for group, rollouts in self._alive(ids).items():
            events += self._end(group, rollouts, "discarded", reason)
        return events

    def trained(self, step: int, ids: Iterable[RolloutId]) -> list[LedgerEvent]:
        """Step `step` of the current lineage was trained on these rollouts. A step told twice has no events the second time;
        a step trained again after a rollback ends its ids once more, in the new lineage."""
        lineage = 0 if self._version is None else self._version.lineage
        version = Version(lineage, step)
        if version <= self._trained:
            return []
        self._trained = version
        self._furthest_trained = max(self._furthest_trained, step)
        ids = list(dict.fromkeys(ids))
        for group, rollouts in self._alive(ids).items():
            self._remove(group, rollouts)
        self.counts["trained"] += len(ids)
        return self._told([LedgerEvent(i, "trained", version, step, "") for i in ids])

    def evaluated(self, group: int, issue: int | None = None) -> Evaluation | None:
        """An evaluation's result has come; `issue` is that of the lease, None where the teller does not say (any is taken)."""
        evaluation = self._evaluations.get(group)
        if evaluation is None or not evaluation.leased or issue not in (None, evaluation.issue):
            return None
        del self._evaluations[group]
        return Evaluation(evaluation.step, evaluation.domain)

    def ended(self, ids: Iterable[RolloutId]) -> list[RolloutId]:
        """Those of these rollouts that are not in flight (any more)."""
        ids = list(ids)
        alive = {group: set(rollouts) for group, rollouts in self._alive(ids).items()}
        return [i for i in ids if i.rollout not in alive.get(i.group, ())]

    def close(self, reason: str) -> list[LedgerEvent]:
        """The run has ended: what is in flight is discarded."""
        self._evaluations.clear()
        self._evaluations_due.clear()
        events: list[LedgerEvent] = []
        for number, flight in list(self._groups.items()):
            events += self._end(number, list(flight.issued), "discarded", reason)
        self._groups.clear()  # those that waited for their next issue have ended with the one before
        return events

    # Saving and resuming

    def state(self) -> dict[str, Any]:
        """Everything that a later attempt needs, JSON-able. "events" counts the ledger events told so far."""
        return {
            "drawn": dict(self._drawn),
            "sizes": dict(self._sizes),
            "evaluation_sizes": dict(self._evaluation_sizes),
            "groups": {str(n): asdict(g) for n, g in self._groups.items()},
            "next_group": self._next_group,
            "version": None if self._version is None else str(self._version),
            "trained": str(self._trained),
            "furthest_trained": self._furthest_trained,
            "evaluations": {str(n): asdict(e) for n, e in self._evaluations.items()},
            "next_evaluation": self._next_evaluation,
            "evaluations_due": list(self._evaluations_due),
            "evaluations_lost": self.evaluations_lost,
            "evaluated_step": self._evaluated_step,
            "counts": dict(self.counts),
            "discard_reasons": dict(self.discard_reasons),
            "events": self._events,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        if set(state["drawn"]) != set(self.settings.weights):
            raise DispatcherError(
                f"the domains have changed: {sorted(state['drawn'])} before, {sorted(self.settings.weights)} now"
            )
        self._drawn = dict(state["drawn"])
        self._sizes = dict(state["sizes"])
        self._evaluation_sizes = dict(state["evaluation_sizes"])
        self._groups = {int(n): _InFlight(**g) for n, g in state["groups"].items()}
        self._next_group = state["next_group"]
        self._version = None if state["version"] is None else Version.parse(state["version"])
        self._trained = Version.parse(state["trained"])
        self._furthest_trained = state["furthest_trained"]
        self._evaluations = {int(n): _Evaluation(**e) for n, e in state["evaluations"].items()}
        self._next_evaluation = state["next_evaluation"]
        self._evaluations_due = list(state["evaluations_due"])
        self.evaluations_lost = state["evaluations_lost"]
        self._evaluated_step = state["evaluated_step"]
        self.counts = dict(state["counts"])
        self.discard_reasons = dict(state["discard_reasons"])
        self._events = state["events"]

    def replay(self, events: Iterable[LedgerEvent]) -> None:
        """Take in what the ledger recorded after `state` was saved, so that no number is handed out twice and no id ends twice.
        Raises where the events do not follow from the state (another run's ledger)."""
        for event in events:
            i = event.rollout
            if event.kind == "issued":
                self._replay_issued(i)
            elif event.kind == "issued_again":
                self._replay_issued_again(i)
            else:
                self._remove(i.group, self._alive([i]).get(i.group, []))
            if event.kind == "trained":
                self._furthest_trained = max(self._furthest_trained, event.step)
            if event.kind == "discarded":
                self.discard_reasons[event.reason] = self.discard_reasons.get(event.reason, 0) + 1
            self.counts[event.kind] += 1
            self._events += 1

    def _replay_issued(self, i: RolloutId) -> None:
        if i.group == self._next_group:
            self._draw()
        flight = self._groups.get(i.group)
        if flight is None or (flight.problem, flight.epoch, flight.issue) != (i.problem, i.epoch, i.issue):
            raise DispatcherError(f"the ledger's {i} does not follow from the saved state: is it another run's?")
        flight.status = "leased"
        flight.issued.append(i.rollout)

    def _replay_issued_again(self, i: RolloutId) -> None:
        """The first row of a group's issue queues it, the others of that issue find it done."""
        flight = self._groups.get(i.group)
        if flight is None or flight.issue not in (i.issue, i.issue + 1):
            raise DispatcherError(f"the ledger's {i} does not follow from the saved state: is it another run's?")
        flight.status, flight.actor, flight.issue, flight.issued = "queued", None, i.issue + 1, []

    def reissue_outstanding(self, reason: str, keep: Collection[int] = ()) -> list[LedgerEvent]:
        """A new attempt begins: whatever was in flight is issued again (no failure of the group's own), but for the groups in
        `keep`, whose rollouts lie in step files that will be trained."""
        for number, evaluation in self._evaluations.items():
            if evaluation.leased:
                self._queue_evaluation(number)
        events: list[LedgerEvent] = []
        for number, flight in list(self._groups.items()):
            if number in keep:
                flight.status, flight.actor = "received", None
            elif flight.status != "queued":
                events += self._queue_again(number, reason)
        return events

    # Groups

    def _draw(self) -> int:
        """The next new group: its domain is the one furthest behind its share, the configuration's first among equals."""
        total_weight, total = sum(self.settings.weights.values()), sum(self._drawn.values())
        domain = max(
            self.settings.weights,
            key=lambda d: self.settings.weights[d] / total_weight * (total + 1) - self._drawn[d],
        )
        epoch, place = divmod(self._drawn[domain], self._sizes[domain])
        index = int(self._permutation(domain, epoch)[place])
        self._drawn[domain] += 1
        number = self._next_group
        self._next_group += 1
        self._groups[number] = _InFlight(domain, index, epoch, 0, "queued")
        return number

    def _permutation(self, domain: str, epoch: int) -> npt.NDArray[np.int64]:
        """Sorted draws of the bit generator, whose stream numpy never changes (that of `permutation` it may)."""
        key = (domain, epoch)
        if key not in self._permutations:
            self._permutations = {k: v for k, v in self._permutations.items() if k[0] != domain}
            bits = np.random.PCG64(np.random.SeedSequence([self.settings.seed, zlib.crc32(domain.encode()), epoch]))
            self._permutations[key] = np.argsort(bits.random_raw(self._sizes[domain]), kind="stable")
        return self._permutations[key]

    def _hand_out(self, number: int, actor: int, now: float, events: list[LedgerEvent]) -> Lease:
        flight = self._groups[number]
        flight.status, flight.actor, flight.since_s = "leased", actor, now
        flight.issued = list(range(self.settings.rollouts_per_group))
        events += self._told(self._ends(number, flight.issued, "issued", ""))
        self.counts["issued"] += len(flight.issued)
        return Lease("train", flight.domain, flight.index, flight.epoch, number, flight.issue, len(flight.issued))

    def _queue_again(self, number: int, reason: str) -> list[LedgerEvent]:
        """End this issue; the next begins when it is handed out. A group of which some rollouts have ended otherwise (a filter)
        is sampled as a whole again: advantages need all of it."""
        flight = self._groups[number]
        events = self._told(self._ends(number, flight.issued, "issued_again", reason))
        self.counts["issued_again"] += len(events)
        flight.status, flight.actor, flight.issued = "queued", None, []
        flight.issue += 1
        return events

    def _end(self, number: int, rollouts: list[int], kind: EventKind, reason: str) -> list[LedgerEvent]:
        events = self._told(self._ends(number, rollouts, kind, reason))
        self._remove(number, rollouts)
        self.counts[kind] += len(events)
        if kind == "discarded":
            self.discard_reasons[reason] = self.discard_reasons.get(reason, 0) + len(events)
        return events

    def _ends(self, number: int, rollouts: list[int], kind: EventKind, reason: str) -> list[LedgerEvent]:
        flight = self._groups[number]
        version = self._version or Version(0, 0)
        return [
            LedgerEvent(RolloutId(flight.epoch, flight.problem, number, k, flight.issue), kind, version, -1, reason)
            for k in rollouts
        ]

    def _told(self, events: list[LedgerEvent]) -> list[LedgerEvent]:
        self._events += len(events)
        return events

    def _alive(self, ids: Iterable[RolloutId]) -> dict[int, list[int]]:
        """Group to rollouts, of those ids that have begun and not ended, each once."""
        alive: dict[int, list[int]] = {}
        for i in dict.fromkeys(ids):
            flight = self._groups.get(i.group)
            if flight is not None and flight.issue == i.issue and i.rollout in flight.issued:
                alive.setdefault(i.group, []).append(i.rollout)
        return alive

    def _remove(self, number: int, rollouts: list[int]) -> None:
        """Take ended rollouts out; a group ends with its last one."""
        if rollouts:
            flight = self._groups[number]
            gone = set(rollouts)
            flight.issued = [k for k in flight.issued if k not in gone]
            if not flight.issued:
                del self._groups[number]

    # Evaluations

    def _plan_evaluation(self, step: int) -> None:
        """The held-out problems, shared over the domains by weight as far as they have any."""
        domains = {d: w for d, w in self.settings.weights.items() if self._evaluation_sizes.get(d)}
        left, weight_left = self.settings.evaluate_problems, sum(domains.values())
        for domain, weight in domains.items():
            share = min(round(left * weight / weight_left), self._evaluation_sizes[domain])
            left, weight_left = left - share, weight_left - weight
            if share:
                self._evaluations[self._next_evaluation] = _Evaluation(step, domain, share)
                self._next_evaluation -= 1

    def _lease_evaluations(self, actor: int, groups: int) -> list[Lease]:
        for step in self._evaluations_due:
            self._plan_evaluation(step)
        self._evaluations_due.clear()
        waiting = sorted((n for n, e in self._evaluations.items() if not e.leased), reverse=True)[:groups]
        for number in waiting:
            self._evaluations[number].leased = True
            self._evaluations[number].actor = actor
        planned = [(n, self._evaluations[n]) for n in waiting]
        return [Lease("evaluate", e.domain, 0, e.step, n, e.issue, e.problems) for n, e in planned]

    def _evaluation_failed(self, number: int, issue: int) -> None:
        """Tried again; given up and counted after `max_issues` failures."""
        evaluation = self._evaluations.get(number)
        if evaluation is None or not evaluation.leased or evaluation.issue != issue:
            return
        evaluation.failures += 1
        if evaluation.failures >= self.settings.max_issues:
            del self._evaluations[number]
            self.evaluations_lost += 1
        else:
            self._queue_evaluation(number)

    def _queue_evaluation(self, number: int) -> None:
        evaluation = self._evaluations[number]
        evaluation.leased, evaluation.actor = False, None
        evaluation.issue += 1
