"""Data that the trainer's workers and the tests of their results make alike."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from prl.streams.records import MicroBatch, StepFacts

VOCABULARY = 51  # odd: tensor parallelism of 2 must pad it
BASE = {  # config.json of tiny models, but for their family
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
PER_TOKEN = (
    "tokens",
    "positions",
    "loss_weights",
    "advantages",
    "old_logprobs",
    "reference_logprobs",
    "lags",
    "routings",
)
RISING_KL = {"kl_coefficient": 0.1, "kl_coefficient_end": 20.1, "coefficient_steps": 4}  # 0.1, 5.1 and 10.1 in the first steps
LENGTHS = ((7, 12, 2), (5, 9, 3, 11), (12, 12))  # of the sequences in three micro-batches


def microbatches() -> list[MicroBatch]:
    """Random tokens, advantages and old log-probs; the first third of each sequence is its prompt."""
    random = np.random.default_rng(7)
    return [_microbatch(random, lengths) for lengths in LENGTHS]


def merged(batches: list[MicroBatch]) -> MicroBatch:
    """The same sequences as one micro-batch."""
    sizes = [len(batch.tokens) for batch in batches]
    starts = np.cumsum([0, *sizes[:-1]])
    boundaries = [batch.boundaries[:-1] + start for batch, start in zip(batches, starts, strict=True)]

    def join(name: str) -> np.ndarray | None:
        if getattr(batches[0], name) is None:
            return None
        return np.concatenate([getattr(batch, name) for batch in batches])

    return MicroBatch(
        tokens=join("tokens"),
        positions=join("positions"),
        boundaries=np.append(np.concatenate(boundaries), sum(sizes)).astype(np.int32),
        loss_weights=join("loss_weights"),
        advantages=join("advantages"),
        old_logprobs=join("old_logprobs"),
        reference_logprobs=join("reference_logprobs"),
        lags=join("lags"),
        rollouts=(),
        routings=join("routings"),
    )


def alone(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The same sequences, each as a micro-batch of its own."""

    def part(batch: MicroBatch, start: int, end: int) -> MicroBatch:
        rows = {name: getattr(batch, name) for name in PER_TOKEN}
        cut = {name: values if values is None else values[start:end] for name, values in rows.items()}
        return replace(batch, boundaries=np.array([0, end - start], np.int32), **cut)

    return [part(batch, start, end) for batch in batches for start, end in pairwise(batch.boundaries.tolist())]


def rewarded() -> list[MicroBatch]:
    """The same with the sequences' rewards in the place of advantages: 1 and 0 in turn."""
    found = []
    for batch in microbatches():
        lengths = np.diff(batch.boundaries)
        found.append(replace(batch, advantages=np.repeat(np.arange(len(lengths)) % 2, lengths).astype(np.float32)))
    return found


def without_reference(batch: MicroBatch) -> MicroBatch:
    """The micro-batch as a step file gives it that carries no log-probs of a reference."""
    return replace(batch, reference_logprobs=None)


def facts(step: int, count: int = len(LENGTHS)) -> StepFacts:
    weights = np.concatenate([batch.loss_weights for batch in microbatches()])
    return StepFacts(step, float(weights.sum()), int((weights > 0).sum()), sum(map(len, LENGTHS)), count)


def _microbatch(random: np.random.Generator, lengths: tuple[int, ...]) -> MicroBatch:
    tokens = sum(lengths)
    weights = np.concatenate([np.where(np.arange(n) < max(1, n // 3), 0.0, 1.0 / n) for n in lengths])

    def around(value: float, spread: float) -> np.ndarray:
        return random.normal(value, spread, tokens).astype(np.float32)

    return MicroBatch(
        tokens=random.integers(0, VOCABULARY, tokens).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        boundaries=np.cumsum([0, *lengths]).astype(np.int32),
        loss_weights=weights.astype(np.float32),
        advantages=around(0.0, 1.0),
        old_logprobs=around(-4.0, 0.3),
        reference_logprobs=around(-4.0, 0.3),
        lags=np.where(weights > 0, random.integers(0, 5, tokens), -1).astype(np.int32),
        rollouts=(),
    )
