"""Engines of the models in checkpoint_layouts.py: what they save in one split of the ranks, and go on from in another."""

from pathlib import Path

import numpy as np
from checkpoint_layouts import MODELS
from gathered_attention import attention_of
from loads import check_load, watched_load
from optimizer_state import optimizer_state
from regroup import leave_groups
from trained import steps

from prl.runfolder.manifest import Part
from prl.trainer.checkpoint import begin_save, finish_save, load_checkpoint
from prl.trainer.engine import Engine, build_engine
from prl.trainer.mapping import load_weights
from prl.trainer.model import build_model
from prl.trainer.options import TrainOptions
from prl.trainer.parallel import Channel, start_groups
from prl.trainer.table import random_weights


def engine_of(options: TrainOptions, model: str = "dense") -> Engine:
    with attention_of(options):
        chunks = build_model(MODELS[model], options)
    load_weights(chunks, MODELS[model], random_weights(MODELS[model], 11))
    return build_engine(chunks, MODELS[model], options)


def relayout(options: TrainOptions, channel: Channel) -> None:
    leave_groups(channel)
    start_groups(options, timeout_s=60.0)


def save(engine: Engine, channel: Channel, path: Path, step: int) -> list[Part]:
    parts = finish_save(begin_save(engine, channel, path, step), channel, 120.0)
    written = [file for file in (path / "trainer").rglob("*") if file.is_file()]
    assert sorted((part.path, part.bytes) for part in parts) == sorted(
        (file.relative_to(path).as_posix(), file.stat().st_size) for file in written
    )
    return parts


def went_on(model: str, options: TrainOptions, channel: Channel, path: Path) -> dict[str, np.ndarray]:
    """The state after two steps, which is saved, and what two more steps told."""
    engine = engine_of(options, model)
    steps(engine, 1, 2)
    save(engine, channel, path, 2)
    return optimizer_state(engine) | {"steps": steps(engine, 3, 4)}


def resumed(model: str, options: TrainOptions, path: Path) -> dict[str, np.ndarray]:
    """The same of an engine that has what was saved."""
    engine = engine_of(options, model)
    with watched_load() as read:
        assert load_checkpoint(engine, path) == 2
    check_load(engine, read)
    return optimizer_state(engine) | {"steps": steps(engine, 3, 4)}
