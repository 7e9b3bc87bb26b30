"""What the options choose to minimise, micro-batch by micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from prl.streams.records import StepFacts
from prl.trainer import losses
from prl.trainer.batch import Batch
from prl.trainer.options import TrainOptions


@dataclass(frozen=True)
class Objective:
    """A micro-batch's share of the step's loss."""

    parts: Mapping[str, Tensor]  # scalars, which add up to it
    clipped: Tensor  # [T] bool: tokens whose ratio the loss has limited; also any without weight

    @property
    def loss(self) -> Tensor:
        first, *others = self.parts.values()
        return sum(others, start=first)


def objective(batch: Batch, logprobs: Tensor, entropies: Tensor, facts: StepFacts, options: TrainOptions) -> Objective:
    """Of log-probabilities and entropies [T] of the trained model. Raises ValueError where the options ask for what the
    micro-batch lacks."""
    denominator = facts.denominator
    ratios = losses.importance_ratios(logprobs, batch.old_logprobs, batch.weights)
    parts = {}
    if options.loss == "ppo":
        parts["policy"] = losses.ppo_loss(
            ratios, batch.advantages, batch.weights, denominator, clip_low=options.clip_low, clip_high=options.clip_high
        )
        up, down = batch.advantages > 0, batch.advantages < 0
        clipped = (up & (ratios > 1 + options.clip_high)) | (down & (ratios < 1 - options.clip_low))
    else:
        parts["policy"] = losses.reinforce_loss(
            logprobs, ratios, batch.advantages, batch.weights, denominator, truncate=options.truncate
        )
        clipped = ratios > options.truncate
    if options.entropy_coefficient:
        parts["entropy"] = losses.entropy_loss(entropies, batch.weights, denominator, coefficient=options.entropy_coefficient)
    if options.kl_coefficient:
        if batch.reference_logprobs is None:
            raise ValueError(
                f"train.kl_coefficient = {options.kl_coefficient}: the step file carries no log-probs of a reference, and "
                f"there is none to compute them; set train.reference: initial"
            )
        parts["kl"] = losses.kl_loss(
            logprobs, batch.reference_logprobs, batch.weights, denominator, coefficient=options.kl_coefficient
        )
    return Objective(parts, clipped)
