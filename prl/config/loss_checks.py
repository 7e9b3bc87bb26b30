"""What the options of the loss ask for and cannot have, or would not use."""

import dataclasses
from collections.abc import Iterator

from prl.config.schema import Config
from prl.trainer.options import LOSS_SETTINGS, TrainOptions

_VALUE_SETTINGS = ("gae_gamma", "gae_lambda", "value_coefficient", "value_stop_gradient", "value_rate_factor")
_MASKS = ("token_mask_low", "token_mask_high", "sequence_mask_low", "sequence_mask_high")


def loss_problems(config: Config) -> Iterator[str]:
    train = config.train
    yield from _unused(train)
    for bounds in (_MASKS[:2], _MASKS[2:]):
        low, high = (getattr(train, name) for name in bounds)
        if low is not None and high is not None and low > high:
            yield f"train.{bounds[0]} = {low}: is above train.{bounds[1]} = {high}, so that nothing would train; exchange them"
        elif low is not None and low > 1:
            yield f"train.{bounds[0]} = {low}: keeps out a ratio of 1, which tokens of the newest version have; set at most 1"
        elif high is not None and high < 1:
            yield f"train.{bounds[1]} = {high}: keeps out a ratio of 1, which tokens of the newest version have; set at least 1"
    if _uses_kl(train) and train.reference == "none":
        key = "kl_coefficient" if train.kl_coefficient else "kl_coefficient_end"
        yield (
            f"train.{key} = {getattr(train, key)}: the KL term needs a reference; set train.reference: initial, or the "
            f"coefficient to 0"
        )
    changing = [name for name in ("kl_coefficient_end", "entropy_coefficient_end") if getattr(train, name) is not None]
    if changing and train.coefficient_steps is None:
        yield f"train.{changing[0]} = {getattr(train, changing[0])}: over how many steps? Set train.coefficient_steps"
    for name in changing:
        start = name.removesuffix("_end")
        if getattr(train, name) == getattr(train, start):
            yield f"train.{name} = {getattr(train, name)}: is what train.{start} is already; set null, or another end"
    if train.coefficient_steps is not None and not changing:
        yield (
            f"train.coefficient_steps = {train.coefficient_steps}: no weight changes; set train.kl_coefficient_end or "
            f"train.entropy_coefficient_end, or null here"
        )
    yield from _value_problems(config)
    if config.preprocess.denominator_tokens is not None and config.preprocess.token_weight == "sample":
        yield (
            f"preprocess.denominator_tokens = {config.preprocess.denominator_tokens}: with token_weight: sample a rollout "
            f"weighs 1 however long it is; set token_weight: token, or null here"
        )


def _value_problems(config: Config) -> Iterator[str]:
    train, preprocess = config.train, config.preprocess
    if train.value_head and train.loss == "sft":
        yield "train.value_head = true: train.loss = sft uses no advantages; set false"
    elif train.value_head and preprocess.advantage != "reward":
        yield (
            f"train.value_head = true: makes advantages of rewards, and preprocess.advantage = {preprocess.advantage} has "
            f"compared them with each other already; set preprocess.advantage: reward"
        )
    for field in () if train.value_head else dataclasses.fields(train):
        if field.name in _VALUE_SETTINGS and getattr(train, field.name) != field.default:
            yield f"train.{field.name} = {getattr(train, field.name)}: has no effect without a value head; set train.value_head"
    if preprocess.advantage == "reward" and preprocess.baseline == "turn":
        yield "preprocess.baseline = turn: preprocess.advantage = reward compares rewards with nothing; set rollout"


def loss_warnings(config: Config) -> Iterator[str]:
    train = config.train
    if train.value_head and config.preprocess.drop_equal_groups:
        yield (
            "preprocess.drop_equal_groups = true: the value head never sees a prompt that is always solved, or never; with "
            "train.value_head their rollouts have advantages too; set false"
        )
    if train.loss == "sft" and not config.run.replay:
        yield "train.loss = sft: answers train alike, whatever their rewards; it is for steps made of given answers"
    if _uses_kl(train) and train.kl_place == "loss" and train.kl_estimator == "k1":
        yield "train.kl_estimator = k1: in the loss its gradient is 0 in the mean; use k2 or k3, or train.kl_place: reward"


def _uses_kl(train: TrainOptions) -> bool:
    return bool(train.kl_coefficient or train.kl_coefficient_end)


def _unused(train: TrainOptions) -> Iterator[str]:
    """Options that were set and have no effect."""
    own = LOSS_SETTINGS[train.loss]
    for name in dict.fromkeys(name for settings in LOSS_SETTINGS.values() for name in settings):
        value = getattr(train, name)
        if value is not None and name not in own:
            users = [loss for loss, settings in LOSS_SETTINGS.items() if name in settings]
            yield f"train.{name} = {value}: train.loss = {train.loss} does not use it, but {', '.join(users)}; set null"
    if train.proximal is not None and train.loss != "decoupled_ppo":
        yield f"train.proximal = {train.proximal}: train.loss = {train.loss} does not use it, but decoupled_ppo; set null"
    if train.loss == "sft":
        for name in _MASKS:
            if getattr(train, name) is not None:
                yield f"train.{name} = {getattr(train, name)}: train.loss = sft has no ratios to mask by; set null"
        if _uses_kl(train) and train.kl_place == "reward":
            yield "train.kl_place = reward: train.loss = sft uses no rewards; set loss"
    if not _uses_kl(train):
        for name, default in (("kl_estimator", None), ("kl_place", "loss")):
            if getattr(train, name) != default:
                yield f"train.{name} = {getattr(train, name)}: has no effect without a train.kl_coefficient; set that too"
