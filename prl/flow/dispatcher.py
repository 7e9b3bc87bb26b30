"""The one dispatcher: which problem comes next, who works on it, and how every rollout id ends.

A pure state machine in the orchestrator's process: no clock, no tasks, no files. Every method that begins or ends rollout ids
returns the ledger events for it, which are to be durable before the caller answers anyone. The methods, in the order in which
a run calls them:

    problems(train, evaluation)         how many problems each domain has; once, before the first lease
    committed(version)                  all samplers carry this version now; nothing is handed out before the first
    lease(actor, groups, now)           -> Leased(leases, events): evaluations first, then groups to be sampled again, then new
    result(group, issue, bytes)         -> whether a finished group is taken; False: late or unknown, never to be trained
    failed(group, issue, reason)        -> events: the group is issued again, or discarded after `max_issues` failures
    overdue(now)                        -> events: the same for groups that were handed out longer than `group_deadline_s` ago
    lost(actor)                         -> events: the same for all groups that this actor held
    discarded(ids, reason)              -> events: whole groups or single rollouts end without training; gives the budget back
    trained(step, ids)                  -> events
    evaluated(group, issue)             -> the Evaluation that this result belongs to; None: late or unknown
    close(reason)                       -> events: everything still in flight is discarded at the end of a run
    state()                             JSON-able; Dispatcher(settings, state) goes on from it; after a crash
    replay(events)                      takes the ledger's rows behind state()["events"]
    went_back(version, reason, keep)    -> events: the trainer begins again at this version, the first of a new lineage; all in
                                        flight is issued again, but for the groups `keep` of step files

Calls may be repeated (by a client that lost the answer): a repeated result is taken again, a repeated end has no events.

**Admission.** Groups in flight and groups trained in steps whose version the samplers do not carry yet may together be no more
than groups_per_step times
    pipeline:      max_lag + 1
    conventional:  the steps that are left of the generation (steps_per_generation after its last step's version is committed);
                   the trainer begins once `generation_sampled`
and never more than the steps left of the run can use. A group that is sampled by the newest version is thus trained at most
max_lag steps later, as long as groups are trained in the order in which they were handed out; the preprocessor holds the limit
for those that are overtaken. Every step is taken to train groups_per_step groups. Groups to be sampled again have their place
already; only after a rollback, when durable step files are trained again first, they wait for their turn as well.

While results of `max_waiting_bytes` or more wait to be trained, new groups are handed out only as far as the next step lacks
them: a trainer that is slow holds the actors back, and never waits for what is held back. (A generation's first step lacks the
whole generation: conventional mode has no such limit.)

**The end of the problems.** With `epochs` every domain hands out each of its problems so many times. A group that is issued
again belongs to its first time; one that was discarded is not replaced then. Once nothing is left and what is in flight cannot
fill another step, the run is `used_up`: it ends well, and discards that rest.

**Order.** Training groups are numbered 0, 1, 2, ... without gaps, in the order of `prl.flow.problems`. `awaited_from` is the
smallest number whose result is still to come: under `order: dispatch` groups below it are taken in the order of their numbers.

**Partial groups.** Rollouts that an actor gave up are `discarded` before the result of the others comes, with the reason of
their failure. A group that is issued again is sampled as a whole.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prl.flow.evaluations import Evaluation, Evaluations
from prl.flow.events import LedgerEvent
from prl.flow.ids import Lease, RolloutId
from prl.flow.inflight import InFlight
from prl.flow.problems import DispatcherError, ProblemOrder
from prl.flow.versions import Version


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
    order: Literal["arrival", "dispatch"] = "arrival"
    seed: int = 1
    epochs: int | None = None
    group_deadline_s: float | None = None
    max_waiting_bytes: int | None = None
    evaluate_every_steps: int = 0
    evaluate_problems: int = 0
    max_issues: int = 3


@dataclass(frozen=True, slots=True)
class Leased:
    leases: list[Lease]
    events: list[LedgerEvent]


class Dispatcher:
    def __init__(self, settings: DispatcherSettings, state: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self._order = ProblemOrder(settings.weights, settings.seed, settings.epochs)
        self._flights = InFlight()
        self._evaluations = Evaluations(
            settings.weights,
            every_steps=settings.evaluate_every_steps,
            last_step=settings.steps,
            problems=settings.evaluate_problems,
            max_issues=settings.max_issues,
        )
        self._version: Version | None = None
        self._trained = Version(0, 0)
        self._furthest_trained = 0
        if state is not None:
            self._order.restore(state)
            self._flights.restore(state)
            self._evaluations.restore(state)
            self._version = None if state["version"] is None else Version.parse(state["version"])
            self._trained = Version.parse(state["trained"])
            self._furthest_trained = state["furthest_trained"]

    # What the run looks at

    @property
    def version(self) -> Version | None:
        """The version that all samplers carry."""
        return self._version

    @property
    def furthest_trained(self) -> int:
        """The newest step that was ever trained; after a rollback it is trained again."""
        return self._furthest_trained

    @property
    def counts(self) -> Mapping[str, int]:
        """Rollouts by what happened to them: issued, trained, discarded, issued_again."""
        return self._flights.counts

    @property
    def discard_reasons(self) -> Mapping[str, int]:
        """Discarded rollouts by their reason."""
        return self._flights.discard_reasons

    @property
    def in_flight(self) -> int:
        """Training groups handed out without an end."""
        return len(self._flights)

    @property
    def held(self) -> dict[int, int]:
        """Training groups that are handed out and have not come back, by actor."""
        return dict(Counter(f.actor for _, f in self._flights.having("leased") if f.actor is not None))

    @property
    def received(self) -> int:
        """Training groups whose result has come and that have not ended."""
        return self._flights.count("received")

    @property
    def awaited_from(self) -> int:
        """The smallest number of a training group whose result has not come, or the next new group's number."""
        awaited = self._flights.having("queued", "leased")
        return awaited[0][0] if awaited else self._flights.next_group

    def lacking(self, in_files: Collection[int], steps: int = 1) -> int:
        """How many groups have to come back for the first of the next `steps` steps that is not complete, as far as they are
        out or may be handed out; 0: all are. `in_files` are the groups of the step files that wait. In conventional mode all
        that is out is waited for."""
        s = self.settings
        out = self._flights.count("queued", "leased") + max(self.budget(), 0)
        if s.mode == "conventional":
            return out
        if s.order == "arrival":
            come = [True] * (self._flights.count("received") - len(in_files))
        else:
            flights = self._flights.having("queued", "leased", "received")
            come = [flight.status == "received" for number, flight in flights if number not in in_files]
        of_steps = (come[k * s.groups_per_step : (k + 1) * s.groups_per_step] for k in range(steps))
        return min(next((lacking for step in of_steps if (lacking := s.groups_per_step - sum(step))), 0), out)

    def waits(self, group: int, issue: int) -> bool:
        """Whether this result of a group has been taken and has not ended."""
        flight = self._flights.at(group, issue)
        return flight is not None and flight.status == "received"

    @property
    def generation_sampled(self) -> bool:
        """conventional: whether all that this generation trains on was handed out and has come back."""
        return self.budget() <= 0 and not self._flights.count("leased") and not self._due_again()

    @property
    def used_up(self) -> bool:
        """Whether no other step can come together: the epochs have been handed out, and too little is left of them. (Steps that
        are trained again after a rollback are still to come.)"""
        awaited = self._flights.count("queued", "leased")
        too_few = len(self._flights) < self.settings.groups_per_step and self._trained.step >= self._furthest_trained
        return bool(self._order.sizes) and not self._order.left() and not awaited and too_few

    @property
    def evaluations_pending(self) -> int:
        """Evaluations that fell due and have no result yet, handed out or not."""
        return len(self._evaluations)

    @property
    def evaluations_lost(self) -> int:
        """Evaluations that were given up after max_issues failures."""
        return self._evaluations.lost

    @property
    def evaluating(self) -> set[int]:
        """Steps whose evaluations have not all come back."""
        return self._evaluations.steps

    def ended(self, ids: Iterable[RolloutId]) -> list[RolloutId]:
        """Those of these rollouts that are not in flight (any more)."""
        ids = list(ids)
        alive = {group: set(rollouts) for group, rollouts in self._flights.alive(ids).items()}
        return [i for i in ids if i.rollout not in alive.get(i.group, ())]

    def overtaken(self, groups: Collection[int]) -> list[RolloutId]:
        """Rollouts that are out of groups which, in the order of dispatch, came before some of these `groups` of step files:
        whoever made the files had dropped them, and ended before that was told."""
        if self.settings.order == "arrival":
            return []
        last = max(groups, default=0)
        passed = (n for n, _ in self._flights.having("leased", "received") if n < last and n not in groups)
        return [rollout for number in passed for rollout in self._flights.ids(number)]

    def budget(self) -> int:
        """New training groups that may be handed out now."""
        if self._version is None:
            return 0
        s, flying = self.settings, len(self._flights)
        room = self._admitted(self._version) - flying
        limit = s.max_waiting_bytes if s.mode == "pipeline" else None
        if limit is not None and self._flights.received_bytes >= limit:
            room = min(room, s.groups_per_step - flying)
        return min(room, self._order.left())

    def _due_again(self) -> list[int]:
        """Groups to be sampled again whose turn it is."""
        if self._version is None:
            return []
        queued = [number for number, _ in self._flights.having("queued")]
        working = len(self._flights) - len(queued)
        return queued[: max(self._admitted(self._version) - working, 0)]

    def _admitted(self, version: Version) -> int:
        """Most groups that may be in flight."""
        s, done = self.settings, version.step
        allowed = s.max_lag + 1 if s.mode == "pipeline" else s.steps_per_generation - done % s.steps_per_generation
        ahead = max(self._furthest_trained - done, 0)
        return s.groups_per_step * (min(allowed, s.steps - done) - ahead)

    # What happens in a run

    def problems(self, train: Mapping[str, int], evaluation: Mapping[str, int] | None = None) -> None:
        """Problems of each domain. Raises where a domain has none, or where a resumed run finds other numbers than before."""
        self._order.set_sizes(train)
        self._evaluations.set_sizes(evaluation or {})

    def committed(self, version: Version) -> None:
        """All samplers carry `version`. One of a lineage that the trainer has left meanwhile is of no account."""
        if version.lineage < self._trained.lineage:
            return
        if version.lineage > self._trained.lineage or (self._version is not None and version < self._version):
            raise DispatcherError(f"version {version} was committed after {self._version}, the trainer is at {self._trained}")
        self._version = version
        self._evaluations.committed(version)

    def lease(self, actor: int, groups: int, now: float) -> Leased:
        """Hand out up to `groups` groups to `actor`; `now` (seconds) is kept as the time of the lease."""
        if self._version is None:
            return Leased([], [])
        if not self._order.sizes:
            raise DispatcherError("lease before problems: no actor has said how many problems there are")
        leases = self._evaluations.lease(actor, groups, now)
        numbers = self._due_again()[: groups - len(leases)]
        new = min(groups - len(leases) - len(numbers), self.budget())
        numbers += [self._flights.add(self._order.draw()) for _ in range(new)]
        events: list[LedgerEvent] = []
        for number in numbers:
            lease, issued = self._flights.hand_out(number, self.settings.rollouts_per_group, actor, now, self._version)
            leases.append(lease)
            events += issued
        return Leased(leases, events)

    def result(self, group: int, issue: int, size_bytes: int = 0) -> bool:
        """Whether this issue of a training group is taken, `size_bytes` of the stream. A repeated result of the same issue is
        taken again."""
        return self._flights.receive(group, issue, size_bytes)

    def failed(self, group: int, issue: int, reason: str) -> list[LedgerEvent]:
        """An issue of a group (of either kind) came to nothing, or its result cannot be read."""
        if group < 0:
            self._evaluations.failed(group, issue)
            return []
        flight = self._flights.at(group, issue)
        if flight is None:
            return []
        flight.failures += 1
        if flight.failures >= self.settings.max_issues:
            return self._flights.discard(group, list(flight.issued), reason, self._now())
        return self._flights.queue_again(group, reason, self._now())

    def overdue(self, now: float) -> list[LedgerEvent]:
        """What was handed out longer ago than the deadline has failed."""
        if self.settings.group_deadline_s is None:
            return []
        before_s = now - self.settings.group_deadline_s
        self._evaluations.overdue(before_s)
        events: list[LedgerEvent] = []
        for number, flight in self._flights.having("leased"):
            if flight.since_s < before_s:
                events += self.failed(number, flight.issue, "group deadline")
        return events

    def lost(self, actor: int) -> list[LedgerEvent]:
        """An actor is gone, with all that it held."""
        self._evaluations.actor_lost(actor)
        events: list[LedgerEvent] = []
        for number, flight in self._flights.having("leased"):
            if flight.actor == actor:
                events += self.failed(number, flight.issue, f"actor {actor} lost")
        return events

    def discarded(self, ids: Iterable[RolloutId], reason: str) -> list[LedgerEvent]:
        """These rollouts end without training. Ids that have ended already are passed over."""
        events: list[LedgerEvent] = []
        for group, rollouts in self._flights.alive(ids).items():
            events += self._flights.discard(group, rollouts, reason, self._now())
        return events

    def trained(self, step: int, ids: Iterable[RolloutId]) -> list[LedgerEvent]:
        """Step `step` of the current lineage was trained on these rollouts. A step told twice has no events the second time;
        a step trained again after a rollback ends its ids once more, in the new lineage."""
        version = Version(self._trained.lineage, step)
        if version <= self._trained:
            return []
        self._trained = version
        self._furthest_trained = max(self._furthest_trained, step)
        return self._flights.train(ids, version)

    def evaluated(self, group: int, issue: int) -> Evaluation | None:
        """An evaluation's result has come."""
        return self._evaluations.evaluated(group, issue)

    def close(self, reason: str) -> list[LedgerEvent]:
        """The run has ended: what is in flight is discarded."""
        self._evaluations.clear()
        return self._flights.clear(reason, self._now())

    def _now(self) -> Version:
        return self._version or Version(0, 0)

    # Saving and resuming

    def state(self) -> dict[str, Any]:
        """Everything that a later attempt needs, JSON-able. "events" counts the ledger events told so far."""
        return {
            **self._order.state(),
            **self._flights.state(),
            **self._evaluations.state(),
            "version": None if self._version is None else str(self._version),
            "trained": str(self._trained),
            "furthest_trained": self._furthest_trained,
        }

    def replay(self, events: Iterable[LedgerEvent]) -> None:
        """Take in what the ledger recorded after `state` was saved, so that no number is handed out twice and no id ends twice.
        Raises where the events do not follow from the state (another run's ledger)."""
        for event in events:
            if event.kind == "issued" and event.rollout.group == self._flights.next_group:
                self._flights.add(self._order.draw())
            if event.kind == "trained":
                self._furthest_trained = max(self._furthest_trained, event.step)
            self._flights.replay(event)

    def went_back(self, version: Version, reason: str, keep: Collection[int] = ()) -> list[LedgerEvent]:
        """The trainer begins again at `version`, a checkpoint in a new lineage: whatever was in flight is issued again (no
        failure of the group's own), but for the groups in `keep`, whose rollouts lie in step files that will be trained."""
        self._trained = version
        self._evaluations.went_back(version.step)
        events: list[LedgerEvent] = []
        for number in self._flights.outstanding(keep):
            events += self._flights.queue_again(number, reason, self._now())
        return events
