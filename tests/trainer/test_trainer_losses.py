"""Losses against arithmetic done by hand."""

import math

import numpy as np
import pytest
import torch

from prl.trainer import losses


def tensor(*values):
    return torch.tensor(values, requires_grad=True)


WEIGHTS = torch.tensor([1.0, 1.0, 0.5, 0.0])


def test_ratios():
    # e^(-1 - -1) = 1;  e^(-1 - -2) = 2.71828;  e^(-2 - -1) = 0.36788;  the last token is not trained: 1 whatever mu is.
    ratios = losses.importance_ratios(
        torch.tensor([-1.0, -1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.0, -1.0, math.inf]), WEIGHTS
    )
    assert ratios.tolist() == pytest.approx([1.0, 2.718282, 0.367879, 1.0], abs=1e-5)


def test_ppo():
    # Clip to [0.8, 1.3], denominator 5.
    # token 0: rho 1.5, A  2: min(3.0, 1.3 * 2 = 2.6) = 2.6       gradient to rho: 0 (clipped)
    # token 1: rho 1.5, A -1: min(-1.5, -1.3)        = -1.5      gradient to rho: A = -1
    # token 2: rho 0.5, A  4: min(2.0, 0.8 * 4 = 3.2) = 2.0       gradient to rho: A = 4
    # token 3: weight 0
    # loss = -(1 * 2.6 + 1 * -1.5 + 0.5 * 2.0 + 0) / 5 = -2.1 / 5 = -0.42
    ratios = tensor(1.5, 1.5, 0.5, 9.0)
    loss = losses.ppo_loss(ratios, torch.tensor([2.0, -1.0, 4.0, 7.0]), WEIGHTS, 5.0, clip_low=0.2, clip_high=0.3)
    loss.backward()
    assert loss.item() == pytest.approx(-0.42)
    assert ratios.grad.tolist() == pytest.approx([0.0, 1 / 5, -0.5 * 4 / 5, 0.0])


def test_reinforce():
    # Weights truncated at 2, denominator 5: 2 (from 3), 0.5, 1.
    # loss = -(1 * -1 * 2 * 2 + 1 * -2 * -1 * 0.5 + 0.5 * -4 * 3 * 1) / 5 = -(-4 + 1 - 6) / 5 = 1.8
    # gradient to pi: -w A min(rho, 2) / 5 = -4 / 5, 0.5 / 5, -1.5 / 5; none through rho
    logprobs, ratios = tensor(-1.0, -2.0, -4.0, -1.0), tensor(3.0, 0.5, 1.0, 1.0)
    loss = losses.reinforce_loss(logprobs, ratios, torch.tensor([2.0, -1.0, 3.0, 5.0]), WEIGHTS, 5.0, truncate=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(1.8)
    assert logprobs.grad.tolist() == pytest.approx([-0.8, 0.1, -0.3, 0.0])
    assert ratios.grad is None


def test_kl():
    # x = reference - pi = 0, 1, -1:  e^x - x - 1 = 0, 0.718282, 0.367879
    # loss = 0.1 * (0 + 0.718282 + 0.5 * 0.367879) / 4 = 0.1 * 0.902221 / 4 = 0.0225555
    logprobs = tensor(-1.0, -2.0, -1.0, -1.0)
    reference = torch.tensor([-1.0, -1.0, -2.0, -9.0])
    loss = losses.kl_loss(logprobs, reference, WEIGHTS, 4.0, coefficient=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(0.0225555, rel=1e-5)
    # d/dpi (e^x - x - 1) = 1 - e^x: 0, -1.718282, 0.632121
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.718282 * 0.1 / 4, 0.632121 * 0.5 * 0.1 / 4, 0.0], abs=1e-6)


def test_kl_of_far_apart_models_stays_finite():
    assert losses.k3_divergence(torch.tensor(-500.0), torch.tensor(0.0)).item() == pytest.approx(math.exp(10) - 11)


def test_entropy_bonus():
    # -0.01 * (1 * 2 + 1 * 1 + 0.5 * 4) / 5 = -0.01
    loss = losses.entropy_loss(torch.tensor([2.0, 1.0, 4.0, 8.0]), WEIGHTS, 5.0, coefficient=0.01)
    assert loss.item() == pytest.approx(-0.01)


def test_effective_sample_size_is_of_the_raw_ratios():
    # (1 + 1 + 1 + 5)^2 / (4 * (1 + 1 + 1 + 25)) = 64 / 112;  truncated at 2 it would flatter: 25 / 28
    assert losses.effective_sample_size(8.0, 28.0, 4.0) == pytest.approx(64 / 112)
    assert losses.effective_sample_size(3.0, 3.0, 3.0) == 1.0
    assert losses.effective_sample_size(0.0, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_vocabulary_parallel_values_equal_torch(results, ranks):
    found = results[ranks, "vocabulary"]
    vocabulary = 51
    logits = torch.from_numpy(found["logits"]).requires_grad_()
    logp = logits[:, :vocabulary].log_softmax(-1)
    logprobs = logp.gather(-1, torch.from_numpy(found["targets"])[:, None]).squeeze(-1)
    entropies = -(logp.exp() * logp).sum(-1)
    factors = torch.from_numpy(found["factors"])
    (logprobs * factors + entropies * factors.flip(0)).sum().backward()
    np.testing.assert_allclose(found["logprobs"], logprobs.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(found["entropies"], entropies.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(found["gradient"], logits.grad.numpy(), atol=1e-5)
    assert not found["gradient"][:, vocabulary:].any()  # padding takes no part
