"""From groups of rollouts to the micro-batches of one step: a pure function of the groups, the step and the options.

A rollout becomes one or more sequences: a turn whose prompt continues the sequence so far (prompts and outputs of the turns
before) extends it, any other turn begins a new one. Sampled tokens train, the rest is context. All tokens of a rollout carry
its advantage; every sampled token carries its log-prob and the lag of its version for the step it is trained in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from prl.flow.ids import RolloutId
from prl.flow.packing import pack
from prl.flow.versions import Version, is_ancestor, lag
from prl.preprocess.advantages import ADVANTAGES
from prl.preprocess.options import PreprocessOptions
from prl.streams.records import Float32, Group, Int32, MicroBatch, Rollout, StepFacts, VersionSpan

TOO_OLD = "too old"
ABANDONED = "sampled by an abandoned version"
EQUAL = "all rewards equal"
CUT = "cut at the token limit"
OVERLONG = "longer than a micro-batch"
EMPTY = "nothing to train on"


@dataclass(frozen=True, slots=True)
class Moment:
    """When a step is trained: what decides on the age of its tokens."""

    step: int
    lineage: int
    forks: Mapping[int, int]  # lineage -> the step at which it left the one before
    max_lag: int


@dataclass(slots=True)
class TokenSequence:
    """Tokens that are trained as one sequence: pieces of context and of output in turn, context first."""

    pieces: list[Int32]
    logprobs: list[Float32]  # of each output piece
    spans: list[VersionSpan]  # of all output pieces
    tokens: int
    outputs: int

    @property
    def trained(self) -> int:
        """Tokens that train: the outputs, but for a first token, which follows nothing."""
        return self.outputs - (len(self.pieces[0]) == 0)

    def continued_by(self, prompt: Int32) -> bool:
        """Whether a prompt begins with all of this sequence."""
        return 0 < self.tokens <= len(prompt) and bool(np.array_equal(prompt[: self.tokens], np.concatenate(self.pieces)))


@dataclass(slots=True)
class Sample:
    """A rollout that trains."""

    rollout: RolloutId
    advantage: float
    sequences: list[TokenSequence]


@dataclass(slots=True)
class Prepared:
    """A group ready for a step. `samples` is empty where all its rollouts are discarded."""

    group: Group
    samples: list[Sample]
    discarded: list[tuple[RolloutId, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    facts: StepFacts
    microbatches: list[MicroBatch]
    metrics: dict[str, float]


def versions_of(group: Group) -> frozenset[Version]:
    """The versions that sampled the tokens of a group."""
    return frozenset(s.version for r in group.rollouts for t in r.turns for s in t.versions if s.end > s.start)


def refusal(versions: frozenset[Version], moment: Moment) -> str | None:
    """Why a group sampled by these versions cannot be trained at that moment, or None. Raises ValueError for a version that
    does not exist yet."""
    for version in versions:
        if not is_ancestor(version, moment.lineage, moment.forks):
            return ABANDONED
        age = lag(moment.step, version)
        if age < 0:
            raise ValueError(f"rollouts of version {version} for step {moment.step}: that version is made by a later step")
        if age > moment.max_lag:
            return TOO_OLD
    return None


def prepare(group: Group, options: PreprocessOptions) -> Prepared:
    """Advantages, sequences, and the rollouts that do not train. Advantages are of all the group's rollouts: one that is left
    out has still been sampled, and belongs to the baseline."""
    ids = group.rollout_ids()
    rewards = np.array([r.reward for r in group.rollouts])
    if options.drop_equal_groups and bool((rewards == rewards[0]).all()):
        return Prepared(group, [], [(i, EQUAL) for i in ids])
    prepared = Prepared(group, [])
    for rollout, rollout_id, advantage in zip(
        group.rollouts, ids, ADVANTAGES[options.advantage](rewards).tolist(), strict=True
    ):
        sequences = to_sequences(rollout)
        reason = _left_out(rollout, sequences, options)
        if reason is None:
            prepared.samples.append(Sample(rollout_id, advantage, sequences))
        else:
            prepared.discarded.append((rollout_id, reason))
    return prepared


def _left_out(rollout: Rollout, sequences: list[TokenSequence], options: PreprocessOptions) -> str | None:
    if options.mask_cut and _is_cut(rollout):
        return CUT
    if not sequences:
        return EMPTY
    if max(s.tokens for s in sequences) > options.pack_tokens:
        return OVERLONG
    return None


def _is_cut(rollout: Rollout) -> bool:
    return any(t.finish_reason == "length" for t in rollout.turns)


def to_sequences(rollout: Rollout) -> list[TokenSequence]:
    """The sequences of a rollout that have something to train on."""
    sequences: list[TokenSequence] = []
    for turn in rollout.turns:
        prompt, output = turn.prompt_ids, turn.output_ids
        if sequences and sequences[-1].continued_by(prompt):
            last = sequences[-1]
            last.pieces += [prompt[last.tokens :], output]
            last.logprobs.append(turn.logprobs)
            last.spans += turn.versions
            last.tokens = len(prompt) + len(output)
            last.outputs += len(output)
        else:
            sequences.append(
                TokenSequence([prompt, output], [turn.logprobs], list(turn.versions), len(prompt) + len(output), len(output))
            )
    return [s for s in sequences if s.trained > 0]


def build_step(groups: Sequence[Prepared], moment: Moment, options: PreprocessOptions, data_parallel_size: int) -> Step:
    """Pack the samples of the groups (at least one sample in all) into micro-batches for so many data-parallel ranks."""
    samples = [s for g in groups for s in g.samples]
    sequences = [(sample, sequence) for sample in samples for sequence in sample.sequences]
    lengths = [sequence.tokens for _, sequence in sequences]
    bins = pack(lengths, options.pack_tokens, data_parallel_size)
    microbatches = [_microbatch([sequences[i] for i in members], moment) for members in bins]
    if options.token_weight == "sample":
        _weigh_by_sample(samples, microbatches)
    weights = np.concatenate([m.loss_weights for m in microbatches], dtype=np.float64)
    lags = np.concatenate([m.lags for m in microbatches])
    facts = StepFacts(
        step=moment.step,
        denominator=float(weights.sum()),
        trained_tokens=int((weights > 0).sum()),
        samples=len(samples),
        microbatches=len(microbatches),
    )
    metrics = {**_metrics([g.group for g in groups]), **_lag_metrics(lags)}
    metrics["rollouts"] = float(len(samples))
    metrics["pack_waste"] = 1.0 - sum(lengths) / (len(bins) * options.pack_tokens)
    return Step(facts, microbatches, metrics)


def _microbatch(members: Sequence[tuple[Sample, TokenSequence]], moment: Moment) -> MicroBatch:
    """Concatenate sequences; every trained token weighs 1."""
    sequences = [sequence for _, sequence in members]
    pieces = list(chain.from_iterable(s.pieces for s in sequences))
    lengths = np.array([s.tokens for s in sequences], np.int32)
    boundaries = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    total = int(boundaries[-1])

    sampled = np.repeat(np.arange(len(pieces)) % 2 == 1, np.fromiter(map(len, pieces), np.int64, len(pieces)))
    trained = sampled.copy()
    trained[boundaries[:-1]] = False  # the first token of a sequence follows nothing
    old_logprobs = np.zeros(total, np.float32)
    old_logprobs[sampled] = np.concatenate([p for s in sequences for p in s.logprobs])
    spans = [span for s in sequences for span in s.spans]
    span_lags = np.fromiter((lag(moment.step, span.version) for span in spans), np.int32, len(spans))
    span_lengths = np.fromiter((span.end - span.start for span in spans), np.int64, len(spans))
    lags = np.full(total, -1, np.int32)
    lags[sampled] = np.repeat(span_lags, span_lengths)
    lags[~trained] = -1
    advantages = np.repeat(np.array([sample.advantage for sample, _ in members], np.float32), lengths)
    return MicroBatch(
        tokens=np.concatenate(pieces, dtype=np.int32),
        positions=np.arange(total, dtype=np.int32) - np.repeat(boundaries[:-1], lengths),
        boundaries=boundaries,
        loss_weights=trained.astype(np.float32),
        advantages=np.where(trained, advantages, np.float32(0)),
        old_logprobs=np.where(trained, old_logprobs, np.float32(0)),
        reference_logprobs=None,
        lags=lags,
        rollouts=tuple(sample.rollout for sample, _ in members),
    )


def _weigh_by_sample(samples: Sequence[Sample], microbatches: Sequence[MicroBatch]) -> None:
    """Every sample weighs 1 in all, shared evenly by its trained tokens, also where they lie in several sequences."""
    counts = {s.rollout: sum(q.trained for q in s.sequences) for s in samples}
    for microbatch in microbatches:
        shares = np.array([1.0 / counts[i] for i in microbatch.rollouts], np.float32)
        microbatch.loss_weights[:] *= np.repeat(shares, np.diff(microbatch.boundaries))


def _metrics(groups: Sequence[Group]) -> dict[str, float]:
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = np.array([r.reward for r in rollouts])
    equal = [len({r.reward for r in g.rollouts}) == 1 for g in groups]
    mixed = [len({s.version for t in r.turns for s in t.versions if s.end > s.start}) > 1 for r in rollouts]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "groups_all_equal": float(np.mean(equal)),
        "output_tokens_mean": sum(len(t.output_ids) for r in rollouts for t in r.turns) / len(rollouts),
        "cut_share": float(np.mean([_is_cut(r) for r in rollouts])),
        "mixed_version_share": float(np.mean(mixed)),
    }


def _lag_metrics(lags: npt.NDArray[np.int32]) -> dict[str, float]:
    trained = lags[lags >= 0]
    return {"lag_mean": float(trained.mean()), "lag_max": float(trained.max())}
