"""When a run has learned enough."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StopRule:
    """Evaluations in a row that reached the wanted reward; pure, so that a resumed run goes on counting."""

    reward: float | None
    needed: int
    reached: int = 0

    def after(self, reward: float) -> "StopRule":
        return StopRule(self.reward, self.needed, self.reached + 1 if self.reward is not None and reward >= self.reward else 0)

    @property
    def fulfilled(self) -> bool:
        return self.reward is not None and self.reached >= self.needed
