"""Checkpoints of the trainer in Megatron's torch_dist form: model, optimizer, step and the digest of the reference, if there
is one, for any tensor parallelism.

A checkpoint folder, step_000100, holds them in `trainer/`; the orchestrator's manifest beside it makes it count.
"""

import multiprocessing
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from prl.control.parent import end_with_parent
from prl.runfolder.manifest import Part, part_of
from prl.trainer.engine import Engine
from prl.trainer.hf_folder import replace_folder, sync

_PART = "trainer"


def save_checkpoint(engine: Engine, folder: Path, step: int) -> list[Part]:
    """Write `folder`/trainer, durable when this returns; gives the files that this rank wrote, with their checksums, which are
    taken while the filesystem writes back. A collective of all ranks; an older one of the name is replaced (it belongs to a
    lineage that was left). Raises OSError."""
    _start_writers_queue()
    temporary = folder / f".tmp-{_PART}"
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    try:
        dist_checkpointing.save(_state(engine, step, is_loading=False), str(temporary))
    except CheckpointException as error:  # it is no Exception, and says neither where nor, often, why
        raise OSError(
            f"{folder}: the checkpoint could not be written; this process's log says why. Look whether space and quota are "
            f"left there (df -h, df -i, quota)"
        ) from error
    mine = sorted(temporary.glob(f"__{dist.get_rank()}_*"))
    if dist.get_rank() == 0:
        mine += sorted(path for path in temporary.iterdir() if not path.name.startswith("__"))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.map(lambda path: part_of(temporary, path), mine)
        for path in mine:
            sync(path)  # each node must write back its own
        parts = [replace(part, path=f"{_PART}/{part.path}") for part in reading]
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "manifest.json").unlink(missing_ok=True)
        replace_folder(temporary, folder / _PART)
    dist.barrier()
    return parts


def _start_writers_queue() -> None:
    """Megatron's writers answer through a process, which as Megatron starts it would outlive a killed trainer."""
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(end_with_parent)
        filesystem_async._results_queue = manager.Queue()


def load_checkpoint(engine: Engine, folder: Path) -> int:
    """Restore what `save_checkpoint` wrote; returns its step. A collective of all ranks.

    Raises FileNotFoundError where nothing was written, ValueError where the engine's reference is not the one of that time.
    """
    part = folder / _PART
    if not part.is_dir():
        raise FileNotFoundError(f"{folder} is no checkpoint to resume from: it has no folder {_PART}/")
    state = dist_checkpointing.load(_state(engine, 0, is_loading=True), str(part))
    before, now = state.get("reference"), _reference(engine)
    if before and now and before != now:
        raise ValueError(
            f"the initial policy, built again as the reference, has the digest {now}; it was {before} when {folder} was "
            f"written: restore the weights in the model's folder, and run.seed and train.dtype as they were"
        )
    for key, gpt in _keyed(engine):
        gpt.load_state_dict(state[key])
    engine.optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _state(engine: Engine, step: int, *, is_loading: bool) -> dict[str, Any]:
    models = {key: gpt.sharded_state_dict() for key, gpt in _keyed(engine)}
    return {
        **models,
        "optimizer": engine.optimizer.sharded_state_dict(models, is_loading=is_loading),
        "step": step,
        "reference": _reference(engine),
    }


def _keyed(engine: Engine) -> list[tuple[str, GPTModel]]:
    """This rank's chunks by their keys in the state."""
    names = ["model"] if len(engine.chunks) == 1 else [f"model{number}" for number in range(len(engine.chunks))]
    return list(zip(names, engine.gpts, strict=True))


def _reference(engine: Engine) -> str:
    """The digest of the reference; empty where there is none."""
    return str(engine.reference.digest) if engine.reference else ""
