"""What losses have to do with each other, with micro-batches, precision and masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_rows import BASE, CASES, DENOMINATOR, OPTIONS, Tokens, batch_of, computed, some_tokens
from written_loss import slope

from prl.streams.records import MicroBatch, StepFacts
from prl.trainer.batch import to_device
from prl.trainer.objective import objective
from prl.trainer.options import TrainOptions


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_half_as_many_digits_change_little(options):
    """Trainers compute in float32."""
    options = TrainOptions(**options)
    for name, tokens in CASES.items():
        full, gradient, _, of_values = computed(tokens, options)
        half, rough, _, of_rough = computed(tokens, options, torch.float32)
        assert float(half.loss.detach()) == pytest.approx(float(full.loss.detach()), rel=1e-4, abs=1e-5), name
        np.testing.assert_allclose(rough, gradient, rtol=1e-4, atol=1e-5 + 1e-6 * np.abs(gradient).max(), err_msg=name)
        np.testing.assert_allclose(of_rough, of_values, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_micro_batches_add_up(options):
    """Loss and gradient of whole sequences, however they are dealt to micro-batches."""
    options = TrainOptions(**options)
    whole, gradient, _, of_values = computed(BASE, options)
    ends = np.cumsum(BASE.lengths)
    parts, gradients, to_values = [], [], []
    for first, last in ((0, 1), (1, 3), (3, 4)):
        rows = slice(ends[first] - BASE.lengths[first], ends[last - 1])
        arrays = {name: values[rows] for name, values in vars(BASE).items() if name != "lengths"}
        found, of_part, _, values_of_part = computed(Tokens(**arrays, lengths=BASE.lengths[first:last]), options)
        parts.append({name: float(value.detach()) for name, value in found.parts.items()})
        gradients.append(of_part)
        to_values.append(values_of_part)
    for name, value in whole.parts.items():
        assert sum(part[name] for part in parts) == pytest.approx(float(value.detach()), rel=1e-12, abs=1e-15)
    np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(np.concatenate(to_values), of_values, rtol=1e-10, atol=1e-15)


def test_a_sequence_ratio_of_equal_tokens_has_the_gradient_of_the_sequences_own():
    """GSPO's equation 5: -s A clipped, s = exp(mean of log rho), each sequence weighing 1."""
    lengths = (4, 2, 5)
    sequence = np.repeat(np.arange(3), lengths)
    advantages = np.array([1.5, -0.7, 0.3])
    tokens = replace(some_tokens(5, lengths), advantages=advantages[sequence], weights=1 / np.array(lengths, float)[sequence])

    def loss(pi):
        means = [(pi - tokens.old_logprobs)[sequence == s].mean() for s in range(3)]
        return -sum(min(np.exp(m) * a, np.clip(np.exp(m), 0.8, 1.3) * a) for m, a in zip(means, advantages, strict=True))

    found, gradient, *_ = computed(tokens, TrainOptions(loss="gspo", clip_low=0.2, clip_high=0.3))
    assert float(found.loss.detach()) * DENOMINATOR == pytest.approx(loss(tokens.logprobs))
    np.testing.assert_allclose(gradient * DENOMINATOR, slope(loss, tokens.logprobs), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((name, side) for name in ("token_mask", "sequence_mask", "both_masks") for side in ("above", "below")),
        ("decoupled_ppo_previous_truncated", "above"),
    ],
)
def test_masks_that_leave_out_every_token_leave_no_loss_and_no_gradient(name, side):
    far = {"above": {"old_logprobs": np.full(14, -np.inf)}, "below": {"logprobs": np.full(14, -5000.0)}}
    for tokens in (CASES[f"{side} every mask"], replace(BASE, **far[side])):
        for dtype in (torch.float64, torch.float32):
            found, gradient, *_ = computed(tokens, TrainOptions(**OPTIONS[name]), dtype)
            assert found.masked.numpy()[tokens.weights > 0].all()
            assert float(found.loss.detach()) == 0
            assert np.array_equal(gradient, np.zeros(14))


def test_at_lag_one_the_interpolated_proximal_policy_is_the_samplers():
    tokens = replace(BASE, lags=np.ones(14))
    decoupled, gradient, *_ = computed(tokens, TrainOptions(loss="decoupled_ppo"))
    plain, expected, *_ = computed(tokens, TrainOptions(loss="ppo"))
    assert float(decoupled.loss.detach()) == pytest.approx(float(plain.loss.detach()))
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)


def test_with_the_trainers_own_as_proximal_policy_the_gradient_is_that_of_truncated_reinforce():
    """As in a run's first step, when none before it is known."""
    first = replace(BASE, proximal_logprobs=None)
    _, gradient, *_ = computed(first, TrainOptions(loss="decoupled_ppo", proximal="previous", truncate=1.2))
    _, expected, *_ = computed(BASE, TrainOptions(loss="reinforce", truncate=1.2))
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)


def test_a_divergence_without_reference_is_refused():
    batch = replace(batch_of(BASE, torch.float64), reference_logprobs=None)
    values = torch.tensor(BASE.logprobs)
    with pytest.raises(ValueError, match=r"train\.kl_coefficient: the divergence weighs 0\.1 in this step"):
        objective(batch, values, values, StepFacts(1, 1.0, 1, 1, 1), TrainOptions(kl_coefficient=0.1))


def test_tokens_know_their_sequence():
    lengths = [3, 1, 4]
    boundaries = np.cumsum([0, *lengths]).astype(np.int32)
    values = np.zeros(8, np.float32)
    packed = MicroBatch(
        tokens=np.arange(8, dtype=np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        boundaries=boundaries,
        loss_weights=np.array([0, 0, 1, 0, 0, 1, 1, 1], np.float32),
        advantages=values,
        old_logprobs=values,
        reference_logprobs=None,
        lags=np.zeros(8, np.int32),
        rollouts=(),
    )
    batch = to_device(packed, 3)  # padded to 9 tokens by a sequence of its own
    assert batch.sequence_numbers.count == 4
    assert batch.sequence_numbers.of_token.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3]
    trained = batch.weights > 0
    assert batch.targets[trained].tolist() == [2, 5, 6, 7]
    assert batch.sequence_numbers.of_token[trained].tolist() == [0, 2, 2, 2]
