"""Advantages against values worked out by hand."""

import numpy as np
import pytest

from prl.preprocess.advantages import ADVANTAGES, group_std, leave_one_out


def test_leave_one_out():
    # the others' means of 1, 0, 0, 0.5 are 0.5/3, 1.5/3, 1.5/3, 1/3
    np.testing.assert_allclose(leave_one_out(np.array([1.0, 0.0, 0.0, 0.5])), [5 / 6, -1 / 2, -1 / 2, 1 / 6])
    np.testing.assert_allclose(leave_one_out(np.array([3.0, 1.0])), [2.0, -2.0])


def test_group_std():
    # mean 0.5, squared distances 1/4 each: std 0.5
    np.testing.assert_allclose(group_std(np.array([1.0, 0.0, 0.0, 1.0])), np.array([1, -1, -1, 1]) * 0.5 / 0.500001)
    # mean 2, squared distances 4, 1, 1, 4: std sqrt(2.5)
    np.testing.assert_allclose(group_std(np.array([0.0, 1.0, 3.0, 4.0])), np.array([-2, -1, 1, 2]) / 2.5**0.5, rtol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_and_single_rollouts_have_none(name):
    for rewards in ([0.3, 0.3, 0.3], [0.7]):
        np.testing.assert_allclose(ADVANTAGES[name](np.array(rewards, np.float32)), 0, atol=1e-9)
