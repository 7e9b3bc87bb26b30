"""Advantages from a value head, and its loss. Pure functions; notation and tensors as in `losses`.

V = the head's value of what precedes a token. Sums go over the trained tokens of one sequence: context between them is no
action of the policy and is passed over. Each sequence ends with its rollout's reward, also where a rollout has several of them
(turns that do not continue each other): they are packed apart and may lie on other ranks, so that none knows the next one's V.

An optimizer step passes once over its data: all values of a step are of the weights that it began with, and those of the
forward pass itself are what advantages and returns are made of, without another pass before. For the same reason there is no
bound on how far V may move from where it was (PPO's clipped value loss): in its only pass it has not moved.
"""

import torch
from torch import Tensor

from prl.trainer.losses import Sequences


def final_rewards(rewards: Tensor, weights: Tensor, sequences: Sequences) -> Tensor:
    """Of rewards that every trained token of a sequence carries, that at its last trained token; 0 at all others."""
    trained = (weights > 0).nonzero().squeeze(-1)
    own = sequences.of_token[trained]
    is_last = torch.ones_like(own, dtype=torch.bool)
    is_last[:-1] = own[1:] != own[:-1]
    last = trained[is_last]
    return torch.zeros_like(rewards).index_copy(0, last, rewards[last])


def gae(rewards: Tensor, values: Tensor, weights: Tensor, sequences: Sequences, *, gamma: float, decay: float) -> Tensor:
    """A_t = sum over k >= 0 of (gamma decay)^k d_(t+k) with d = r + gamma V_next - V, V_next being 0 after the last trained
    token of a sequence; 0 where nothing is trained. No gradient.

    Generalized advantage estimation, Schulman et al. 2016, arXiv 1506.02438, equation 16; `decay` is its lambda. With 1 (the
    default) A is what rewards add up to from there on, less V: right in the mean whatever V is. Below 1 A varies less, but has
    V's faults, and a reward at the end fades on its way to the first tokens of long answers (Yuan et al. 2025, arXiv
    2503.01491).
    """
    trained = (weights > 0).nonzero().squeeze(-1)
    own, v = sequences.of_token[trained], values.detach()[trained].double()
    errors = rewards.detach()[trained].double() + gamma * _later(v, own, 1) - v
    advantages = _discounted(errors, own, gamma * decay).to(values.dtype)
    return torch.zeros_like(values).index_copy(0, trained, advantages)


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """(V - R)^2 / 2 with R = A + V, of which the V in it has no gradient."""
    return (values - returns).square() / 2


def _discounted(values: Tensor, own: Tensor, factor: float) -> Tensor:
    """sum over k >= 0 of factor^k values[t + k] within the sequence of t (`own`: the number of each one's sequence, rising), by
    sums of 1, 2, 4, ... terms, each of two of those before."""
    terms = 1
    while terms < len(values):
        values = values + factor**terms * _later(values, own, terms)
        terms *= 2
    return values


def _later(values: Tensor, own: Tensor, distance: int) -> Tensor:
    """values[t + distance]; 0 beyond the end of the sequence of t."""
    found = torch.zeros_like(values)
    found[:-distance] = torch.where(own[distance:] == own[:-distance], values[distance:], 0.0)
    return found
