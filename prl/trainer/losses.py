"""Losses and their measures on per-token log-probabilities. Pure functions.

Notation, for each trained token: pi = the trainer's log-probability, mu = the sampler's, rho = exp(pi - mu), A = advantage,
w = loss weight. D = the denominator of the whole step (the sum of all weights over all ranks and micro-batches), so that a
loss is the same however the step is split. All tensors have one shape; every function returns a scalar, but for the ratios.
"""

import torch
from torch import Tensor


def importance_ratios(logprobs: Tensor, old_logprobs: Tensor, weights: Tensor) -> Tensor:
    """rho = exp(pi - mu); 1 where nothing is trained, where mu is unknown."""
    return torch.exp(torch.where(weights > 0, logprobs - old_logprobs, torch.zeros_like(logprobs)))


def ppo_loss(
    ratios: Tensor, advantages: Tensor, weights: Tensor, denominator: float, *, clip_low: float, clip_high: float
) -> Tensor:
    """-sum w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) / D.

    Schulman et al. 2017, arXiv 1707.06347, equation 7; different bounds as in DAPO, arXiv 2503.14476.
    """
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    return -(weights * torch.minimum(ratios * advantages, clipped * advantages)).sum() / denominator


def reinforce_loss(
    logprobs: Tensor, ratios: Tensor, advantages: Tensor, weights: Tensor, denominator: float, *, truncate: float
) -> Tensor:
    """-sum w pi A stop_gradient(min(rho, truncate)) / D.

    REINFORCE with truncated importance weights, as in PipelineRL, arXiv 2509.19128.
    """
    importance = ratios.detach().clamp(max=truncate)
    return -(weights * logprobs * advantages * importance).sum() / denominator


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor, *, limit: float = 10.0) -> Tensor:
    """Per token e^x - x - 1 with x = reference - pi, held within [-limit, limit]: an unbiased, never negative estimate of
    KL(pi, reference) from pi's samples; from those of older versions it is off by as much as these differ from pi.
    Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html, estimator k3."""
    x = (reference_logprobs - logprobs).clamp(-limit, limit)
    return torch.exp(x) - x - 1


def kl_loss(logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor, denominator: float, *, coefficient: float) -> Tensor:
    """coefficient sum w k3 / D, as in GRPO, arXiv 2402.03300."""
    return coefficient * (weights * k3_divergence(logprobs, reference_logprobs)).sum() / denominator


def entropy_loss(entropies: Tensor, weights: Tensor, denominator: float, *, coefficient: float) -> Tensor:
    """-coefficient sum w H / D: lower where the distribution is wider (the entropy bonus of Mnih et al., arXiv 1602.01783)."""
    return -coefficient * (weights * entropies).sum() / denominator


def effective_sample_size(ratio_sum: float, ratio_square_sum: float, count: float) -> float:
    """(sum rho)^2 / (N sum rho^2) of the raw ratios: 1 where all are equal, 1 / N where one outweighs all. Kish 1965. The sums
    go over all tokens of a step; ratios that were truncated first would flatter it."""
    return ratio_sum**2 / (count * ratio_square_sum) if ratio_square_sum > 0 else 0.0
