"""From groups of rollouts to the micro-batches of one step: a pure function of the groups, the step and the options.

A rollout becomes one or more sequences: a turn whose prompt continues the sequence so far (prompts and outputs of the turns
before) extends it, any other turn begins a new one. Sampled tokens train, the rest is context. The tokens of a turn carry its
advantage; every sampled token carries its log-prob and the lag of its version for the step it is trained in.

`prepare` does what a group alone decides, as it comes in; `build_step` what the step decides.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prl.flow.ids import RolloutId
from prl.flow.packing import deal, pack
from prl.flow.versions import Version, is_ancestor, lag
from prl.preprocess.advantages import GroupRewards, step_advantages
from prl.preprocess.options import PreprocessOptions
from prl.streams.records import Float32, Group, Int32, MicroBatch, Rollout, StepFacts, Turn

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
        self.tokens += len(context) + len(output)
        self.outputs += len(output)


class Sample(NamedTuple):
    """A rollout that trains."""

    place: int  # in its group
    rollout: RolloutId
    sequences: list[TokenSequence]


@dataclass(slots=True)
class Prepared:
    """A group as it came. Baselines and metrics are of all its rollouts: one that is left out has still been sampled."""

    ids: list[RolloutId]
    rewards: GroupRewards
    versions: frozenset[Version]  # that sampled its tokens
    samples: list[Sample]  # none: all its rollouts are discarded
    discarded: list[tuple[RolloutId, str]]
    output_tokens: int = 0
    cut: int = 0  # rollouts
    mixed: int = 0  # rollouts sampled by more than one version

    @property
    def newest(self) -> int:
        """The step of the newest version that sampled a token which trains."""
        return max(span.version_step for sample in self.samples for sequence in sample.sequences for span in sequence.spans)


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
    if too_old == "train":
        return None
    deciding = newest if too_old == "mask" else min((version.step for version in versions), default=newest)
    return TOO_OLD if _age(moment, deciding) > moment.max_lag else None


def _age(moment: Moment, version_step: int) -> int:
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
    return prepared


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


@dataclass(slots=True)
class _Sequence:
    """A sequence in its step: values of each of its spans."""

    rollout: RolloutId
    tokens: TokenSequence
    lags: list[int]  # -1 where nothing trains
    weights: list[float]
    advantages: list[float]
    trained: int  # tokens


def build_step(groups: Sequence[Prepared], moment: Moment, options: PreprocessOptions, data_parallel_size: int) -> Step:
    """Pack the samples of the groups into micro-batches for so many data-parallel ranks. At least one token has to train."""
    advantages = step_advantages([g.rewards for g in groups], options.advantage, options.baseline)
    limit = moment.max_lag if options.too_old == "mask" else None
    sequences: list[_Sequence] = []
    trained: list[RolloutId] = []
    discarded = [end for group in groups for end in group.discarded]
    for group, of_group in zip(groups, advantages, strict=True):
        for place, rollout, parts in group.samples:
            found = _in_step(rollout, parts, of_group[place].tolist(), moment, limit)
            if not found:
                discarded.append((rollout, TOO_OLD))
                continue
            if options.token_weight == "sample":
                _weigh_by_sample(found)
            sequences += found
            trained.append(rollout)
    lengths = [s.tokens.tokens for s in sequences]
    bins = pack(lengths, options.pack_tokens, data_parallel_size)
    microbatches = [_microbatch([sequences[i] for i in members]) for members in bins]
    facts = StepFacts(
        step=moment.step,
        denominator=_denominator(microbatches, len(trained) + len(discarded), options),
        trained_tokens=sum(s.trained for s in sequences),
        samples=len(trained),
        microbatches=len(microbatches),
    )
    loads = [sum(lengths[i] for i in members) for members in bins]
    ranks = [sum(loads[b] for b in dealt) for dealt in deal(loads, data_parallel_size)]
    metrics = {
        **_group_metrics(groups),
        **_lag_metrics(sequences, moment),
        "rollouts": float(len(trained)),
        "pack_waste": 1.0 - sum(lengths) / (len(bins) * options.pack_tokens),
        "rank_tokens_max_over_mean": max(ranks) * len(ranks) / sum(ranks),
    }
    return Step(facts, microbatches, trained, discarded, metrics)


def _denominator(microbatches: Sequence[MicroBatch], rollouts: int, options: PreprocessOptions) -> float:
    """What the step's loss is divided by. A fixed one counts rollouts that are left out: they were sampled, too."""
    if options.denominator_tokens is not None:
        return float(rollouts * options.denominator_tokens)
    return float(sum(m.loss_weights.sum(dtype=np.float64) for m in microbatches))


