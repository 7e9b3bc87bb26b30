"""From groups of rollouts to the micro-batches of one step: a pure function of the groups, the step and the options.

A rollout becomes one or more sequences: a turn whose prompt continues the sequence so far (prompts and outputs of the turns
before) extends it, any other turn begins a new one. Sampled tokens train, the rest is context. The tokens of a turn carry its
advantage; every sampled token carries its log-prob and the lag of its version for the step it is trained in.

`prepare` does what a group alone decides, as it comes in; `build_step` what the step decides.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from prl.flow.ids import RolloutId
from prl.flow.packing import deal, pack
from prl.flow.versions import Version, is_ancestor, lag
from prl.preprocess.advantages import GroupRewards, step_advantages
from prl.preprocess.options import PreprocessOptions
from prl.streams.records import Float32, Group, Int16, Int32, MicroBatch, Rollout, StepFacts, Turn

Array = npt.NDArray[Any]
Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Steps = TypeVar("Steps", int, Int64)

TOO_OLD = "too old"
ABANDONED = "sampled by an abandoned version"
EQUAL = "all rewards equal"
CUT = "cut at the token limit"
OVERLONG = "longer than a micro-batch"
EMPTY = "nothing to train on"
DROPPED = {
    TOO_OLD: "too_old",
    ABANDONED: "abandoned",
    EQUAL: "all_equal",
    CUT: "cut",
    OVERLONG: "overlong",
    EMPTY: "empty",
}
"""Why rollouts do not train, and what that is called among the metrics."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a step is trained: what decides on the age of its tokens."""

    step: int
    lineage: int
    forks: Mapping[int, int]  # lineage -> the step at which it left the one before
    max_lag: int


class Span(NamedTuple):
    """Tokens of a sequence that are treated alike."""

    tokens: int
    version_step: int  # of the version that sampled them; -1: context, which does not train
    turn: int


@dataclass(slots=True)
class TokenSequence:
    """Tokens that are trained as one sequence."""

    pieces: list[Int32]
    logprobs: list[Float32 | None]  # of each piece; None: context
    spans: list[Span]
    tokens: int
    outputs: int  # tokens that train
    routings: tuple[tuple[int, Int16], ...] = ()  # of so many tokens, from a place in the sequence on

    def continued_by(self, prompt: Int32) -> bool:
        """Whether a prompt begins with all of this sequence."""
        if self.tokens > len(prompt):
            return False
        end = 0
        for piece in self.pieces:
            start, end = end, end + len(piece)
            if not np.array_equal(prompt[start:end], piece):
                return False
        return True

    def add(self, context: Int32, turn: Turn, number: int, skipped: int) -> None:
        """Append context and a turn's output without its first `skipped` tokens, which the context contains."""
        output = turn.output_ids[skipped:]
        self.pieces += [context, output]
        self.logprobs += [None, turn.logprobs[skipped:]]
        self.spans.append(Span(len(context), -1, number))
        for span in turn.versions:
            length = span.end - max(span.start, skipped)
            if length > 0:
                self.spans.append(Span(length, span.version.step, number))
        if turn.routings is not None:
            start = max(self.tokens - 1, 0)  # the last token of the turn before went to experts in this one
            self.routings = (*self.routings, (start, turn.routings[start:]))
        self.tokens += len(context) + len(output)
        self.outputs += len(output)


class Sample(NamedTuple):
    """A rollout that trains."""

    place: int  # in its group
    rollout: RolloutId
    sequences: list[TokenSequence]


@dataclass(frozen=True, slots=True)
class Columns:
    """The spans of all sequences of a group's samples, one after another: what a step decides, it decides for all at once."""

    samples: Int64  # [sequences], which sample each belongs to
    lengths: Int64  # [sequences], in tokens
    counts: Int64  # [sequences], of spans
    tokens: Int64  # [spans]; this and the next two as in Span
    version_steps: Int64  # [spans]
    turns: Int64  # [spans]
    places: Int64  # [spans], of its rollout in the group


@dataclass(slots=True)
class Prepared:
    """A group as it came. Baselines and metrics are of all its rollouts: one that is left out has still been sampled."""

    ids: list[RolloutId]
    rewards: GroupRewards
    versions: frozenset[Version]  # that sampled its tokens
    samples: list[Sample]  # none: all its rollouts are discarded
    discarded: list[tuple[RolloutId, str]]
    columns: Columns = field(init=False)  # of the samples
    output_tokens: int = 0
    cut: int = 0  # rollouts
    mixed: int = 0  # rollouts sampled by more than one version

    @property
    def newest(self) -> int:
        """The step of the newest version that sampled a token which trains."""
        return int(self.columns.version_steps.max())


