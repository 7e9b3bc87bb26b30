"""Packed rows of tokens and options for losses, and what the trainer computes of them."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from prl.streams.records import StepFacts
from prl.trainer.batch import Batch
from prl.trainer.losses import Sequences
from prl.trainer.objective import objective
from prl.trainer.options import LOSS_SETTINGS, TrainOptions

DENOMINATOR = 7.0
STEP = 3  # of 4 over which coefficients change: half of the way
OPTIONS = {
    **{loss: {"loss": loss} for loss in LOSS_SETTINGS},
    "ppo_asymmetric": {"loss": "ppo", "clip_low": 0.1, "clip_high": 0.4},
    "gspo_wide": {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    "cispo_two_sided": {"loss": "cispo", "clip_low": 0.4, "clip_high": 0.6},
    "reinforce_truncated": {"loss": "reinforce", "truncate": 1.1},
    "decoupled_ppo_truncated": {"loss": "decoupled_ppo", "clip_low": 0.05, "clip_high": 0.1, "truncate": 1.2},
    "decoupled_ppo_previous": {"loss": "decoupled_ppo", "proximal": "previous"},
    "decoupled_ppo_previous_truncated": {
        "loss": "decoupled_ppo",
        "proximal": "previous",
        "clip_low": 0.05,
        "clip_high": 0.1,
        "truncate": 1.2,
        "token_mask_high": 1.5,
    },
    "dppo_tv_narrow": {"loss": "dppo_tv", "clip_low": 0.02, "clip_high": 0.03, "ratio_penalty": 0.1},
    "token_mask": {"loss": "reinforce", "token_mask_low": 0.7, "token_mask_high": 1.5},
    "sequence_mask": {"loss": "ppo", "sequence_mask_low": 0.9, "sequence_mask_high": 1.2},
    "both_masks": {"loss": "gspo", "clip_high": 0.4, "token_mask_high": 1.5, "sequence_mask_low": 0.8},
    "everything": {
        "loss": "dppo_tv",
        "token_mask_high": 3.0,
        "sequence_mask_low": 0.5,
        "entropy_coefficient": 0.02,
        "entropy_coefficient_end": 0.0,
        "kl_coefficient": 0.1,
        "kl_coefficient_end": 0.3,
        "coefficient_steps": 4,
    },
    **{
        f"{place}_{estimator}": {"loss": "reinforce", "kl_coefficient": 0.2, "kl_place": place, "kl_estimator": estimator}
        for place in ("loss", "reward")
        for estimator in ("k1", "k2", "k3", None)
    },
    "value_head": {"loss": "reinforce", "value_head": True},
    "value_head_one_step": {"loss": "cispo", "value_head": True, "gae_lambda": 0.0},
    "value_head_discounted": {
        "loss": "ppo",
        "value_head": True,
        "gae_gamma": 0.9,
        "gae_lambda": 0.8,
        "value_coefficient": 0.3,
        "entropy_coefficient": 0.02,
    },
    "value_head_divergence_in_reward": {
        "loss": "reinforce",
        "value_head": True,
        "gae_lambda": 0.95,
        "kl_coefficient": 0.2,
        "kl_place": "reward",
    },
}


@dataclass(frozen=True)
class Tokens:
    """One packed row, as the losses see it; float64."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    proximal_logprobs: np.ndarray | None  # of a policy that is neither the trainer's nor the sampler's; None: not known yet
    reference_logprobs: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    lags: np.ndarray
    values: np.ndarray
    lengths: tuple[int, ...]

    @property
    def sequence_of_token(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def some_tokens(seed: int, lengths: tuple[int, ...], spread: float = 0.3) -> Tokens:
    random = np.random.default_rng(seed)
    count = sum(lengths)
    logprobs = -random.exponential(1.0, count)
    return Tokens(
        logprobs=logprobs,
        old_logprobs=np.minimum(logprobs + random.normal(0, spread, count), 0.0),
        reference_logprobs=np.minimum(logprobs + random.normal(0, 1.0, count), 0.0),
        entropies=random.exponential(1.0, count),
        advantages=random.normal(0, 1, count),
        weights=random.choice([0.0, 0.25, 1.0], count),
        lags=random.integers(0, 5, count).astype(float),
        values=random.normal(0, 1, count),
        proximal_logprobs=np.minimum(logprobs + random.normal(0, spread / 2, count), 0.0),
        lengths=lengths,
    )


BASE = some_tokens(0, (4, 1, 6, 3))
FIRST = np.arange(14) == 2
ONES = np.ones(14)
CASES = {
    "random": BASE,
    "far apart": some_tokens(1, (5, 7), spread=3.0),
    "one token": replace(some_tokens(2, (1,)), weights=np.ones(1)),
    "one token in each sequence": replace(some_tokens(3, (1,) * 6), weights=np.ones(6)),
    "nothing trains": replace(BASE, weights=np.zeros(14)),
    "one sequence trains": replace(BASE, weights=(BASE.sequence_of_token == 2) * 0.5),
    "on-policy": replace(BASE, old_logprobs=BASE.logprobs.copy(), lags=np.zeros(14)),
    "lag 0": replace(BASE, lags=np.zeros(14)),
    "lag 1": replace(BASE, lags=np.ones(14)),
    "no advantage": replace(BASE, advantages=np.zeros(14)),
    "infinite ratio, good": replace(
        BASE, weights=ONES, old_logprobs=np.where(FIRST, -np.inf, BASE.old_logprobs), advantages=np.abs(BASE.advantages)
    ),
    "infinite ratio, bad": replace(
        BASE, weights=ONES, old_logprobs=np.where(FIRST, -np.inf, BASE.old_logprobs), advantages=-np.abs(BASE.advantages)
    ),
    "ratio nought": replace(BASE, weights=ONES, logprobs=np.where(FIRST, -5000.0, BASE.logprobs)),
    "unknown where nothing trains": replace(
        BASE, weights=np.where(FIRST, 0.0, 1.0), old_logprobs=np.where(FIRST, np.inf, BASE.old_logprobs)
    ),
    "above every mask": replace(BASE, old_logprobs=BASE.logprobs - 2.0),
    "below every mask": replace(BASE, logprobs=BASE.old_logprobs - 2.0),
}


def batch_of(tokens: Tokens, dtype: torch.dtype) -> Batch:
    count = len(tokens.weights)
    nothing = torch.zeros(count, dtype=torch.int64)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return Batch(
        tokens=nothing,
        positions=nothing,
        targets=nothing,
        sequences=None,
        cut=None,
        weights=tensor(tokens.weights),
        advantages=tensor(tokens.advantages),
        old_logprobs=tensor(tokens.old_logprobs),
        reference_logprobs=tensor(tokens.reference_logprobs),
        proximal_logprobs=None if tokens.proximal_logprobs is None else tensor(tokens.proximal_logprobs),
        lags=tensor(tokens.lags),
        sequence_numbers=Sequences(torch.from_numpy(tokens.sequence_of_token), len(tokens.lengths)),
    )


def computed(tokens: Tokens, options: TrainOptions, dtype: torch.dtype = torch.float64):
    """The objective, and the gradients to log-probs, entropies and values."""
    logprobs = torch.tensor(tokens.logprobs, dtype=dtype, requires_grad=True)
    entropies = torch.tensor(tokens.entropies, dtype=dtype, requires_grad=True)
    values = torch.tensor(tokens.values, dtype=dtype, requires_grad=True) if options.value_head else None
    found = objective(batch_of(tokens, dtype), logprobs, entropies, StepFacts(STEP, DENOMINATOR, 1, 1, 1), options, values)
    found.loss.backward()
    nothing = np.zeros(len(tokens.weights))
    others = [nothing if x is None or x.grad is None else x.grad.numpy() for x in (entropies, values)]
    return found, logprobs.grad.numpy(), *others