def _in_step(
    rollout: RolloutId, parts: Sequence[TokenSequence], advantages: Sequence[float], moment: Moment, limit: int | None
) -> list[_Sequence]:
    """The sequences of a rollout of which something trains; tokens with a lag above `limit` do not."""
    found = []
    for part in parts:
        sequence = _Sequence(rollout, part, [], [], [], 0)
        for tokens, version_step, turn in part.spans:
            age = _age(moment, version_step)
            if version_step < 0 or (limit is not None and age > limit):
                sequence.lags.append(-1)
                sequence.weights.append(0.0)
                sequence.advantages.append(0.0)
            else:
                sequence.lags.append(age)
                sequence.weights.append(1.0)
                sequence.advantages.append(advantages[turn])
                sequence.trained += tokens
        if sequence.trained:
            found.append(sequence)
    return found


def _weigh_by_sample(sequences: Sequence[_Sequence]) -> None:
    """A rollout weighs 1 in all, shared evenly by its trained tokens, also where they lie in several sequences."""
    share = 1.0 / sum(s.trained for s in sequences)
    for sequence in sequences:
        sequence.weights = [weight * share for weight in sequence.weights]


def _microbatch(members: Sequence[_Sequence]) -> MicroBatch:
    """Concatenate sequences."""
    parts = [m.tokens for m in members]
    boundaries = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([p.tokens for p in parts], out=boundaries[1:])
    total = int(boundaries[-1])
    spans = np.array([span.tokens for p in parts for span in p.spans])
    lags = np.array([value for m in members for value in m.lags], np.int32)
    weights = np.array([value for m in members for value in m.weights], np.float32)
    advantages = np.array([value for m in members for value in m.advantages], np.float32)
    old_logprobs = np.zeros(total, np.float32)
    positions = np.empty(total, np.int32)
    counting = np.arange(max(p.tokens for p in parts), dtype=np.int32)
    end = 0
    for part in parts:
        positions[end : end + part.tokens] = counting[: part.tokens]
        for piece, logprobs in zip(part.pieces, part.logprobs, strict=True):
            start, end = end, end + len(piece)
            if logprobs is not None:
                old_logprobs[start:end] = logprobs
    return MicroBatch(
        tokens=np.concatenate([piece for p in parts for piece in p.pieces], dtype=np.int32),
        positions=positions,
        boundaries=boundaries,
        loss_weights=np.repeat(weights, spans),
        advantages=np.repeat(advantages, spans),
        old_logprobs=old_logprobs,
        reference_logprobs=None,
        lags=np.repeat(lags, spans),
        rollouts=tuple(m.rollout for m in members),
    )


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


def _lag_metrics(sequences: Sequence[_Sequence], moment: Moment) -> dict[str, float]:
    """`too_old_tokens`: over the limit, trained or masked."""
    trained: Counter[int] = Counter()
    sampled: Counter[int] = Counter()
    for sequence in sequences:
        for span, age in zip(sequence.tokens.spans, sequence.lags, strict=True):
            trained[age] += span.tokens
            sampled[_age(moment, span.version_step)] += span.tokens * (span.version_step >= 0)
    del trained[-1]
    return {
        "lag_mean": sum(age * tokens for age, tokens in trained.items()) / trained.total(),
        "lag_max": float(max(trained)),
        "too_old_tokens": float(sum(tokens for age, tokens in sampled.items() if age > moment.max_lag)),
    }
