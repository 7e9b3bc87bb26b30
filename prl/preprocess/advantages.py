"""Advantages from rewards alone: of one group (`GROUP_ADVANTAGES`), or of all groups of a step (`step_advantages`).

r: rewards, n: how many (a partial group has fewer), mean and std (divided by n) over them. Whatever the estimator (but for
`reward`), the advantages of a group add up to 0, and all are 0 for a single rollout and where all rewards are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
_EPSILON = 1e-6


def leave_one_out(rewards: npt.NDArray[Any]) -> Float64:
    """A_i = r_i - (sum_j r_j - r_i) / (n - 1): the reward against the mean of the group's others, which is n / (n - 1) times
    its distance from the mean. Also known as RLOO (Ahmadian et al., arXiv 2402.14740; Kool et al., 2019)."""
    r = np.asarray(rewards, np.float64)
    if len(r) == 1:
        return np.zeros(1)
    advantages: Float64 = r - (r.sum() - r) / (len(r) - 1)
    return advantages


def group_mean(rewards: npt.NDArray[Any]) -> Float64:
    """A_i = r_i - mean (Dr. GRPO, Liu et al., arXiv 2503.20783)."""
    r = np.asarray(rewards, np.float64)
    advantages: Float64 = r - r.mean()
    return advantages


def group_std(rewards: npt.NDArray[Any]) -> Float64:
    """A_i = (r_i - mean) / (std + 1e-6) (GRPO, Shao et al., arXiv 2402.03300)."""
    r = np.asarray(rewards, np.float64)
    advantages: Float64 = (r - r.mean()) / (r.std() + _EPSILON)
    return advantages


def maxrl(rewards: npt.NDArray[Any]) -> Float64:
    """A_i = (r_i - mean) / mean, 0 where the mean is 0 (MaxRL, Tajwar et al., arXiv 2602.02710, algorithm 1: its 1 / N is the
    loss's average). Derived for rewards of 0 and 1. Raises ValueError for a negative reward, which would turn the sign."""
    r = np.asarray(rewards, np.float64)
    if r.min() < 0:
        raise ValueError(
            f"preprocess.advantage = maxrl: divides by the mean reward and so needs rewards of 0 or more, found {r.min():g}; "
            f"choose another advantage, or rewards from 0 on"
        )
    mean = r.mean()
    advantages: Float64 = (r - mean) / mean if mean > 0 else np.zeros(len(r))
    return advantages


def reward(rewards: npt.NDArray[Any]) -> Float64:
    """A_i = r_i (REINFORCE without a baseline, Williams 1992). With a value head the trainer makes advantages of it."""
    return np.asarray(rewards, np.float64)


def batch_normalised(groups: Sequence[npt.NDArray[Any]]) -> list[Float64]:
    """A_i = (r_i - mean of its group) / (s + 1e-6), s being the standard deviation of all r - mean of the step
    (REINFORCE++-baseline, Hu et al., arXiv 2501.03262; here every reward counts once in s, however long its answer)."""
    centred = [group_mean(rewards) for rewards in groups]
    scale = np.concatenate(centred).std() + _EPSILON
    return [advantages / scale for advantages in centred]


GROUP_ADVANTAGES: Mapping[str, Callable[[npt.NDArray[Any]], Float64]] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_std": group_std,
    "maxrl": maxrl,
    "reward": reward,
}


@dataclass(frozen=True, slots=True)
class GroupRewards:
    rewards: Float64  # [rollouts]
    turns: npt.NDArray[np.int64]  # [rollouts], how many each took, at least 1


def step_advantages(groups: Sequence[GroupRewards], estimator: str, baseline: str) -> list[Float64]:
    """The advantages of every group of a step, each [rollouts, turns]. `baseline`: "rollout", over the rollouts of a group, the
    same for all turns; "turn", for turn t over the group's rollouts that have a turn t (0 where a rollout has none)."""
    parts = [(number, turns, members) for number, group in enumerate(groups) for turns, members in _parts(group, baseline)]
    rewards = [groups[number].rewards[members] for number, _, members in parts]
    if estimator == "batch_normalised":
        values = batch_normalised(rewards)
    else:
        values = [GROUP_ADVANTAGES[estimator](part) for part in rewards]
    made = [np.zeros((len(group.rewards), int(group.turns.max()))) for group in groups]
    for (number, turns, members), advantages in zip(parts, values, strict=True):
        made[number][members, turns] = advantages[:, None]
    return made


def _parts(group: GroupRewards, baseline: str) -> list[tuple[slice, npt.NDArray[np.intp]]]:
    """(turns, rollouts whose rewards are compared there)."""
    if baseline == "rollout":
        return [(slice(None), np.arange(len(group.rewards)))]
    return [(slice(turn, turn + 1), np.flatnonzero(group.turns > turn)) for turn in range(int(group.turns.max()))]
