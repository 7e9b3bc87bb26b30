"""Losses on per-token log-probabilities. Pure functions.

Notation, for each trained token: pi = the trainer's log-probability, mu = the sampler's, rho = exp(pi - mu), A = advantage,
w = loss weight, sg = stop gradient. D > 0 = the denominator of the whole step (the sum of all weights over all ranks and
micro-batches, or a fixed one), so that a loss, sum w l / D, is the same however the step is split. A sequence is one of those
that are packed: a rollout, or turns of it that continue each other; none is ever split over micro-batches.

Tensors are [T], one value a token. Tokens without weight never count, whatever their values; their ratio is 1.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Sequences:
    """To which sequence each token belongs."""

    of_token: Tensor  # [T] int64, from 0
    count: int


class PolicyLoss(NamedTuple):
    values: Tensor  # the loss of each token, before its weight
    clipped: Tensor  # bool: a bound limits what the token contributes


def weighted_sum(values: Tensor, weights: Tensor, denominator: float) -> Tensor:
    """sum w l / D, a scalar."""
    return (weights * torch.where(weights > 0, values, torch.zeros_like(values))).sum() / denominator


def log_ratios(logprobs: Tensor, old_logprobs: Tensor, weights: Tensor) -> Tensor:
    """log rho = pi - mu, held within +-20: beyond that, a ratio of 5e8 (and an infinite one), it has no gradient, so that
    nothing made of ratios is infinite or undefined. 0 where nothing is trained, where mu is unknown."""
    difference = torch.where(weights > 0, logprobs - old_logprobs, torch.zeros_like(logprobs))
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# Policy losses


def ppo(log_ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A).

    Schulman et al. 2017, arXiv 1707.06347, equation 7 (0.2 on both sides, the defaults); different bounds as in DAPO, arXiv
    2503.14476 (0.2 and 0.28).
    """
    ratios = log_ratios.exp()
    bounded = ratios.clamp(1 - clip_low, 1 + clip_high)
    clipped = ((advantages > 0) & (ratios > 1 + clip_high)) | ((advantages < 0) & (ratios < 1 - clip_low))
    return PolicyLoss(-torch.minimum(ratios * advantages, bounded * advantages), clipped)


def reinforce(logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, *, truncate: float) -> PolicyLoss:
    """-pi A sg(min(rho, truncate)).

    REINFORCE with truncated importance weights, as in PipelineRL, arXiv 2509.19128 (5, the default).
    """
    ratios = log_ratios.detach().exp()
    return PolicyLoss(-logprobs * advantages * ratios.clamp(max=truncate), ratios > truncate)


def cispo(logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """-pi A sg(clip(rho, 1 - clip_low, 1 + clip_high)).

    MiniMax-M1, arXiv 2506.13585, equation 4, which sets no lower bound in practice (clip_low 1, the default). The upper bound
    of 5 (clip_high 4, the default) is one of those that ScaleRL, arXiv 2510.13786, found to matter little.
    """
    ratios = log_ratios.detach().exp()
    bounded = ratios.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-logprobs * advantages * bounded, ratios != bounded)


def gspo(
    log_ratios: Tensor, advantages: Tensor, weights: Tensor, sequences: Sequences, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s = sg(exp(mean of log rho over the sequence)) rho / sg(rho).

    GSPO, Zheng et al. 2025, arXiv 2507.18071, in the form of its equation 14 (GSPO-token), whose loss, clipping and gradient
    are those of the sequence's own ratio where the tokens of a sequence share advantage and weight, and which allows turns to
    differ. The defaults, 3e-4 and 4e-4, are the paper's, which weighs every rollout alike (preprocess.token_weight: sample).
    """
    means = sequence_means(log_ratios.detach(), weights, sequences)
    return ppo(means + log_ratios - log_ratios.detach(), advantages, clip_low=clip_low, clip_high=clip_high)


def dppo_tv(
    logprobs: Tensor, old_logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-rho A, but 0 where the probability has already gone too far the way that A pushes it: e^pi - e^mu above clip_high
    where A > 0, below -clip_low where A <= 0.

    DPPO with the binary total variation, Qi et al. 2026, arXiv 2602.04879; the defaults, 0.2 and 0.2, are prime-rl's, which
    adds `ratio_penalty`.
    """
    moved = logprobs.detach().exp() - old_logprobs.exp()
    dropped = torch.where(advantages > 0, moved > clip_high, moved < -clip_low)
    values = -log_ratios.exp() * advantages
    return PolicyLoss(torch.where(dropped, torch.zeros_like(values), values), dropped)


def ratio_penalty(log_ratios: Tensor) -> Tensor:
    """(log rho)^2, which draws the trainer back to the sampler; with the coefficient 1e-3 the companion of DPPO in prime-rl."""
    return log_ratios.square()


def decoupled_ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    truncate: float,
) -> PolicyLoss:
    """-min(exp(proximal - mu), truncate) min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(pi - proximal).

    Hilton et al. 2021, arXiv 2110.00641, equation 2: what limits a step is a recent policy, the proximal one, and what corrects
    for the samples' age is a weight of its own. As in AReaL, arXiv 2505.24298, with 0.2, 0.2 and 5 as defaults; AReaL drops
    tokens above the largest weight, which here is truncated.
    """
    inner = ppo(log_ratios(logprobs, proximal_logprobs, weights), advantages, clip_low=clip_low, clip_high=clip_high)
    behaviour = log_ratios(proximal_logprobs, old_logprobs, weights).exp()
    return PolicyLoss(behaviour.clamp(max=truncate) * inner.values, inner.clipped | (behaviour > truncate))


