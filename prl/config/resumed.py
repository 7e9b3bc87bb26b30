"""What of a run's configuration a resume cannot change: what was fixed when the run began, and would have no effect."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from prl.config.hf_config import ModelConfig
from prl.config.schema import Config

FIXED_TRAIN_KEYS = ("dtype", "distributed_optimizer", "lora_rank", "value_head")  # on which the content of checkpoints depends
FIXED_KEYS = (
    "model",
    "domains",
    "run.name",
    "run.id",
    "run.folder",
    "run.share",
    "run.seed",
    "run.replay",
    "run.replay_from",
    "streams.backend",
    "cluster.profile",
    *(f"train.{key}" for key in FIXED_TRAIN_KEYS),
)


def resume_changes(before: Config, now: Config) -> list[str]:
    """The fixed keys in which two configurations of one run differ."""
    return [
        key
        for key in _changed(before, now, "")
        if any(key == fixed or key.startswith((f"{fixed}.", f"{fixed}[")) for fixed in FIXED_KEYS)
    ]


def model_changes(before: Mapping[str, Any], now: ModelConfig) -> str:
    """In what a model differs from `before`, which a checkpoint says of its own; empty where it does not."""
    return ", ".join(
        f"{key} = {value}, which was {before[key]}"
        for key, value in dataclasses.asdict(now).items()
        if key in before and before[key] != value
    )


def _changed(before: Any, now: Any, name: str) -> Iterator[str]:
    if before == now:
        return
    if dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            yield from _changed(getattr(before, field.name), getattr(now, field.name), f"{name}.{field.name}".lstrip("."))
    else:
        yield name
