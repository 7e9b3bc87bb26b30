"""Advantages of a value head: by hand, and by the recursion a token at a time."""

import numpy as np
import pytest
import torch

from prl.trainer import gae
from prl.trainer.losses import Sequences


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    # Two sequences, the first with context between its two turns; gamma 0.5, lambda 0.5, so that gamma lambda = 0.25.
    # First, backwards over tokens 4, 3, 1, which are trained, with V = 2, 4, 1 and the reward 6 at token 4:
    #   d4 = 6 - 2 = 4;  d3 = 0.5 * 2 - 4 = -3;  d1 = 0.5 * 4 - 1 = 1
    #   A4 = 4;  A3 = -3 + 0.25 * 4 = -2;  A1 = 1 + 0.25 * -2 = 0.5
    # Second, one token with V = 3 and the reward -1: A = -4.
    sequences = Sequences(torch.tensor([0, 0, 0, 0, 0, 1, 1]), 2)
    weights = tensor(0, 1, 0, 0.5, 1, 0, 2)
    rewards = gae.final_rewards(tensor(9, 6, 9, 6, 6, 9, -1), weights, sequences)
    assert rewards.tolist() == [0, 0, 0, 0, 6, 0, -1]
    values = tensor(9, 1, 9, 4, 2, 9, 3).requires_grad_()
    found = gae.gae(rewards, values, weights, sequences, gamma=0.5, decay=0.5)
    assert found.tolist() == [0, 0.5, 0, -2, 4, 0, -4]
    assert not found.requires_grad
    loss = gae.value_loss(values, found + values.detach())  # A^2 / 2, with the gradient -A
    loss.sum().backward()
    assert loss.tolist() == [0, 0.125, 0, 2, 8, 0, 8]
    assert values.grad.tolist() == [0, -0.5, 0, 2, -4, 0, 4]


@pytest.mark.parametrize(("gamma", "decay"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.0), (0.0, 1.0)])
def test_of_long_sequences(gamma, decay):
    lengths = (1000, 1, 700, 2, 33)
    random = np.random.default_rng(0)
    count = sum(lengths)
    rewards, values = random.normal(size=(2, count))
    weights = random.choice([0.0, 0.5, 1.0], count)
    own = np.repeat(np.arange(len(lengths)), lengths)
    expected, after = np.zeros(count), {}
    for t in reversed(range(count)):
        if weights[t]:
            following, advantage = after.get(own[t], (0.0, 0.0))
            expected[t] = rewards[t] + gamma * following - values[t] + gamma * decay * advantage
            after[own[t]] = values[t], expected[t]
    sequences = Sequences(torch.from_numpy(own), len(lengths))
    found = gae.gae(*(torch.from_numpy(x) for x in (rewards, values, weights)), sequences, gamma=gamma, decay=decay)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("weights", [(0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)])
def test_of_one_token_or_none(weights):
    sequences = Sequences(torch.tensor([0, 0, 0]), 1)
    weights = tensor(*weights)
    rewards = gae.final_rewards(tensor(5, 5, 5), weights, sequences)
    assert rewards.tolist() == (5 * weights).tolist()
    found = gae.gae(rewards, tensor(2, 2, 2), weights, sequences, gamma=0.9, decay=0.9)
    assert found.tolist() == (3 * weights).tolist()