def interpolated_proximal(logprobs: Tensor, log_ratios: Tensor, lags: Tensor) -> Tensor:
    """log-probabilities of the policy one step behind the trainer's, taken to lie on the line from the trainer's to the
    sampler's, which is `lag` steps behind: sg(pi) - sg(log rho) / lag; sg(pi) at lag 0. So at lag 1 it is the sampler's.

    A-3PO, Li et al. 2025, arXiv 2512.06547: in place of one more forward pass.
    """
    fresh = logprobs.detach()
    return torch.where(lags >= 1, fresh - log_ratios.detach() / lags.clamp(min=1), fresh)


def sft(logprobs: Tensor) -> PolicyLoss:
    """-pi: the cross-entropy of given answers. Old log-probs and advantages take no part."""
    return PolicyLoss(-logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


# Masks


def outside_tokens(log_ratios: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """Tokens [T] whose rho is not in [low, high] (None: no bound): the policy's term of the loss leaves them out,
    though the denominator counts them.

    IcePop, Ling Team 2025, arXiv 2510.18855 (0.5 and 5).
    """
    return _outside(log_ratios, low, high)


def outside_sequences(
    log_ratios: Tensor, weights: Tensor, sequences: Sequences, *, low: float | None, high: float | None
) -> Tensor:
    """Tokens [T] of the sequences whose exp(mean of log rho), the geometric mean of the ratios, is not in [low, high].

    Liu et al. 2025, "When Speed Kills Stability" (masked importance sampling of sequences), with GSPO's mean over the length.
    """
    return _outside(sequence_means(log_ratios, weights, sequences), low, high)


def _outside(log_ratios: Tensor, low: float | None, high: float | None) -> Tensor:
    outside = torch.zeros_like(log_ratios, dtype=torch.bool)
    if low:
        outside = outside | (log_ratios < math.log(low))
    if high is not None:
        outside = outside | (log_ratios > math.log(high))
    return outside


# Divergence from the reference, and entropy

DIVERGENCE_LIMIT = 10.0


def k1(x: Tensor) -> Tensor:
    return -x


def k2(x: Tensor) -> Tensor:
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    return x.exp() - x - 1


_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Per token an estimate of KL(pi, reference) from pi's samples, with x = reference - pi held within +-10. From samples of
    older versions it is off by as much as these differ from pi.

    k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html. k1
    and k3 have the right mean, k2 and k3 are never negative. As a loss it is the gradient that counts: k2's is that of the
    divergence, k3's (GRPO, arXiv 2402.03300; the default there) is so to first order, k1's is 0 in the mean; in the reward k1
    is right (Liu et al. 2025, arXiv 2510.01555; the default there).
    """
    x = (reference_logprobs - logprobs).clamp(-DIVERGENCE_LIMIT, DIVERGENCE_LIMIT)
    return _ESTIMATORS[estimator](x)


def less_divergence(
    advantages: Tensor, divergences: Tensor, weights: Tensor, sequences: Sequences, *, coefficient: float
) -> Tensor:
    """The divergence in the reward: A - coefficient sg(sum of the divergences from this token to the end of its sequence).

    As in REINFORCE++, Hu et al. 2025, arXiv 2501.03262, whose reward of a token is -coefficient k1 and whose return is not
    discounted; here after the comparison within the group.
    """
    values = torch.where(weights > 0, divergences.detach(), torch.zeros_like(divergences)).double()
    up_to = values.cumsum(0)
    ends = _sequence_sums(values, sequences).cumsum(0)
    return advantages - coefficient * (ends[sequences.of_token] - up_to + values).to(advantages.dtype)


def entropy_bonus(entropies: Tensor) -> Tensor:
    """-H: lower where the distribution is wider (Mnih et al. 2016, arXiv 1602.01783)."""
    return -entropies


def coefficient(first: float, last: float | None, steps: int | None, step: int) -> float:
    """Of step `step` (from 1): `first`, or on a straight line from `first` at step 1 to `last` after `steps` steps."""
    if last is None or steps is None:
        return first
    return first + (last - first) * min(1.0, (step - 1) / steps)


# What losses and measures share


def sequence_means(values: Tensor, weights: Tensor, sequences: Sequences) -> Tensor:
    """For each token [T] the mean over the trained tokens of its sequence; 0 where a sequence has none."""
    trained = weights > 0
    sums = _sequence_sums(torch.where(trained, values, torch.zeros_like(values)).double(), sequences)
    counts = _sequence_sums(trained.double(), sequences)
    return (sums / counts.clamp(min=1))[sequences.of_token].to(values.dtype)


def _sequence_sums(values: Tensor, sequences: Sequences) -> Tensor:
    return values.new_zeros(sequences.count).index_add(0, sequences.of_token, values)


def effective_sample_size(ratio_sum: float, ratio_square_sum: float, count: float) -> float:
    """(sum rho)^2 / (N sum rho^2) of the raw ratios: 1 where all are equal, 1 / N where one outweighs all. Kish 1965. The sums
    go over all tokens of a step; ratios that were truncated first would flatter it."""
    return ratio_sum**2 / (count * ratio_square_sum) if ratio_square_sum > 0 else 0.0
