"""Identities that every part of a run agrees on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RolloutId:
    """One answer to one problem. `group` rises with every group handed out in a run; `issue` rises when the group is
    sampled again after a loss."""

    epoch: int
    problem: str  # "<domain>/<index in load_problems>"
    group: int
    rollout: int
    issue: int


@dataclass(frozen=True, slots=True)
class Lease:
    """One group handed to one actor: `rollouts` answers to problem number `index` of `domain`."""

    kind: str  # "train" or "evaluate"; evaluations are no part of the stream
    domain: str
    index: int
    epoch: int
    group: int
    issue: int
    rollouts: int

    @property
    def problem(self) -> str:
        return f"{self.domain}/{self.index}"

    def rollout_ids(self) -> list[RolloutId]:
        return [RolloutId(self.epoch, self.problem, self.group, k, self.issue) for k in range(self.rollouts)]
