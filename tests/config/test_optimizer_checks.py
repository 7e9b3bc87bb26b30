"""Options of the schedule and of checkpoints that do not go together."""

import pytest

from prl.config.load import replace
from prl.config.optimizer_checks import optimizer_problems, optimizer_warnings
from prl.config.schema import Config


def problems(steps=100, gpus=0, **options):
    return list(optimizer_problems(replace(Config(), run={"steps": steps}, cluster={"gpus_per_node": gpus}, train=options)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule_steps": 9}, "train.schedule_steps = 9: has no effect with train.schedule = constant"),
        ({"min_learning_rate": 1e-9}, "train.min_learning_rate = 1e-09: has no effect with train.schedule = constant"),
        ({"schedule": "linear", "warmup_steps": 100}, "run.steps = 100: the learning rate falls after train.warmup_steps"),
        ({"schedule": "cosine", "schedule_steps": 5, "warmup_steps": 5}, "train.schedule_steps = 5: the learning rate falls"),
        ({"schedule": "cosine", "min_learning_rate": 1e-3}, "train.min_learning_rate = 0.001: is above train.learning_rate"),
        (
            {"schedule": "linear", "schedule_steps": 99},
            "train.schedule_steps = 99: from there on the learning rate is",
        ),
        ({"checkpoint_keep_every_steps": 10}, "train.checkpoint_keep_every_steps = 10: all checkpoints are kept"),
        (
            {"checkpoint_every_steps": 3, "checkpoint_keep_every_steps": 5, "checkpoint_keep_last": 1},
            "train.checkpoint_keep_every_steps = 5: is no multiple of train.checkpoint_every_steps = 3",
        ),
    ],
)
def test_what_does_not_go_together_is_told(options, words):
    found = problems(**options)
    assert len(found) == 1
    assert found[0].startswith(words)


def test_the_optimizer_goes_to_the_host_from_accelerators_in_one_form():
    options = {"optimizer_offload": True, "distributed_optimizer": True, "dtype": "bfloat16"}
    assert problems(gpus=8, **options) == []
    (words,) = problems(**options)
    assert words.startswith("train.optimizer_offload = true: without accelerators")
    for other in ({"distributed_optimizer": False}, {"dtype": "float32"}):
        (words,) = problems(gpus=8, **options | other)
        assert "train.distributed_optimizer: true and train.dtype: bfloat16" in words


def test_what_goes_together_is_taken():
    assert problems() == []
    assert problems(schedule="cosine", min_learning_rate=1e-7, warmup_steps=10) == []
    assert problems(schedule="cosine", schedule_steps=100) == problems(schedule="cosine", schedule_steps=101) == []
    assert problems(schedule="cosine", schedule_steps=9, min_learning_rate=1e-7) == []
    assert problems(checkpoint_keep_last=2, checkpoint_keep_every_steps=10) == []


def test_a_warm_up_that_the_run_does_not_reach_the_end_of_is_said():
    def warnings(**options):
        return list(optimizer_warnings(replace(Config(), run={"steps": 100}, train=options)))

    assert warnings(warmup_steps=100) == []
    (line,) = warnings(warmup_steps=101)
    assert line.startswith("train.warmup_steps = 101: is more than run.steps = 100")
