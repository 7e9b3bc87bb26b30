"""What the options choose to minimise, micro-batch by micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from prl.streams.records import StepFacts
from prl.trainer import gae, losses
from prl.trainer.batch import Batch
from prl.trainer.losses import PolicyLoss, weighted_sum
from prl.trainer.options import TrainOptions, loss_setting

PARTS = ("policy", "ratio_penalty", "entropy", "kl", "value")
"""What a loss may be made of."""


class Value(NamedTuple):
    """What a value head says, and what it is to learn to say."""

    values: Tensor  # [T]
    returns: Tensor  # [T]; where nothing is trained it is the value


@dataclass(frozen=True)
class Objective:
    """A micro-batch's share of the step's loss."""

    parts: Mapping[str, Tensor]  # scalars by their names in PARTS, which add up to the loss
    clipped: Tensor  # [T] bool: tokens that a bound of the loss limits
    masked: Tensor  # [T] bool: tokens that a mask keeps from training
    on_samples: bool = True  # the answers are the samplers', so that ratios to their log-probs mean something
    coefficients: Mapping[str, float] = field(default_factory=dict)  # those that change from step to step, by their options
    value: Value | None = None  # where there is a value head

    @property
    def loss(self) -> Tensor:
        first, *others = self.parts.values()
        return sum(others, start=first)


def objective(
    batch: Batch,
    logprobs: Tensor,
    entropies: Tensor,
    facts: StepFacts,
    options: TrainOptions,
    values: Tensor | None = None,
) -> Objective:
    """Of log-probabilities and entropies [T] of the trained model, and of the values [T] of its value head, if it has one.
    Raises ValueError where the options ask for what the micro-batch lacks."""
    weights = batch.weights
    log_ratios = losses.log_ratios(logprobs, batch.old_logprobs, weights)
    steps = options.coefficient_steps
    kl_coefficient = losses.coefficient(options.kl_coefficient, options.kl_coefficient_end, steps, facts.step)
    entropy_coefficient = losses.coefficient(options.entropy_coefficient, options.entropy_coefficient_end, steps, facts.step)
    parts, in_reward = {}, None
    if kl_coefficient:
        estimator = options.kl_estimator or ("k1" if options.kl_place == "reward" else "k3")
        divergences = losses.divergence(logprobs, _reference(batch, kl_coefficient), estimator)
        if options.kl_place == "reward":
            in_reward = divergences
        else:
            parts["kl"] = kl_coefficient * weighted_sum(divergences, weights, facts.denominator)
    if entropy_coefficient:
        bonus = losses.entropy_bonus(entropies)
        parts["entropy"] = entropy_coefficient * weighted_sum(bonus, weights, facts.denominator)

    advantages, value = _advantages(batch, in_reward, kl_coefficient, values, options)
    policy = _policy_loss(batch, logprobs, log_ratios, advantages, options)
    masked = _masked(batch, log_ratios.detach(), options)
    unmasked = torch.where(masked, torch.zeros_like(policy.values), policy.values)
    parts["policy"] = weighted_sum(unmasked, weights, facts.denominator)
    if options.loss == "dppo_tv":
        penalty = weighted_sum(losses.ratio_penalty(log_ratios), weights, facts.denominator)
        parts["ratio_penalty"] = loss_setting(options, "ratio_penalty") * penalty
    if value is not None:
        error = weighted_sum(gae.value_loss(*value), weights, facts.denominator)
        parts["value"] = options.value_coefficient * error
    changing = {}
    if options.kl_coefficient_end is not None:
        changing["kl_coefficient"] = kl_coefficient
    if options.entropy_coefficient_end is not None:
        changing["entropy_coefficient"] = entropy_coefficient
    return Objective(parts, policy.clipped, masked, on_samples=options.loss != "sft", coefficients=changing, value=value)


def _advantages(
    batch: Batch, divergences: Tensor | None, coefficient: float, values: Tensor | None, options: TrainOptions
) -> tuple[Tensor, Value | None]:
    """Those of the step file, less the divergences [T] that are in the reward; of a value head, for which the step file has
    rewards in their place: those of GAE."""
    weights, sequences = batch.weights, batch.sequence_numbers
    if values is None:
        if divergences is None:
            return batch.advantages, None
        return losses.less_divergence(batch.advantages, divergences, weights, sequences, coefficient=coefficient), None
    rewards = gae.final_rewards(batch.advantages, weights, sequences)
    if divergences is not None:
        rewards = rewards - coefficient * divergences
    advantages = gae.gae(rewards, values, weights, sequences, gamma=options.gae_gamma, decay=options.gae_lambda)
    return advantages, Value(values, advantages + values.detach())


def _policy_loss(batch: Batch, logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, options: TrainOptions) -> PolicyLoss:
    if options.loss == "sft":
        return losses.sft(logprobs)
    if options.loss == "reinforce":
        return losses.reinforce(logprobs, log_ratios, advantages, truncate=loss_setting(options, "truncate"))
    low, high = loss_setting(options, "clip_low"), loss_setting(options, "clip_high")
    if options.loss == "ppo":
        return losses.ppo(log_ratios, advantages, clip_low=low, clip_high=high)
    if options.loss == "cispo":
        return losses.cispo(logprobs, log_ratios, advantages, clip_low=low, clip_high=high)
    if options.loss == "gspo":
        return losses.gspo(log_ratios, advantages, batch.weights, batch.sequence_numbers, clip_low=low, clip_high=high)
    if options.loss == "dppo_tv":
        return losses.dppo_tv(logprobs, batch.old_logprobs, log_ratios, advantages, clip_low=low, clip_high=high)
    return losses.decoupled_ppo(
        logprobs,
        batch.old_logprobs,
        _proximal(batch, logprobs, log_ratios, options),
        advantages,
        batch.weights,
        clip_low=low,
        clip_high=high,
        truncate=loss_setting(options, "truncate"),
    )


def _proximal(batch: Batch, logprobs: Tensor, log_ratios: Tensor, options: TrainOptions) -> Tensor:
    if options.proximal != "previous":
        return losses.interpolated_proximal(logprobs, log_ratios, batch.lags)
    return logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs


def _masked(batch: Batch, log_ratios: Tensor, options: TrainOptions) -> Tensor:
    tokens = losses.outside_tokens(log_ratios, low=options.token_mask_low, high=options.token_mask_high)
    if options.sequence_mask_low is None and options.sequence_mask_high is None:
        return tokens
    sequences = losses.outside_sequences(
        log_ratios,
        batch.weights,
        batch.sequence_numbers,
        low=options.sequence_mask_low,
        high=options.sequence_mask_high,
    )
    return tokens | sequences


def _reference(batch: Batch, kl_coefficient: float) -> Tensor:
    if batch.reference_logprobs is None:
        raise ValueError(
            f"train.kl_coefficient: the divergence weighs {kl_coefficient:g} in this step, but the step file carries no "
            f"log-probs of a reference, and there is none to compute them; set train.reference: initial"
        )
    return batch.reference_logprobs