@dataclass(frozen=True, slots=True)
class Step:
    """A step's micro-batches, and how every rollout of its groups ends."""

    facts: StepFacts
    microbatches: list[MicroBatch]
    trained: list[RolloutId]
    discarded: list[tuple[RolloutId, str]]
    metrics: dict[str, float]


def refusal(versions: frozenset[Version], newest: int, moment: Moment, too_old: str) -> str | None:
    """Why a group sampled by these versions (`newest`: see Prepared) cannot be trained at that moment, or None. Raises
    ValueError for a version that does not exist yet."""
    for version in versions:
        if not is_ancestor(version, moment.lineage, moment.forks):
            return ABANDONED
        if lag(moment.step, version) < 0:
            raise ValueError(f"rollouts of version {version} for step {moment.step}: that version is made by a later step")
    return TOO_OLD if is_too_old(versions, newest, moment, too_old) else None


def is_too_old(versions: frozenset[Version], newest: int, moment: Moment, too_old: str) -> bool:
    """Whether the lag limit alone forbids to train a group: by its oldest token, or by its newest where old ones are masked."""
    if too_old == "train":
        return False
    deciding = newest if too_old == "mask" else min((version.step for version in versions), default=newest)
    return _age(moment, deciding) > moment.max_lag


def drop_metrics(dropped: Counter[str]) -> dict[str, float]:
    """dropped_* of so many rollouts by their reasons."""
    return {f"dropped_{name}": float(dropped[reason]) for reason, name in DROPPED.items()}


def _age(moment: Moment, version_step: Steps) -> Steps:
    """`lag` of a version by its step alone."""
    return moment.step - 1 - version_step


# One group


def prepare(group: Group, options: PreprocessOptions) -> Prepared:
    """Sequences, and the rollouts that never train."""
    rollouts = group.rollouts
    prepared = Prepared(
        ids=group.rollout_ids(),
        rewards=GroupRewards(np.array([r.reward for r in rollouts], np.float64), np.array([len(r.turns) for r in rollouts])),
        versions=frozenset(),
        samples=[],
        discarded=[],
    )
    rewards = prepared.rewards.rewards
    equal = options.drop_equal_groups and bool((rewards == rewards[0]).all())
    group_versions: set[Version] = set()
    for place, (rollout, rollout_id) in enumerate(zip(rollouts, prepared.ids, strict=True)):
        versions = {span.version for turn in rollout.turns for span in turn.versions if span.end > span.start}
        group_versions |= versions
        cut = any(turn.finish_reason == "length" for turn in rollout.turns)
        prepared.output_tokens += sum(len(turn.output_ids) for turn in rollout.turns)
        prepared.cut += cut
        prepared.mixed += len(versions) > 1
        sequences = [] if equal else to_sequences(rollout)
        if equal:
            prepared.discarded.append((rollout_id, EQUAL))
        elif cut and options.mask_cut:
            prepared.discarded.append((rollout_id, CUT))
        elif not sequences:
            prepared.discarded.append((rollout_id, EMPTY))
        elif max(s.tokens for s in sequences) > options.pack_tokens:
            prepared.discarded.append((rollout_id, OVERLONG))
        else:
            prepared.samples.append(Sample(place, rollout_id, sequences))
    prepared.versions = frozenset(group_versions)
    prepared.columns = _to_columns(prepared.samples)
    return prepared


def _to_columns(samples: Sequence[Sample]) -> Columns:
    sequences = [sequence for sample in samples for sequence in sample.sequences]
    per_sample = np.array([len(sample.sequences) for sample in samples], np.int64)
    owners = np.repeat(np.arange(len(samples)), per_sample)
    counts = np.array([len(sequence.spans) for sequence in sequences], np.int64)
    spans = np.array([span for sequence in sequences for span in sequence.spans], np.int64).reshape(-1, len(Span._fields))
    places = np.array([sample.place for sample in samples], np.int64)[owners]
    lengths = np.array([sequence.tokens for sequence in sequences], np.int64)
    return Columns(owners, lengths, counts, spans[:, 0], spans[:, 1], spans[:, 2], np.repeat(places, counts))


