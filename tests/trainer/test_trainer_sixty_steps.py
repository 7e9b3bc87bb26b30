"""Sixty steps of the trainer alone from fixed step files, once at a stretch and once interrupted three times: killed while a
checkpoint is on its way, killed between two, and asked to stop. Losses and weights are the same bit for bit, also where ranks
share an optimizer that keeps the weights with more digits than the model does."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import rank_environment
from safetensors.torch import load_file
from trainer_data import facts, microbatches

from prl.config.load import dump
from prl.config.schema import Config
from prl.control.options import ControlOptions
from prl.control.ports import free_port
from prl.control.server import ControlServer
from prl.control.token import create_token
from prl.flow.ids import RolloutId
from prl.orchestrator.options import RunOptions
from prl.runfolder.paths import RunFolder
from prl.streams.steps import write_step
from prl.trainer.options import TrainOptions

RANKS, STEPS, EVERY, SKIPPED = 2, 60, 7, 40
TRAIN = TrainOptions(
    tensor_parallel=RANKS,
    learning_rate=3e-3,
    warmup_steps=5,
    schedule="cosine",
    weight_decay=0.01,
    checkpoint_every_steps=EVERY,
)
SHARED = replace(TRAIN, tensor_parallel=1, distributed_optimizer=True, dtype="bfloat16")


@dataclass
class Run:
    folder: RunFolder
    files: dict[int, dict[str, Any]]
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)  # steps that were trained once more, with the same metrics
    saved: list[int] = field(default_factory=list)  # steps whose checkpoints count
    alarms: dict[int, str] = field(default_factory=dict)  # and of those that failed, the words
    failures: list[str] = field(default_factory=list)


def step_files(folder: RunFolder, steps: int = STEPS, spoilt: Collection[int] = (SKIPPED,)) -> dict[int, dict[str, Any]]:
    files = {}
    for step in range(1, steps + 1):
        scale = np.float32("nan" if step in spoilt else np.cos(step))
        batches = [
            replace(
                batch,
                advantages=batch.advantages * scale,
                rollouts=tuple(RolloutId(0, "digits/1", step, k, 0) for k in range(len(batch.boundaries) - 1)),
            )
            for batch in microbatches()
        ]
        file = write_step(folder.steps, batches, facts(step), run="r", attempt=1, sequence=step)
        files[step] = {"step": step, "path": str(file.path), "bytes": file.bytes, "checksum": file.checksum}
    return files


def new_run(path: Path, model: Path, train: TrainOptions = TRAIN) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    os.symlink(model, folder.model)
    config = Config(
        run=RunOptions(name="r", folder=str(folder), steps=STEPS),
        train=train,
        control=ControlOptions(wait_s=120.0, start_s=300.0, heartbeat_s=0.2),
    )
    folder.config.write_text(dump(config))
    create_token(folder.token)
    return folder


async def attempt(
    run: Run,
    *,
    stop_after: int = STEPS,
    holds: int = 0,
    dies: Callable[[str, int], bool] = lambda call, step: False,
    disturb: Callable[[str, int, Sequence[int]], None] = lambda call, step, pids: None,
) -> int:
    """From the newest checkpoint to the step after which it is to stop, or to the call at which all ranks are killed; the
    first rank's exit code. Step `holds` is not to be had before the checkpoint of the one before counts. `disturb` hears of
    each call before it is answered, with the ranks' process ids."""
    processes: list[asyncio.subprocess.Process] = []

    def heard(call: str, step: int) -> None:
        disturb(call, step, [process.pid for process in processes])
        if dies(call, step):
            for process in processes:
                process.kill()

    async def next_step(member, body):
        heard("next_step", body["step"])
        if body["step"] == holds and holds - 1 not in run.saved:  # checkpoints count also while the trainer waits
            await asyncio.sleep(0.1)
            return {"file": None, "stop": False}
        return {"file": run.files.get(body["step"]), "stop": False}

    async def trained(member, body):
        step, metrics = body["step"], body["metrics"]
        heard("trained", step)
        if step in run.metrics:
            run.again.append(step)
            for name in ("train/loss", "train/grad_norm", "train/learning_rate"):
                assert np.array_equal(run.metrics[step][name], metrics[name], equal_nan=True), (step, name)
        run.metrics[step] = metrics
        return {"stop": step >= stop_after, "save": step % EVERY == 0}

    async def checkpoint(member, body):
        heard("checkpoint", body["step"])
        run.saved.append(body["step"])
        return {"saved": True}

    async def checkpoint_failed(member, body):
        heard("checkpoint_failed", body["step"])
        run.alarms[body["step"]] = body["error"]
        return {}

    async def nothing(member, body):
        return {"epoch": 0, "world_size": 1, "send": False}

    port = free_port("127.0.0.1")

    async def training(member, body):
        return {"lineage": 0, "resumes": bool(run.saved), "port": port}

    async def resume(member, body):
        return {"checkpoint": str(run.folder.checkpoint(max(run.saved))) if run.saved else None}

    handlers = {
        "training": training,
        "resume": resume,
        "offer_version": nothing,
        "next_step": next_step,
        "trained": trained,
        "checkpoint": checkpoint,
        "checkpoint_failed": checkpoint_failed,
        "finished": nothing,
    }
    server = ControlServer(
        run.folder.token.read_text(),
        handlers,
        on_join=lambda member: None,
        on_fail=lambda member, error, trace: run.failures.append(error),
    )
    environment = {
        "PRL_RUN": str(run.folder),
        "PRL_ATTEMPT": "1",
        "PRL_ROLE": "trainer",
        "PRL_CONTROL_URL": await server.start("127.0.0.1"),
        "PRL_HOST": "127.0.0.1",
    }
    try:
        for rank in range(RANKS):
            own = {**rank_environment(rank, RANKS, 0), **environment, "PRL_INDEX": str(rank)}
            processes.append(await asyncio.create_subprocess_exec(sys.executable, "-m", "prl.trainer", env=own))
        codes = [await process.wait() for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await server.close()
    return codes[0]


def exported(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder.export / "model.safetensors")


@pytest.mark.slow
@pytest.mark.deadline(3600)
@pytest.mark.parametrize("train", [TRAIN, SHARED], ids=["tensor", "data_shared_half"])
def test_three_interruptions_change_no_bit(model_folders, tmp_path, train):
    folder = new_run(tmp_path / "whole", model_folders / "qwen3", train)
    whole = Run(folder, step_files(folder))
    assert asyncio.run(attempt(whole)) == 0
    assert whole.saved == [*range(EVERY, STEPS, EVERY), STEPS]
    assert whole.again == []

    broken = Run(new_run(tmp_path / "broken", model_folders / "qwen3", train), whole.files)
    # The checkpoint of step 14 is being written, or is about to count, when the trainer asks for the next step or says so.
    assert asyncio.run(attempt(broken, dies=lambda call, step: (call, step) in (("next_step", 15), ("checkpoint", 14)))) < 0
    assert broken.saved == [7]
    assert max(broken.metrics) == 14
    assert asyncio.run(attempt(broken, holds=22, dies=lambda call, step: (call, step) == ("trained", 25))) < 0
    assert broken.saved == [7, 14, 21]
    assert asyncio.run(attempt(broken, stop_after=33)) == 0
    assert broken.saved == [7, 14, 21, 28, 33]
    assert asyncio.run(attempt(broken)) == 0
    assert broken.again == [*range(8, 15), *range(22, 26)]
    assert broken.saved == [*range(7, 29, 7), 33, 35, *range(42, STEPS, 7), STEPS]

    assert whole.failures == broken.failures == []
    for step in range(1, STEPS + 1):
        for name in ("train/loss", "train/grad_norm", "train/learning_rate", "train/skipped"):
            assert np.array_equal(whole.metrics[step][name], broken.metrics[step][name], equal_nan=True), (step, name)
        assert whole.metrics[step]["train/skipped"] == (step == SKIPPED)
    rates = [whole.metrics[step]["train/learning_rate"] for step in (5, 60)]
    assert rates == pytest.approx([3e-3, 0.0])
    assert len({whole.metrics[step]["train/loss"] for step in range(1, STEPS + 1) if step != SKIPPED}) == STEPS - 1
    expected = exported(whole)
    for name, tensor in exported(broken).items():
        assert tensor.dtype is getattr(torch, train.dtype)
        assert torch.equal(tensor, expected[name]), name
    assert any("train/save_s" in metrics for metrics in whole.metrics.values())


@pytest.mark.slow
@pytest.mark.deadline(1200)
def test_too_many_skipped_steps_in_a_row_end_the_run(model_folders, tmp_path):
    folder = new_run(tmp_path / "spoilt", model_folders / "qwen3", replace(TRAIN, max_skipped_steps=2))
    run = Run(folder, step_files(folder, 8, (1, 2, 4, 5, 6)))
    assert asyncio.run(attempt(run)) == 1
    assert [run.metrics[step]["train/skipped"] for step in sorted(run.metrics)] == [1, 1, 0, 1, 1]  # the third ends the run
    assert len(run.failures) == RANKS
    assert all("step 6 is the 3. in a row whose gradient is not finite" in failure for failure in run.failures)
