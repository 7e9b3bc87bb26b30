"""What crosses processes: rollouts on their way to the preprocessor, micro-batches on their way to the trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prl.flow.ids import RolloutId
from prl.flow.versions import Version

Int32 = npt.NDArray[np.int32]
Int16 = npt.NDArray[np.int16]
Float32 = npt.NDArray[np.float32]
NO_METRICS: Mapping[str, float] = {}


class VersionSpan(NamedTuple):
    """Output tokens [start, end) of a turn were sampled by `version`."""

    version: Version
    start: int
    end: int


class Turn(NamedTuple):
    """One request to a sampler and its answer. `logprobs` are the sampler's, of the sampled tokens, after temperature and
    top-p; `versions` cover all of `output_ids` without gaps."""

    prompt_ids: Int32  # [prompt tokens]
    output_ids: Int32  # [output tokens]
    logprobs: Float32  # [output tokens]
    versions: tuple[VersionSpan, ...]
    finish_reason: str  # "stop", "length" or "abort"
    replica: int
    started: float  # seconds since the epoch
    ended: float
    routings: Int16 | None = None  # [prompt + output tokens - 1, layers, experts a token], the experts that each token went to,
    # but for the last one, which went nowhere any more; -1: unknown; None: not recorded


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer to one problem, of one or more turns, with its reward."""

    turns: tuple[Turn, ...]
    reward: float
    metrics: Mapping[str, float] = field(default_factory=lambda: NO_METRICS)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one problem, as one lease handed them out. A partial group lacks some of them."""

    epoch: int
    domain: str
    dataset: str
    problem: str  # "<domain>/<index>"
    group: int
    issue: int
    rollouts: tuple[Rollout, ...]
    numbers: tuple[int, ...] = ()  # of `rollouts`, strictly rising; (): 0, 1, 2, ...

    def rollout_numbers(self) -> Sequence[int]:
        return self.numbers or range(len(self.rollouts))

    def rollout_ids(self) -> list[RolloutId]:
        return [RolloutId(self.epoch, self.problem, self.group, k, self.issue) for k in self.rollout_numbers()]

    def payload_bytes(self) -> int:
        """Of its token ids, log-probs and routings, which is nearly all of it."""
        total = 0
        for rollout in self.rollouts:
            for prompt_ids, output_ids, _, _, _, _, _, _, routings in rollout.turns:
                total += 4 * (len(prompt_ids) + 2 * len(output_ids))
                total += 0 if routings is None else routings.nbytes
        return total


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed one after another into T tokens. Every per-token array is aligned with the token itself: entry t
    speaks of predicting tokens[t] from what precedes it in its sequence, so prompts and first tokens have weight 0."""

    tokens: Int32  # [T]
    positions: Int32  # [T], from 0 in each sequence
    boundaries: Int32  # [S + 1], sequence s is [boundaries[s], boundaries[s + 1])
    loss_weights: Float32  # [T], before the division by the step's denominator
    advantages: Float32  # [T]; of preprocess.advantage: reward the rollout's reward
    old_logprobs: Float32  # [T], the sampler's
    reference_logprobs: Float32 | None  # [T]
    lags: Int32  # [T], -1 where nothing is trained
    rollouts: tuple[RolloutId, ...]  # [S]
    routings: Int16 | None = None  # [T, layers, experts a token], the experts that the sampler chose; -1: unknown


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What holds for a step as a whole, however its micro-batches are dealt to ranks."""

    step: int
    denominator: float  # the loss is sum(weight * token loss) / denominator: the sum of all loss weights, or a fixed one
    trained_tokens: int  # tokens with a weight above 0
    samples: int  # rollouts
    microbatches: int  # a multiple of the data-parallel size it was written for, unless there were too few sequences
