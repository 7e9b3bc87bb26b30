"""What a step says about itself, against NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from prl.streams.records import MicroBatch, StepFacts
from prl.trainer.batch import to_device
from prl.trainer.measures import Measures
from prl.trainer.objective import objective
from prl.trainer.options import TrainOptions

LENGTHS = (4, 3)
WEIGHTS = np.array([0, 1, 1, 0.5, 0, 1, 1], np.float32)
LAGS = np.array([-1, 0, 3, 3, -1, 70, 1], np.int32)
PI = np.array([-9.0, -1.0, -0.5, -2.0, -9.0, -1.5, -0.2])
REFERENCE = np.array([0.0, -1.5, -0.5, -1.0, 0.0, -1.0, -0.3], np.float32)
ENTROPIES = np.array([9.0, 1.0, 2.0, 3.0, 9.0, 4.0, 5.0])
TRAINED = WEIGHTS > 0


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def measured(group, options, old_logprobs, reference=REFERENCE, values=None):
    """Of two micro-batches, a sequence each; the reward of each is 1."""
    measures = Measures()
    for start, end in ((0, 4), (4, 7)):
        rows = slice(start, end)
        batch = to_device(
            MicroBatch(
                tokens=np.zeros(end - start, np.int32),
                positions=np.arange(end - start, dtype=np.int32),
                boundaries=np.array([0, end - start], np.int32),
                loss_weights=WEIGHTS[rows],
                advantages=np.ones(end - start, np.float32),
                old_logprobs=old_logprobs[rows].astype(np.float32),
                reference_logprobs=None if reference is None else reference[rows],
                lags=LAGS[rows],
                rollouts=(),
            ),
            1,
        )
        # Entry t of what the model gives is of token t + 1.
        logprobs, entropies = (torch.tensor(np.append(x[rows][1:], 0.0), dtype=torch.float32) for x in (PI, ENTROPIES))
        of_head = None if values is None else torch.tensor(np.append(values[rows][1:], 0.0), dtype=torch.float32)
        found = objective(batch, logprobs, entropies, StepFacts(1, 5.0, 5, 2, 2), options, of_head)
        measures.add(batch, found, logprobs, entropies)
    return measures.reduce(group)


def test_measures_of_a_step(alone):
    old = PI + np.array([0, 0.5, -0.4, 0.0, 0, 0.1, -1.0])
    options = TrainOptions(loss="reinforce", truncate=1.2, token_mask_high=2.0, entropy_coefficient=0.1, kl_coefficient=0.2)
    options = replace(options, entropy_coefficient_end=0.0, coefficient_steps=10)
    found = measured(alone, options, old)
    ratios = np.exp(PI - old)[TRAINED]  # 0.61, 1.49, 1, 0.90, 2.72
    x = (REFERENCE - PI)[TRAINED]
    weights, pi = WEIGHTS[TRAINED], PI[TRAINED]
    policy = -(weights * pi * np.minimum(ratios, 1.2) * (ratios <= 2)).sum() / 5
    kl = np.exp(x) - x - 1
    expected = {
        "loss_policy": policy,
        "loss_entropy": -0.1 * (weights * ENTROPIES[TRAINED]).sum() / 5,
        "loss_kl": 0.2 * (weights * kl).sum() / 5,
        "entropy_coefficient": 0.1,  # it is the first step
        "tokens": 5,
        "entropy": 3.0,
        "ess": ratios.sum() ** 2 / (5 * (ratios**2).sum()),
        "ratio_mean": ratios.mean(),
        "ratio_max": ratios.max(),
        "clip_fraction": 0.4,
        "mask_fraction": 0.2,
        "mismatch_mean_nats": 0.4,
        "mismatch_max_nats": 1.0,
        "mismatch_k3_nats": (ratios - np.log(ratios) - 1).mean(),
        "kl": kl.mean(),
        "lag_mean": 77 / 5,
        "lag_max": 70,
        "lag_0": 1,
        "lag_1": 1,
        "lag_3": 2,
        "lag_63": 1,  # and above
    }
    expected["loss"] = sum(expected[f"loss_{part}"] for part in ("policy", "entropy", "kl"))
    assert found == pytest.approx({f"train/{name}": value for name, value in expected.items()}, rel=1e-5)


def test_measures_of_a_value_head(alone):
    # Returns with gamma 0.5, lambda 1: 0.25, 0.5, 1 in the first sequence, 0.5, 1 in the second: mean 0.65, variance 0.09.
    # Less the values: 0.05, 0, 0.2, -0.1, 0.1: mean 0.05, variance 0.0125 - 0.0025 = 0.01.
    values = np.array([9, 0.2, 0.5, 0.8, 9, 0.6, 0.9])
    options = TrainOptions(value_head=True, gae_gamma=0.5, value_coefficient=2.0)
    found = measured(alone, options, PI, values=values)
    assert found["train/value_mean"] == pytest.approx(0.6)
    assert found["train/explained_variance"] == pytest.approx(1 - 0.01 / 0.09)
    # 2 / 2 (0.05^2 + 0.5 * 0.2^2 + 0.1^2 + 0.1^2) / 5 with the weights 1, 1, 0.5, 1, 1
    assert found["train/loss_value"] == pytest.approx(0.0425 / 5)
    # At a ratio of 1 PPO's loss is the mean of -A, A = 0.05, 0, 0.2, -0.1, 0.1.
    assert found["train/loss_policy"] == pytest.approx(-(0.05 + 0.5 * 0.2 - 0.1 + 0.1) / 5)
    assert found["train/loss"] == pytest.approx(found["train/loss_policy"] + found["train/loss_value"])
    equal = measured(alone, TrainOptions(value_head=True), PI, values=values)
    assert equal["train/explained_variance"] == 0  # there is nothing to explain


def test_one_infinite_ratio_leaves_everything_finite(alone):
    old = np.where(np.arange(7) == 2, -np.inf, PI)
    found = measured(alone, TrainOptions(), old)
    assert np.isfinite(list(found.values())).all()
    assert found["train/ess"] == pytest.approx(1 / 5)
    assert found["train/mismatch_max_nats"] == 300
    assert found["train/clip_fraction"] == pytest.approx(1 / 5)


def test_tokens_that_masks_leave_out_are_counted_even_if_they_are_all(alone):
    old = PI + np.array([0, 0.5, -0.4, 0.0, 0, 0.1, -1.0])
    found = measured(alone, TrainOptions(token_mask_high=0.1), old)
    assert found["train/mask_fraction"] == 1
    assert found["train/loss"] == found["train/loss_policy"] == 0
    same = measured(alone, TrainOptions(), old)
    assert same.pop("train/mask_fraction") == 0
    assert {key: found[key] for key in same if "loss" not in key} == {key: x for key, x in same.items() if "loss" not in key}


def test_given_answers_have_no_ratios(alone):
    found = measured(alone, TrainOptions(loss="sft"), np.zeros(7), reference=None)
    assert found.keys() == {"train/loss", "train/loss_policy", "train/tokens", "train/entropy"}
    assert found["train/loss"] == pytest.approx(-(WEIGHTS * PI)[TRAINED].sum() / 5)
