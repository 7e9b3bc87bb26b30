"""Options of the loss that contradict each other, or would have no effect."""

import pytest

from prl.config.load import replace
from prl.config.loss_checks import loss_problems, loss_warnings
from prl.config.schema import Config
from prl.trainer.options import LOSS_SETTINGS, TrainOptions, loss_setting

KL = {"kl_coefficient": 0.1, "reference": "initial"}


def problems(train, **sections):
    return list(loss_problems(replace(Config(), train=train, **sections)))


@pytest.mark.parametrize("loss", LOSS_SETTINGS)
def test_every_loss_runs_with_its_defaults_and_with_its_own_options(loss):
    assert problems({"loss": loss}) == []
    assert problems({"loss": loss, **LOSS_SETTINGS[loss]}) == []
    assert problems({"loss": "decoupled_ppo", "proximal": "previous"}) == []


def test_defaults_are_each_losses_own():
    assert loss_setting(TrainOptions(loss="gspo"), "clip_low") == 3e-4
    assert loss_setting(TrainOptions(loss="gspo", clip_low=0.0), "clip_low") == 0.0
    with pytest.raises(KeyError):
        loss_setting(TrainOptions(loss="ppo"), "truncate")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"truncate": 5.0}, "train.truncate = 5.0: train.loss = ppo does not use it, but reinforce, decoupled_ppo; set null"),
        ({"loss": "reinforce", "clip_low": 0.2}, "train.clip_low = 0.2: train.loss = reinforce does not use it"),
        ({"loss": "cispo", "ratio_penalty": 0.0}, "train.ratio_penalty = 0.0: train.loss = cispo does not use it, but dppo_tv"),
        ({"proximal": "previous"}, "train.proximal = previous: train.loss = ppo does not use it, but decoupled_ppo; set null"),
        ({"loss": "sft", "token_mask_low": 0.5}, "train.token_mask_low = 0.5: train.loss = sft has no ratios to mask by"),
        ({"loss": "sft", "kl_place": "reward", **KL}, "train.kl_place = reward: train.loss = sft uses no rewards"),
        ({"token_mask_low": 1.5}, "train.token_mask_low = 1.5: keeps out a ratio of 1"),
        ({"sequence_mask_low": 0.5, "sequence_mask_high": 0.9}, "train.sequence_mask_high = 0.9: keeps out a ratio of 1"),
        ({"token_mask_low": 2.0, "token_mask_high": 1.0}, "train.token_mask_low = 2.0: is above train.token_mask_high = 1.0"),
        ({"sequence_mask_low": 2.0, "sequence_mask_high": 1.0}, "train.sequence_mask_low = 2.0: is above"),
        ({"kl_coefficient": 0.1}, "train.kl_coefficient = 0.1: the KL term needs a reference; set train.reference: initial"),
        (
            {"kl_coefficient_end": 0.1, "coefficient_steps": 5},
            "train.kl_coefficient_end = 0.1: the KL term needs a reference; set train.reference: initial",
        ),
        ({"kl_estimator": "k2"}, "train.kl_estimator = k2: has no effect without a train.kl_coefficient"),
        ({"kl_place": "reward"}, "train.kl_place = reward: has no effect without a train.kl_coefficient"),
        ({"entropy_coefficient_end": 0.1}, "train.entropy_coefficient_end = 0.1: over how many steps?"),
        (
            {"entropy_coefficient_end": 0.0, "coefficient_steps": 5},
            "train.entropy_coefficient_end = 0.0: is what train.ent",
        ),
        (
            {**KL, "kl_coefficient_end": 0.1, "coefficient_steps": 5},
            "train.kl_coefficient_end = 0.1: is what train.kl_c",
        ),
        ({"coefficient_steps": 5}, "train.coefficient_steps = 5: no weight changes"),
    ],
)
def test_what_cannot_be_had_is_refused(train, words):
    (line,) = problems(train)
    assert line.startswith(words)


def test_a_fixed_denominator_is_of_tokens():
    fixed = {"denominator_tokens": 100}
    assert problems({}, preprocess=fixed) == []
    (line,) = problems({}, preprocess=fixed | {"token_weight": "sample"})
    assert line.startswith("preprocess.denominator_tokens = 100: with token_weight: sample a rollout weighs 1")


def test_a_value_head_takes_rewards():
    reward = {"advantage": "reward"}
    own = {"gae_gamma": 0.9, "gae_lambda": 0.9, "value_coefficient": 1.0, "value_stop_gradient": True, "value_rate_factor": 3.0}
    assert problems({}, preprocess=reward) == []
    assert problems({"value_head": True, **own}, preprocess=reward) == []
    assert problems({"value_head": True, "kl_place": "reward", **KL}, preprocess=reward) == []
    (line,) = problems({"value_head": True})
    assert line.startswith("train.value_head = true: makes advantages of rewards, and preprocess.advantage = group_std has")
    (line,) = problems({"value_head": True, "loss": "sft"}, preprocess=reward)
    assert line.startswith("train.value_head = true: train.loss = sft uses no advantages")
    unused = problems(own)
    assert [line.partition(":")[0] for line in unused] == [f"train.{name} = {value}" for name, value in own.items()]
    assert all(line.endswith("has no effect without a value head; set train.value_head") for line in unused)
    (line,) = problems({}, preprocess=reward | {"baseline": "turn"})
    assert line.startswith("preprocess.baseline = turn: preprocess.advantage = reward compares rewards with nothing")


def test_what_is_allowed_but_hardly_meant_is_said():
    def warnings(train):
        return list(loss_warnings(replace(Config(), train=train)))

    assert warnings({}) == warnings(KL) == warnings(KL | {"kl_estimator": "k1", "kl_place": "reward"}) == []
    for head, warned in ((False, 0), (True, 1)):
        config = replace(Config(), train={"value_head": head}, preprocess={"advantage": "reward", "drop_equal_groups": True})
        lines = [
            line for line in loss_warnings(config) if line.startswith("preprocess.drop_equal_groups = true: the value head")
        ]
        assert len(lines) == warned
    (line,) = warnings({"loss": "sft"})
    assert line.startswith("train.loss = sft: answers train alike")
    (line,) = warnings(KL | {"kl_estimator": "k1"})
    assert line.startswith("train.kl_estimator = k1: in the loss its gradient is 0 in the mean")
