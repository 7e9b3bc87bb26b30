"""The learning rate, against values worked out by hand."""

import math

import pytest

from prl.trainer.options import TrainOptions
from prl.trainer.schedule import learning_rate


def rates(steps, **options):
    return [learning_rate(TrainOptions(learning_rate=0.4, **options), step) for step in steps]


def test_the_rate_rises_over_the_warm_up_and_stays():
    assert rates([1, 2, 3, 4, 5, 1000], warmup_steps=4) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert rates([1, 2], warmup_steps=0) == [0.4, 0.4]


def test_a_line_falls_to_the_floor_and_stays_there():
    found = rates([2, 3, 6, 10, 11], warmup_steps=2, schedule="linear", schedule_steps=10, min_learning_rate=0.08)
    assert found == pytest.approx([0.4, 0.36, 0.24, 0.08, 0.08])


def test_a_cosine_falls_to_the_floor_and_stays_there():
    found = rates([2, 4, 6, 10, 99], warmup_steps=2, schedule="cosine", schedule_steps=10, min_learning_rate=0.1)
    assert found == pytest.approx([0.4, 0.1 + 0.3 * (1 + math.sqrt(0.5)) / 2, 0.25, 0.1, 0.1])


def test_a_fall_that_ends_within_the_warm_up_starts_at_the_floor():
    assert rates([4, 5], warmup_steps=4, schedule="linear", schedule_steps=3) == pytest.approx([0.4, 0.0])
