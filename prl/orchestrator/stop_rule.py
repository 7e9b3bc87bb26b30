"""When a run has learned enough."""

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Score:
    """One domain's part of a step's evaluation."""

    step: int
    problems: int
    reward_mean: float


@dataclass(frozen=True)
class StopRule:
    """Evaluations in a row that reached the wanted reward; pure, so that a resumed run goes on counting. A step's reward is the
    mean over the problems of all domains, so scores wait in `open` until every domain of the step has given its own."""

    reward: float | None
    needed: int
    reached: int = 0
    open: tuple[Score, ...] = ()

    def scored(self, score: Score) -> "StopRule":
        return replace(self, open=(*self.open, score))

    def closed(self, evaluating: Collection[int] = ()) -> "StopRule":
        """Count the steps of which all domains have been heard: those that come before the steps still under evaluation."""
        reached = self.reached
        whole = sorted({score.step for score in self.open if all(score.step < step for step in evaluating)})
        for step in whole:
            scores = [score for score in self.open if score.step == step]
            mean = sum(s.problems * s.reward_mean for s in scores) / sum(s.problems for s in scores)
            reached = reached + 1 if self.reward is not None and mean >= self.reward else 0
        return replace(self, reached=reached, open=tuple(score for score in self.open if score.step not in whole))

    @property
    def fulfilled(self) -> bool:
        return self.reward is not None and self.reached >= self.needed
