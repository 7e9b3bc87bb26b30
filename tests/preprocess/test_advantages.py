"""Advantages against values worked out by hand."""

import numpy as np
import pytest

from prl.preprocess.advantages import (
    GROUP_ADVANTAGES,
    GroupRewards,
    batch_normalised,
    group_mean,
    group_std,
    leave_one_out,
    maxrl,
    reward,
    step_advantages,
)


def rewards_of(rewards, turns=None) -> GroupRewards:
    return GroupRewards(np.array(rewards, np.float64), np.array(turns or [1] * len(rewards), np.int64))


def test_leave_one_out():
    # the others' means of 1, 0, 0, 0.5 are 0.5/3, 1.5/3, 1.5/3, 1/3
    np.testing.assert_allclose(leave_one_out(np.array([1.0, 0.0, 0.0, 0.5])), [5 / 6, -1 / 2, -1 / 2, 1 / 6])
    np.testing.assert_allclose(leave_one_out(np.array([3.0, 1.0])), [2.0, -2.0])


def test_group_mean():
    np.testing.assert_allclose(group_mean(np.array([1.0, 0.0, 0.0, 0.5])), [0.625, -0.375, -0.375, 0.125])


def test_group_std():
    # mean 0.5, squared distances 1/4 each: std 0.5
    np.testing.assert_allclose(group_std(np.array([1.0, 0.0, 0.0, 1.0])), np.array([1, -1, -1, 1]) * 0.5 / 0.500001)
    # mean 2, squared distances 4, 1, 1, 4: std sqrt(2.5)
    np.testing.assert_allclose(group_std(np.array([0.0, 1.0, 3.0, 4.0])), np.array([-2, -1, 1, 2]) / 2.5**0.5, rtol=1e-5)


def test_maxrl():
    np.testing.assert_allclose(maxrl(np.array([1.0, 0.0, 0.0, 0.0])), [3, -1, -1, -1])
    np.testing.assert_allclose(maxrl(np.array([1.0, 1.0, 0.0])), [0.5, 0.5, -1])
    np.testing.assert_array_equal(maxrl(np.zeros(3)), [0, 0, 0])
    with pytest.raises(ValueError, match="needs rewards of 0 or more, found -1"):
        maxrl(np.array([1.0, -1.0]))


def test_reward():
    np.testing.assert_array_equal(reward(np.array([0.5, -1.0, 0.5])), [0.5, -1, 0.5])
    (found,) = step_advantages([rewards_of([4.0, 1.0], [1, 3])], "reward", "rollout")
    np.testing.assert_array_equal(found, [[4, 4, 4], [1, 1, 1]])


def test_batch_normalised():
    # distances from the group means: 0.5, -0.5 | 1, 0, -1 | 0; mean 0, mean square (0.25 * 2 + 1 * 2) / 6 = 5/12
    groups = [np.array([1.0, 0.0]), np.array([5.0, 4.0, 3.0]), np.array([7.0])]
    scale = (5 / 12) ** 0.5
    for found, expected in zip(batch_normalised(groups), ([0.5, -0.5], [1, 0, -1], [0]), strict=True):
        np.testing.assert_allclose(found, np.array(expected) / scale, rtol=1e-5)


@pytest.mark.parametrize("name", [*(name for name in GROUP_ADVANTAGES if name != "reward"), "batch_normalised"])
@pytest.mark.parametrize("baseline", ["rollout", "turn"])
def test_equal_rewards_and_single_rollouts_have_none(name, baseline):
    for rewards in ([0.3, 0.3, 0.3], [0.7]):
        (found,) = step_advantages([rewards_of(np.array(rewards, np.float32))], name, baseline)
        np.testing.assert_allclose(found, 0, atol=1e-6)


def test_one_baseline_for_all_turns_of_a_rollout():
    first, second = step_advantages([rewards_of([3.0, 1.0], [1, 3]), rewards_of([0.0, 1.0, 1.0])], "group_mean", "rollout")
    np.testing.assert_allclose(first, [[1, 1, 1], [-1, -1, -1]])
    np.testing.assert_allclose(second, [[-2 / 3], [1 / 3], [1 / 3]])


def test_a_baseline_for_every_turn():
    # turn 0 compares 4, 1, 1, turn 1 compares 4, 1, turn 2 has one rollout alone
    (found,) = step_advantages([rewards_of([4.0, 1.0, 1.0], [2, 1, 3])], "group_mean", "turn")
    np.testing.assert_allclose(found, [[2, 1.5, 0], [-1, 0, 0], [-1, -1.5, 0]])
    (found,) = step_advantages([rewards_of([4.0, 1.0, 1.0], [2, 1, 3])], "leave_one_out", "turn")
    np.testing.assert_allclose(found, [[3, 3, 0], [-1.5, 0, 0], [-1.5, -3, 0]])
    # the step's standard deviation counts each turn of each rollout: 2, -1, -1, 1.5, -1.5, 0: mean square 10.5/6
    (found,) = step_advantages([rewards_of([4.0, 1.0, 1.0], [2, 1, 3])], "batch_normalised", "turn")
    np.testing.assert_allclose(found, np.array([[2, 1.5, 0], [-1, 0, 0], [-1, -1.5, 0]]) / 1.75**0.5, rtol=1e-5)
