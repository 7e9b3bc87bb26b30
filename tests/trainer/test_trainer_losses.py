"""Losses against arithmetic done by hand."""

import math

import pytest
import torch

from prl.trainer import losses
from prl.trainer.losses import Sequences, weighted_sum


def tensor(*values):
    return torch.tensor(values, requires_grad=True)


WEIGHTS = torch.tensor([1.0, 1.0, 0.5, 0.0])


def test_ratios():
    # -1 - -1 = 0;  -1 - -2 = 1;  infinite: held at 20, with no gradient;  the last token is not trained: 0 whatever mu is.
    logprobs = tensor(-1.0, -1.0, -2.0, -3.0)
    ratios = losses.log_ratios(logprobs, torch.tensor([-1.0, -2.0, -math.inf, math.inf]), WEIGHTS)
    ratios.sum().backward()
    assert ratios.tolist() == [0.0, 1.0, 20.0, 0.0]
    assert logprobs.grad.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_ppo():
    # Clip to [0.8, 1.3], denominator 5.
    # token 0: rho 1.5, A  2: min(3.0, 1.3 * 2 = 2.6) = 2.6       gradient to log rho: 0 (clipped)
    # token 1: rho 1.5, A -1: min(-1.5, -1.3)        = -1.5      gradient to log rho: rho A = -1.5
    # token 2: rho 0.5, A  4: min(2.0, 0.8 * 4 = 3.2) = 2.0       gradient to log rho: rho A = 2
    # token 3: weight 0
    # loss = -(1 * 2.6 + 1 * -1.5 + 0.5 * 2.0 + 0) / 5 = -2.1 / 5 = -0.42
    ratios = tensor(*(math.log(ratio) for ratio in (1.5, 1.5, 0.5, 9.0)))
    found = losses.ppo(ratios, torch.tensor([2.0, -1.0, 4.0, 7.0]), clip_low=0.2, clip_high=0.3)
    loss = weighted_sum(found.values, WEIGHTS, 5.0)
    loss.backward()
    assert loss.item() == pytest.approx(-0.42)
    assert ratios.grad.tolist() == pytest.approx([0.0, 1.5 / 5, -0.5 * 2 / 5, 0.0])
    assert found.clipped.tolist() == [True, False, False, True]


def test_reinforce():
    # Weights truncated at 2, denominator 5: 2 (from 3), 0.5, 1.
    # loss = -(1 * -1 * 2 * 2 + 1 * -2 * -1 * 0.5 + 0.5 * -4 * 3 * 1) / 5 = -(-4 + 1 - 6) / 5 = 1.8
    # gradient to pi: -w A min(rho, 2) / 5 = -4 / 5, 0.5 / 5, -1.5 / 5; none through rho
    logprobs, ratios = tensor(-1.0, -2.0, -4.0, -1.0), tensor(math.log(3), math.log(0.5), 0.0, 0.0)
    found = losses.reinforce(logprobs, ratios, torch.tensor([2.0, -1.0, 3.0, 5.0]), truncate=2.0)
    loss = weighted_sum(found.values, WEIGHTS, 5.0)
    loss.backward()
    assert loss.item() == pytest.approx(1.8)
    assert logprobs.grad.tolist() == pytest.approx([-0.8, 0.1, -0.3, 0.0])
    assert ratios.grad is None
    assert found.clipped.tolist() == [True, False, False, False]


def test_sequence_ratios():
    # Sequences of tokens 0, 1 and of tokens 2, 3, the last of which is not trained: means of log rho 0.1 and 0.3.
    found = losses.sequence_means(torch.tensor([0.3, -0.1, 0.3, 9.0]), WEIGHTS, Sequences(torch.tensor([0, 0, 1, 1]), 2))
    assert found.tolist() == pytest.approx([0.1, 0.1, 0.3, 0.3])


def test_divergence():
    # x = reference - pi = 0, 1, -1:  e^x - x - 1 = 0, 0.718282, 0.367879;  d/dpi: 1 - e^x = 0, -1.718282, 0.632121
    # sum w k3 / D = (0 + 0.718282 + 0.5 * 0.367879) / 4 = 0.225555
    logprobs, reference = tensor(-1.0, -2.0, -1.0, -1.0), torch.tensor([-1.0, -1.0, -2.0, -9.0])
    loss = weighted_sum(losses.divergence(logprobs, reference), WEIGHTS, 4.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.225555, rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.718282 / 4, 0.632121 * 0.5 / 4, 0.0], abs=1e-6)


def test_the_divergence_of_far_apart_models_stays_finite():
    far, near = torch.tensor(-500.0), torch.tensor(0.0)
    assert losses.divergence(far, near, "k3").item() == pytest.approx(math.exp(10) - 11)
    assert losses.divergence(far, near, "k2").item() == 50
    assert losses.divergence(far, near, "k1").item() == -10


def test_the_divergence_in_the_reward_counts_from_a_token_to_the_end_of_its_sequence():
    # 0.1 * (1 + 2) and 0.1 * 2 in the first sequence, 0.1 * 4 and nothing in the second.
    found = losses.less_divergence(
        torch.tensor([1.0, 1.0, 2.0, 2.0]),
        torch.tensor([1.0, 2.0, 4.0, 8.0]),
        WEIGHTS,
        Sequences(torch.tensor([0, 0, 1, 1]), 2),
        coefficient=0.1,
    )
    assert found.tolist() == pytest.approx([0.7, 0.8, 1.6, 2.0])


def test_coefficients():
    assert losses.coefficient(0.3, None, None, 7) == 0.3
    # From 0.3 on a line to 0.1 in 4 steps, where it stays.
    assert [losses.coefficient(0.3, 0.1, 4, step) for step in (1, 2, 3, 4, 5, 6)] == pytest.approx(
        [0.3, 0.25, 0.2, 0.15, 0.1, 0.1]
    )


def test_effective_sample_size_is_of_the_raw_ratios():
    # (1 + 1 + 1 + 5)^2 / (4 * (1 + 1 + 1 + 25)) = 64 / 112;  truncated at 2 it would flatter: 25 / 28
    assert losses.effective_sample_size(8.0, 28.0, 4.0) == pytest.approx(64 / 112)
    assert losses.effective_sample_size(3.0, 3.0, 3.0) == 1.0
    assert losses.effective_sample_size(0.0, 0.0, 0.0) == 0.0
