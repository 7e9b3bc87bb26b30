"""Evaluations on held-out problems: leases of their own kind, no part of stream and ledger."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prl.flow.ids import Lease
from prl.flow.problems import DispatcherError
from prl.flow.versions import Version


@dataclass(frozen=True, slots=True)
class Evaluation:
    step: int
    domain: str


@dataclass(slots=True)
class _Pending:
    step: int
    domain: str
    problems: int
    issue: int = 0
    actor: int | None = None
    leased: bool = False
    since_s: float = 0.0
    failures: int = 0


class Evaluations:
    """Evaluations are numbered -1, -2, ...; each is of one step and domain. In its lease `epoch` is the step at which it fell
    due, `index` the first held-out problem and `rollouts` how many problems from there on get one answer each. They fall due
    with the first version that has reached 0, every_steps, 2 * every_steps, ..., and with the last one."""

    def __init__(
        self, weights: Mapping[str, float], *, every_steps: int, last_step: int, problems: int, max_issues: int
    ) -> None:
        """`every_steps` 0: never. After `max_issues` failures an evaluation is given up and counted in `lost`."""
        self.lost = 0
        self._weights = weights
        self._every_steps = every_steps
        self._last_step = last_step
        self._problems = problems
        self._max_issues = max_issues
        self._sizes: dict[str, int] = {}
        self._pending: dict[int, _Pending] = {}
        self._next = -1
        self._due: list[int] = []  # steps, until the next lease
        self._evaluated_step = -1

    def __len__(self) -> int:
        """Evaluations that fell due and have no result yet, handed out or not."""
        return len(self._pending) + len(self._due)

    @property
    def steps(self) -> set[int]:
        """Steps whose evaluations have not all come back."""
        return {evaluation.step for evaluation in self._pending.values()} | set(self._due)

    def set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Held-out problems of each domain. Raises where evaluations are asked for and there are none."""
        self._sizes = {d: int(sizes.get(d, 0)) for d in self._weights}
        if self._every_steps and not any(self._sizes.values()):
            raise DispatcherError("evaluations are asked for, but no domain has held-out problems")

    def committed(self, version: Version) -> None:
        """The samplers carry this version."""
        every, step = self._every_steps, version.step
        if every and (step // every > self._evaluated_step // every or self._evaluated_step < step == self._last_step):
            self._evaluated_step = step
            self._due.append(step)

    def lease(self, actor: int, count: int, now: float) -> list[Lease]:
        for step in self._due:
            self._plan(step)
        self._due.clear()
        leases = []
        for number in sorted((n for n, e in self._pending.items() if not e.leased), reverse=True)[:count]:
            e = self._pending[number]
            e.leased, e.actor, e.since_s = True, actor, now
            leases.append(Lease("evaluate", e.domain, 0, e.step, number, e.issue, e.problems))
        return leases

    def evaluated(self, number: int, issue: int) -> Evaluation | None:
        """The evaluation that this result belongs to; None: late or unknown."""
        found = self._leased(number, issue)
        if found is not None:
            del self._pending[number]
        return None if found is None else Evaluation(found.step, found.domain)

    def failed(self, number: int, issue: int) -> None:
        """Tried again; given up after `max_issues` failures."""
        found = self._leased(number, issue)
        if found is None:
            return
        found.failures += 1
        if found.failures >= self._max_issues:
            del self._pending[number]
            self.lost += 1
        else:
            self._queue(found)

    def actor_lost(self, actor: int) -> None:
        for number, evaluation in list(self._pending.items()):
            if evaluation.actor == actor:
                self.failed(number, evaluation.issue)

    def overdue(self, before_s: float) -> None:
        """Those handed out before that time have failed."""
        for number, evaluation in list(self._pending.items()):
            if evaluation.leased and evaluation.since_s < before_s:
                self.failed(number, evaluation.issue)

    def went_back(self, step: int) -> None:
        """The trainer begins again at `step`: evaluations of later steps fall due again, and all others that were handed out
        are queued again, without a failure."""
        self._evaluated_step = min(self._evaluated_step, step)
        self._due = [due for due in self._due if due <= step]
        self._pending = {number: one for number, one in self._pending.items() if one.step <= step}
        for evaluation in self._pending.values():
            if evaluation.leased:
                self._queue(evaluation)

    def clear(self) -> None:
        self._pending.clear()
        self._due.clear()

    def state(self) -> dict[str, Any]:
        return {
            "evaluation_sizes": dict(self._sizes),
            "evaluations": {str(n): asdict(e) for n, e in self._pending.items()},
            "next_evaluation": self._next,
            "evaluations_due": list(self._due),
            "evaluations_lost": self.lost,
            "evaluated_step": self._evaluated_step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sizes = dict(state["evaluation_sizes"])
        self._pending = {int(n): _Pending(**e) for n, e in state["evaluations"].items()}
        self._next = state["next_evaluation"]
        self._due = list(state["evaluations_due"])
        self.lost = state["evaluations_lost"]
        self._evaluated_step = state["evaluated_step"]

    def _leased(self, number: int, issue: int) -> _Pending | None:
        found = self._pending.get(number)
        return None if found is None or not found.leased or found.issue != issue else found

    def _queue(self, evaluation: _Pending) -> None:
        evaluation.leased, evaluation.actor = False, None
        evaluation.issue += 1

    def _plan(self, step: int) -> None:
        """The held-out problems, shared over the domains by weight as far as they have any."""
        domains = {d: w for d, w in self._weights.items() if self._sizes.get(d)}
        left, weight_left = self._problems, sum(domains.values())
        for domain, weight in domains.items():
            share = min(round(left * weight / weight_left), self._sizes[domain])
            left, weight_left = left - share, weight_left - weight
            if share:
                self._pending[self._next] = _Pending(step, domain, share)
                self._next -= 1