def to_sequences(rollout: Rollout) -> list[TokenSequence]:
    """The sequences of a rollout that have something to train on. A first token follows nothing: it is context."""
    sequences: list[TokenSequence] = []
    for number, turn in enumerate(rollout.turns):
        prompt = turn.prompt_ids
        if sequences and sequences[-1].continued_by(prompt):
            sequences[-1].add(prompt[sequences[-1].tokens :], turn, number, 0)
        elif len(prompt) + len(turn.output_ids) > 0:
            sequence = TokenSequence([], [], [], 0, 0)
            if len(prompt) > 0:
                sequence.add(prompt, turn, number, 0)
            else:
                sequence.add(turn.output_ids[:1], turn, number, 1)
            sequences.append(sequence)
    return [s for s in sequences if s.outputs > 0]


# One step


@dataclass(frozen=True, slots=True)
class _Sequences:
    """All sequences of a step's groups, and what their spans are trained with."""

    sequences: list[TokenSequence]
    rollouts: list[RolloutId]  # of each sequence
    samples: Int64  # [sequences], which of the step's samples each belongs to
    lengths: Int64  # [sequences], in tokens
    counts: Int64  # [sequences], of spans
    tokens: Int64  # [spans]
    ages: Int64  # [spans], in optimizer steps
    sampled: Bool  # [spans], False: context
    trains: Bool  # [spans]
    advantages: Float32  # [spans]

    def per_sequence(self, of_spans: Array) -> Int64:
        """Sums over the spans of each sequence."""
        return np.add.reduceat(of_spans, np.cumsum(self.counts) - self.counts, dtype=np.int64)


def build_step(groups: Sequence[Prepared], moment: Moment, options: PreprocessOptions, data_parallel_size: int) -> Step:
    """Pack the samples of the groups into micro-batches for so many data-parallel ranks. At least one token has to train."""
    samples = [sample for group in groups for sample in group.samples]
    sequences = _in_step(groups, samples, moment, options)
    trained_tokens = sequences.per_sequence(sequences.tokens * sequences.trains)
    of_samples = np.bincount(sequences.samples, trained_tokens, len(samples))
    trained = [sample.rollout for sample, tokens in zip(samples, of_samples, strict=True) if tokens]
    discarded = [end for group in groups for end in group.discarded]
    discarded += [(sample.rollout, TOO_OLD) for sample, tokens in zip(samples, of_samples, strict=True) if not tokens]
    weights = sequences.trains.astype(np.float32)
    if options.token_weight == "sample":  # a rollout weighs 1 in all, shared by its trained tokens wherever they lie
        shares = 1.0 / np.maximum(of_samples, 1.0)
        weights *= np.repeat(shares[sequences.samples], sequences.counts).astype(np.float32)
    kept = np.flatnonzero(trained_tokens)
    bins = [kept[members] for members in pack(sequences.lengths[kept], options.pack_tokens, data_parallel_size)]
    microbatches = [_microbatch(sequences, weights, members) for members in bins]
    facts = StepFacts(
        step=moment.step,
        denominator=_denominator(microbatches, len(trained) + len(discarded), options),
        trained_tokens=int(trained_tokens.sum()),
        samples=len(trained),
        microbatches=len(microbatches),
    )
    loads = [int(sequences.lengths[members].sum()) for members in bins]
    ranks = [sum(loads[b] for b in dealt) for dealt in deal(loads, data_parallel_size)]
    metrics = {
        **_group_metrics(groups),
        **_lag_metrics(sequences, trained_tokens, moment),
        "rollouts": float(len(trained)),
        "pack_waste": 1.0 - sum(loads) / (len(bins) * options.pack_tokens),
        "rank_tokens_max_over_mean": max(ranks) * len(ranks) / sum(ranks),
    }
    return Step(facts, microbatches, trained, discarded, metrics)


def _denominator(microbatches: Sequence[MicroBatch], rollouts: int, options: PreprocessOptions) -> float:
    """What the step's loss is divided by. A fixed one counts rollouts that are left out: they were sampled, too."""
    if options.denominator_tokens is not None:
        return float(rollouts * options.denominator_tokens)
    return float(sum(m.loss_weights.sum(dtype=np.float64) for m in microbatches))


