"""Advantages of the rollouts of one group, from their rewards alone. Both have mean 0 over a group (leave-one-out exactly
n / (n - 1) times the reward's distance from the mean), and are 0 for a single rollout and where all rewards are equal."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def leave_one_out(rewards: npt.NDArray[Any]) -> Float64:
    """A_i = r_i - (sum_j r_j - r_i) / (n - 1): the reward against the mean of the group's others."""
    r = np.asarray(rewards, np.float64)
    if len(r) == 1:
        return np.zeros(1)
    advantages: Float64 = r - (r.sum() - r) / (len(r) - 1)
    return advantages


def group_std(rewards: npt.NDArray[Any]) -> Float64:
    """A_i = (r_i - mean) / (std + 1e-6), with the standard deviation of the group as it is (divided by n)."""
    r = np.asarray(rewards, np.float64)
    advantages: Float64 = (r - r.mean()) / (r.std() + 1e-6)
    return advantages


ADVANTAGES: Mapping[str, Callable[[npt.NDArray[Any]], Float64]] = {"leave_one_out": leave_one_out, "group_std": group_std}
