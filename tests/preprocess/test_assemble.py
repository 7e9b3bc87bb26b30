"""Groups to micro-batches, against arrays written out by hand."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings
from preprocess_data import group, ids, turn

from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.preprocess.assemble import (
    ABANDONED,
    CUT,
    EMPTY,
    EQUAL,
    OVERLONG,
    TOO_OLD,
    Moment,
    build_step,
    prepare,
    refusal,
    to_sequences,
)
from prl.preprocess.options import PreprocessOptions
from prl.streams.records import MicroBatch, Rollout

MOMENT = Moment(step=5, lineage=0, forks={}, max_lag=4)
OPTIONS = PreprocessOptions(advantage="leave_one_out", pack_tokens=32)


def test_two_rollouts_by_hand():
    made = group(([turn([1, 2], [11, 12, 13], ((2, 1), (4, None)))], 1.0), ([turn([1, 2], [14])], 0.0))
    step = build_step([prepare(made, OPTIONS)], MOMENT, OPTIONS, 1)
    (microbatch,) = step.microbatches
    expected = {
        "tokens": [1, 2, 11, 12, 13, 1, 2, 14],
        "positions": [0, 1, 2, 3, 4, 0, 1, 2],
        "boundaries": [0, 5, 8],
        "loss_weights": [0, 0, 1, 1, 1, 0, 0, 1],
        "advantages": [0, 0, 1, 1, 1, 0, 0, -1],
        "old_logprobs": [0, 0, -1.1, -1.2, -1.3, 0, 0, -1.4],
        "lags": [-1, -1, 2, 0, 0, -1, -1, 1],  # step 5: version 2 is 2 steps old, version 4 none, version 3 one
    }
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(microbatch, name), values, rtol=1e-6, err_msg=name)
    for name in ("tokens", "positions", "boundaries", "lags"):
        assert getattr(microbatch, name).dtype == np.int32
    for name in ("loss_weights", "advantages", "old_logprobs"):
        assert getattr(microbatch, name).dtype == np.float32
    assert microbatch.reference_logprobs is None
    assert microbatch.rollouts == tuple(ids(0, 0, 1))
    facts = step.facts
    assert (facts.step, facts.denominator, facts.trained_tokens, facts.samples, facts.microbatches) == (5, 4.0, 4, 2, 1)
    assert step.metrics == pytest.approx(
        {
            "reward_mean": 0.5,
            "reward_std": 0.5,
            "groups_all_equal": 0.0,
            "output_tokens_mean": 2.0,
            "cut_share": 0.0,
            "mixed_version_share": 0.5,
            "lag_mean": 0.75,
            "lag_max": 2.0,
            "too_old_tokens": 0.0,
            "rollouts": 2.0,
            "pack_waste": 1 - 8 / 32,
            "rank_tokens_max_over_mean": 1.0,
        }
    )


def test_sample_weights_make_every_rollout_count_the_same():
    options = replace(OPTIONS, token_weight="sample")
    made = group(([turn([1], [11, 12, 13, 14]), turn([9], [15])], 1.0), ([turn([1], [16, 17])], 0.0))
    step = build_step([prepare(made, options)], MOMENT, options, 1)
    totals: dict[int, float] = {}
    for microbatch in step.microbatches:
        for s, rollout in enumerate(microbatch.rollouts):
            part = microbatch.loss_weights[microbatch.boundaries[s] : microbatch.boundaries[s + 1]]
            totals[rollout.rollout] = totals.get(rollout.rollout, 0) + float(part.sum())
            assert set(part[part > 0].tolist()) == {np.float32(0.2) if rollout.rollout == 0 else np.float32(0.5)}
    assert totals == pytest.approx({0: 1.0, 1: 1.0})
    assert step.facts.denominator == pytest.approx(2.0)
    assert step.facts.samples == 2
    assert step.facts.trained_tokens == 7


def test_a_fixed_denominator_counts_every_rollout_of_the_groups():
    options = replace(OPTIONS, denominator_tokens=50, mask_cut=True)
    made = group(([turn([1], [11, 12])], 1.0), ([turn([1], [13])], 0.0), ([turn([1], [14, 15], finish="length")], 0.0))
    step = build_step([prepare(made, options)], MOMENT, options, 1)
    assert (step.facts.denominator, step.facts.samples) == (150.0, 2)


def test_turns_that_continue_are_one_sequence():
    first = turn([1, 2], [11, 12], ((2, None),))
    second = turn([1, 2, 11, 12, 3], [13], ((4, None),))
    other = turn([1, 2, 99, 12, 3, 13], [14, 15], ((4, None),))  # a re-written history begins anew
    rollout = Rollout((first, second, other), 1.0)
    assert [s.tokens for s in to_sequences(rollout)] == [6, 8]
    prepared = prepare(group(([first, second, other], 1.0), ([turn([5], [16])], 0.0)), OPTIONS)
    (microbatch,) = build_step([prepared], MOMENT, OPTIONS, 1).microbatches
    # longest first: the re-written turn, the merged one, the other rollout
    assert microbatch.tokens.tolist() == [1, 2, 99, 12, 3, 13, 14, 15, 1, 2, 11, 12, 3, 13, 5, 16]
    assert microbatch.lags.tolist() == [-1] * 6 + [0, 0] + [-1, -1, 2, 2, -1, 0] + [-1, 1]
    assert microbatch.loss_weights.tolist() == [0] * 6 + [1, 1] + [0, 0, 1, 1, 0, 1] + [0, 1]
    assert microbatch.rollouts == tuple(ids(0, 0, 0, 1))


def test_the_first_token_of_a_sequence_never_trains():
    made = group(([turn([], [11, 12])], 1.0), ([turn([], [13])], 0.0), ([turn([1], [])], 0.0))
    prepared = prepare(made, OPTIONS)
    assert prepared.discarded == [(i, EMPTY) for i in ids(0, 1, 2)]
    (microbatch,) = build_step([prepared], MOMENT, OPTIONS, 1).microbatches
    for name, values in {"loss_weights": [0, 1], "lags": [-1, 1], "old_logprobs": [0, -1.2], "advantages": [0, 1]}.items():
        np.testing.assert_allclose(getattr(microbatch, name), values, err_msg=name)


def test_left_out_rollouts_still_belong_to_the_baseline():
    long = list(range(40))
    made = group(([turn([1], long)], 1.0), ([turn([1], [11], finish="length")], 0.0), ([turn([1], [12])], 0.5))
    prepared = prepare(made, OPTIONS)
    assert prepared.discarded == [(i, OVERLONG) for i in ids(0, 0)]
    step = build_step([prepared], MOMENT, OPTIONS, 1)
    assert step.discarded == prepared.discarded
    assert step.trained == ids(0, 1, 2)
    (microbatch,) = step.microbatches
    assert microbatch.rollouts == tuple(ids(0, 1, 2))
    assert microbatch.advantages.tolist() == [0, -0.75, 0, 0]
    prepared = prepare(made, replace(OPTIONS, mask_cut=True))
    assert prepared.discarded == [(ids(0, 0)[0], OVERLONG), (ids(0, 1)[0], CUT)]


def test_equal_groups_are_dropped_where_asked():
    made = group(([turn([1], [11])], 0.5), ([turn([1], [12])], 0.5))
    assert len(prepare(made, OPTIONS).samples) == 2
    assert prepare(made, replace(OPTIONS, drop_equal_groups=True)).discarded == [(i, EQUAL) for i in ids(0, 0, 1)]


@pytest.mark.parametrize(
    ("versions", "lineage", "forks", "reasons"),
    [
        ([(0, 0)], 0, {}, (TOO_OLD, TOO_OLD, None)),  # lag 5 - 1 - 0 = 4 > 3
        ([(0, 1)], 0, {}, (None, None, None)),
        ([(0, 1), (0, 0)], 0, {}, (TOO_OLD, None, None)),
        ([(0, 3), (1, 4)], 1, {1: 3}, (None, None, None)),  # an ancestor and its descendant
        ([(0, 4)], 1, {1: 3}, (ABANDONED, ABANDONED, ABANDONED)),  # made after the fork
        ([(1, 4)], 0, {}, (ABANDONED, ABANDONED, ABANDONED)),
    ],
)
def test_a_group_is_as_old_as_its_oldest_token_or_its_newest_where_the_old_are_masked(versions, lineage, forks, reasons):
    found = tuple(
        refusal(frozenset(Version(*v) for v in versions), max(v[1] for v in versions), Moment(5, lineage, forks, 3), too_old)
        for too_old in ("drop", "mask", "train")
    )
    assert found == reasons


def test_tokens_from_the_future_are_an_error():
    with pytest.raises(ValueError, match="version 0:5 for step 5"):
        refusal(frozenset([Version(0, 5)]), 5, MOMENT, "drop")


def test_versions_that_sampled_nothing_or_nothing_that_trains_do_not_count():
    made = prepare(group(([turn([1], [11], ((0, 0), (4, None)))], 1.0)), OPTIONS)
    assert (made.versions, made.newest) == ({Version(0, 4)}, 4)
    # the one token of version 4 is the first of its sequence
    made = prepare(group(([turn([], [11, 12], ((4, 1), (2, None)))], 1.0)), OPTIONS)
    assert (made.versions, made.newest) == ({Version(0, 4), Version(0, 2)}, 2)


TWO_AGES = [
    ([turn([1], [11, 12, 13], ((0, 2), (4, None)))], 1.0),  # at step 5 with a limit of 3: two tokens too old, one not
    ([turn([1], [14, 15], ((0, None),))], 0.0),  # all too old
    ([turn([1], [16], ((3, None),)), turn([9], [17], ((0, None),))], 0.0),  # the second sequence is too old
]


def test_tokens_that_are_too_old_are_masked():
    options = replace(OPTIONS, too_old="mask")
    step = build_step([prepare(group(*TWO_AGES), options)], Moment(5, 0, {}, 3), options, 1)
    assert step.discarded == [(i, TOO_OLD) for i in ids(0, 1)]
    assert step.trained == ids(0, 0, 2)
    (microbatch,) = step.microbatches
    assert microbatch.tokens.tolist() == [1, 11, 12, 13, 1, 16]
    assert microbatch.loss_weights.tolist() == [0, 0, 0, 1, 0, 1]
    assert microbatch.lags.tolist() == [-1, -1, -1, 0, -1, 1]
    assert microbatch.advantages.tolist() == [0, 0, 0, 1, 0, -0.5]  # of all three rewards
    assert (step.facts.denominator, step.facts.trained_tokens, step.facts.samples) == (2.0, 2, 2)
    assert (step.metrics["lag_max"], step.metrics["too_old_tokens"]) == (1.0, 2.0)
    options = replace(options, token_weight="sample")
    (microbatch,) = build_step([prepare(group(*TWO_AGES), options)], Moment(5, 0, {}, 3), options, 1).microbatches
    assert microbatch.loss_weights.tolist() == [0, 0, 0, 1, 0, 1]


def test_tokens_that_are_too_old_train_with_their_lag_where_asked():
    options = replace(OPTIONS, too_old="train")
    step = build_step([prepare(group(*TWO_AGES), options)], Moment(5, 0, {}, 3), options, 1)
    assert step.discarded == []
    assert step.facts.trained_tokens == 7
    (microbatch,) = step.microbatches
    assert microbatch.lags.tolist() == [-1, 4, 4, 0, -1, 4, 4, -1, 1, -1, 4]
    assert (step.metrics["lag_max"], step.metrics["too_old_tokens"]) == (4.0, 5.0)


def test_every_turn_carries_its_own_advantage():
    options = replace(OPTIONS, baseline="turn")
    made = group(
        ([turn([1], [11]), turn([1, 11, 2], [12, 13])], 4.0),
        ([turn([1], [14])], 1.0),
        ([turn([1], [15]), turn([8], [16])], 1.0),
    )
    (microbatch,) = build_step([prepare(made, options)], MOMENT, options, 1).microbatches
    # turn 0: 4 against (1 + 1) / 2, 1 against (4 + 1) / 2; turn 1: 4 against 1
    assert microbatch.tokens.tolist() == [1, 11, 2, 12, 13, 1, 14, 1, 15, 8, 16]
    assert microbatch.advantages.tolist() == [0, 3, 0, 3, 3, 0, -1.5, 0, -1.5, 0, -3]


def test_partial_groups_compare_the_rollouts_that_they_have():
    made = group(([turn([1], [11])], 1.0), ([turn([1], [12])], 0.0), numbers=(1, 6))
    step = build_step([prepare(made, OPTIONS)], MOMENT, OPTIONS, 1)
    assert step.trained == ids(0, 1, 6)
    assert step.microbatches[0].rollouts == tuple(ids(0, 1, 6))
    assert step.microbatches[0].advantages.tolist() == [0, 1, 0, -1]


@pytest.mark.parametrize("weight", ["token", "sample"])
def test_the_step_is_the_same_for_any_number_of_ranks(weight):
    """However it is packed, every token is there once with the same weight, advantage, log-prob and lag."""
    options = replace(OPTIONS, token_weight=weight)
    rng = np.random.default_rng(0)
    groups = []
    for number in range(4):
        rollouts = [
            ([turn(rng.integers(1, 9, 2), rng.integers(10, 99, rng.integers(1, 20)))], float(rng.random())) for _ in range(4)
        ]
        groups.append(prepare(group(*rollouts, number=number), options))

    def contents(microbatches: list[MicroBatch]) -> dict:
        found = {}
        for m in microbatches:
            for s, rollout in enumerate(m.rollouts):
                a, b = m.boundaries[s], m.boundaries[s + 1]
                arrays = (m.tokens, m.positions, m.loss_weights, m.advantages, m.old_logprobs, m.lags)
                found[rollout] = tuple(tuple(x[a:b].tolist()) for x in arrays)
        return found

    one = build_step(groups, MOMENT, options, 1)
    for ranks in (2, 3, 4):
        other = build_step(groups, MOMENT, options, ranks)
        assert len(other.microbatches) % ranks == 0
        assert contents(other.microbatches) == contents(one.microbatches)
        assert other.facts.denominator == pytest.approx(one.facts.denominator)
        assert (other.facts.samples, other.facts.trained_tokens) == (one.facts.samples, one.facts.trained_tokens)
    assert len(contents(one.microbatches)) == 16
    few = build_step(groups[:1], MOMENT, options, 8)  # more ranks than sequences: some idle
    assert len(few.microbatches) == 4


@st.composite
def random_groups(draw) -> list:
    """Groups of rollouts of one to three turns, some of which continue what was before, with different ids and log-probs."""
    counter = iter(range(10, 10_000))

    def some(most: int) -> list[int]:
        return [next(counter) for _ in range(draw(st.integers(0, most)))]

    made = []
    for number in range(draw(st.integers(1, 3))):
        rollouts = []
        numbers = draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))
        for _ in numbers:
            turns, history = [], []
            for _ in range(draw(st.integers(1, 3))):
                prompt = history + some(2) if draw(st.booleans()) else some(3)
                output = some(4)
                cut = draw(st.integers(0, len(output)))
                turns.append(turn(prompt, output, ((draw(st.integers(0, 4)), cut), (draw(st.integers(0, 4)), None))))
                history = prompt + output
            rollouts.append((turns, draw(st.sampled_from([0.0, 0.25, 1.0]))))
        made.append(group(*rollouts, number=number, numbers=sorted(numbers)))
    return made


def slowly(rollout: Rollout, options: PreprocessOptions) -> list[list[tuple]]:
    """The sequences of a rollout, token by token: (token, log-prob, lag), the latter two None where it does not train."""
    sequences: list[list[tuple]] = []
    for number, t in enumerate(rollout.turns):
        prompt = t.prompt_ids.tolist()
        if not (sequences and sequences[-1] and prompt[: len(sequences[-1])] == [token for token, *_ in sequences[-1]]):
            sequences.append([])
        sequence = sequences[-1]
        sequence += [(token, None, None, None) for token in prompt[len(sequence) :]]
        for span in t.versions:
            for k in range(span.start, span.end):
                lag = MOMENT.step - 1 - span.version.step
                trains = len(sequence) > 0 and not (options.too_old == "mask" and lag > 2)
                known = (float(t.logprobs[k]), lag, number) if trains else (None, None, None)
                sequence.append((int(t.output_ids[k]), *known))
    return [s for s in sequences if any(lag is not None for _, _, lag, _ in s)]


@settings(max_examples=300, deadline=None)
@given(random_groups(), st.sampled_from(["mask", "train"]), st.sampled_from(["token", "sample"]), st.sampled_from([1, 2, 3]))
def test_every_token_keeps_what_belongs_to_it(groups, too_old, token_weight, ranks):
    options = replace(OPTIONS, baseline="turn", too_old=too_old, token_weight=token_weight)
    expected = {}
    for made in groups:
        for rollout_id, rollout in zip(made.rollout_ids(), made.rollouts, strict=True):
            expected[rollout_id] = slowly(rollout, options)
    trained = {i for i, sequences in expected.items() if sequences}
    assume(trained)
    step = build_step([prepare(g, options) for g in groups], replace(MOMENT, max_lag=2), options, ranks)
    assert sorted(step.trained) == sorted(trained)
    assert sorted(i for i, _ in step.discarded) == sorted(expected.keys() - trained)
    total = 0.0
    for m in step.microbatches:
        for rollout_id, a, b in zip(m.rollouts, m.boundaries, m.boundaries[1:], strict=False):
            found = m.tokens[a:b].tolist()
            (sequence,) = [s for s in expected[rollout_id] if [token for token, *_ in s] == found]
            expected[rollout_id].remove(sequence)
            parts = (m.positions, m.old_logprobs, m.lags, m.loss_weights, m.advantages)
            rows = zip(*(part[a:b].tolist() for part in parts), strict=True)
            all_trained = sum(
                1 for s in slowly(rollout_of(groups, rollout_id), options) for _, _, lag, _ in s if lag is not None
            )
            for place, ((_, logprob, age, number), row) in enumerate(zip(sequence, rows, strict=True)):
                assert row[0] == place
                if age is None:
                    assert row[2:] == (-1, 0.0, 0.0)
                    continue
                assert row[1:3] == (logprob, age)
                assert row[3] == pytest.approx(1.0 if token_weight == "token" else 1.0 / all_trained)
                assert row[4] == pytest.approx(advantage_of(groups, rollout_id, number))
            total += m.loss_weights[a:b].sum(dtype=np.float64)
    assert not any(expected.values())
    assert step.facts.denominator == pytest.approx(total)
    if token_weight == "sample":
        assert total == pytest.approx(len(trained))


def rollout_of(groups, rollout_id: RolloutId) -> Rollout:
    made = groups[rollout_id.group]
    return made.rollouts[made.rollout_numbers().index(rollout_id.rollout)]


def advantage_of(groups, rollout_id: RolloutId, number: int) -> float:
    """Leave-one-out over the rollouts that have this turn."""
    own = rollout_of(groups, rollout_id)
    others = [r.reward for r in groups[rollout_id.group].rollouts if len(r.turns) > number and r is not own]
    return own.reward - sum(others) / len(others) if others else 0.0