def _in_step(groups: Sequence[Prepared], samples: Sequence[Sample], moment: Moment, options: PreprocessOptions) -> _Sequences:
    columns = [group.columns for group in groups]
    of_groups = step_advantages([g.rewards for g in groups], options.advantage, options.baseline)
    advantages = [of_group[c.places, c.turns] for c, of_group in zip(columns, of_groups, strict=True)]
    before = np.cumsum([0, *(len(group.samples) for group in groups)])
    version_steps = np.concatenate([c.version_steps for c in columns])
    ages = _age(moment, version_steps)
    sampled = version_steps >= 0
    return _Sequences(
        sequences=[sequence for sample in samples for sequence in sample.sequences],
        rollouts=[sample.rollout for sample in samples for _ in sample.sequences],
        samples=np.concatenate([c.samples + start for c, start in zip(columns, before[:-1], strict=True)]),
        lengths=np.concatenate([c.lengths for c in columns]),
        counts=np.concatenate([c.counts for c in columns]),
        tokens=np.concatenate([c.tokens for c in columns]),
        ages=ages,
        sampled=sampled,
        trains=sampled & (ages <= moment.max_lag) if options.too_old == "mask" else sampled,
        advantages=np.concatenate(advantages, dtype=np.float32),
    )


def _microbatch(step: _Sequences, weights: Float32, members: Int64) -> MicroBatch:
    """Concatenate sequences."""
    numbers = members.tolist()
    parts = [step.sequences[n] for n in numbers]
    lengths, counts = step.lengths[members], step.counts[members]
    boundaries = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(lengths, out=boundaries[1:])
    total = int(boundaries[-1])
    first_spans = (np.cumsum(step.counts) - step.counts)[members]
    spans = np.repeat(first_spans - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    tokens, trains = step.tokens[spans], step.trains[spans]
    old_logprobs = np.zeros(total, np.float32)
    end = 0
    for part in parts:
        for piece, logprobs in zip(part.pieces, part.logprobs, strict=True):
            start, end = end, end + len(piece)
            if logprobs is not None:
                old_logprobs[start:end] = logprobs
    return MicroBatch(
        tokens=np.concatenate([piece for part in parts for piece in part.pieces], dtype=np.int32),
        positions=np.arange(total, dtype=np.int32) - np.repeat(boundaries[:-1], lengths),
        boundaries=boundaries,
        loss_weights=np.repeat(weights[spans], tokens),
        advantages=np.repeat(step.advantages[spans] * trains, tokens),
        old_logprobs=old_logprobs,
        reference_logprobs=None,
        lags=np.repeat(np.where(trains, step.ages[spans], -1).astype(np.int32), tokens),
        rollouts=tuple(step.rollouts[n] for n in numbers),
        routings=_routings(parts, boundaries),
    )


def _routings(parts: Sequence[TokenSequence], boundaries: Int32) -> Int16 | None:
    """The experts of all tokens of a micro-batch, where those of some are known."""
    known = [
        (start + at, found) for start, part in zip(boundaries.tolist(), parts, strict=False) for at, found in part.routings
    ]
    if not known:
        return None
    routings = np.full((boundaries[-1], *known[0][1].shape[1:]), -1, np.int16)
    for at, found in known:
        routings[at : at + len(found)] = found
    return routings


def _group_metrics(groups: Sequence[Prepared]) -> dict[str, float]:
    rewards = np.concatenate([g.rewards.rewards for g in groups])
    equal = [bool((g.rewards.rewards == g.rewards.rewards[0]).all()) for g in groups]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "groups_all_equal": float(np.mean(equal)),
        "output_tokens_mean": sum(g.output_tokens for g in groups) / len(rewards),
        "cut_share": sum(g.cut for g in groups) / len(rewards),
        "mixed_version_share": sum(g.mixed for g in groups) / len(rewards),
    }


def _lag_metrics(step: _Sequences, trained_tokens: Int64, moment: Moment) -> dict[str, float]:
    """`too_old_tokens`: over the limit, trained or masked."""
    ages, tokens = step.ages, step.tokens
    of_trained = np.repeat(trained_tokens > 0, step.counts)
    too_old = of_trained & step.sampled & (ages > moment.max_lag)
    return {
        "lag_mean": float((ages * tokens)[step.trains].sum() / tokens[step.trains].sum()),
        "lag_max": float(ages[step.trains].max()),
        "too_old_tokens": float(tokens[too_old].sum()),
    }
