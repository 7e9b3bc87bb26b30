"""A trainer rank's life: load, publish the starting version, then step after step until the orchestrator says stop."""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from prl.config.hf_config import read_model_config
from prl.control.child import Child
from prl.control.threaded import ThreadedClient
from prl.metrics import names
from prl.streams.steps import read_step
from prl.trainer.checkpoint import load_checkpoint, save_checkpoint
from prl.trainer.engine import Engine, build_engine
from prl.trainer.hf_folder import read_weights, write_folder
from prl.trainer.mapping import export_weights, load_weights
from prl.trainer.model import build_model
from prl.trainer.parallel import Channel, shares_weights, start_groups, stop_groups
from prl.trainer.reference import build_reference
from prl.trainer.step import train_step
from prl.trainer.table import Sliced, random_weights
from prl.trainer.weights_out import WeightsOut


def run(child: Child, client: ThreadedClient) -> None:
    """The whole life of one rank. Raises what ended it, if anything did."""
    config = child.config
    # The longest wait of a rank for another: rank 0 waiting for samplers to take a version.
    timeout_s = config.control.start_s + config.control.wait_s + config.weights.group_s + config.weights.update_s
    start_groups(config.train, timeout_s=timeout_s)
    channel = Channel(timeout_s)
    leader = dist.get_rank() == 0

    engine, step = _start_engine(child)
    client.join({})
    weights = WeightsOut(
        engine,
        client if leader else None,
        channel,
        host=child.host,
        lineage=int(os.environ.get("PRL_LINEAGE", "0")),
        dtype=config.sample.dtype,
        options=config.weights,
        start_s=config.control.start_s,
    )
    weights.publish(step)
    step, saved = _train(child, client, engine, channel, weights, step)
    if step != saved:  # else the checkpoint is whole, and its manifest says so
        _save(child, client, engine, channel, step)
    _export(child, client, engine, step)
    channel.barrier()
    stop_groups()


def _start_engine(child: Child) -> tuple[Engine, int]:
    """Model and optimizer, fresh or from the checkpoint that the agent names, with the reference, and the version they are."""
    config = child.config
    model = read_model_config(child.run.model)
    chunks = build_model(model, config.train)
    resume = os.environ.get("PRL_RESUME")

    def initial_weights() -> Iterator[tuple[str, Sliced]]:
        drawn = config.model.init == "random"
        return random_weights(model, config.run.seed) if drawn else read_weights(child.run.model, model)

    load_weights(chunks, model, random_weights(model, config.run.seed) if resume else initial_weights())
    reference = build_reference(model, config.train, initial_weights()) if config.train.reference == "initial" else None
    engine = build_engine(chunks, model, config.train, reference)
    return engine, load_checkpoint(engine, Path(resume)) if resume else 0


def _train(
    child: Child, client: ThreadedClient, engine: Engine, channel: Channel, weights: WeightsOut, step: int
) -> tuple[int, int | None]:
    """Train until told to stop; returns the last step and the last one of which a checkpoint exists."""
    saved = step if os.environ.get("PRL_RESUME") else None
    leader = dist.get_rank() == 0
    ended = time.monotonic()
    while True:
        file = _next_file(child, client, channel, step + 1)
        if file is None:
            break
        waited_s = time.monotonic() - ended
        client.progress(f"training step {step + 1}")
        data = read_step(
            child.run.path / file["path"], file["bytes"], file["checksum"], wait_s=child.config.control.lost_after_s
        )
        if data.facts.step != step + 1:
            raise ValueError(f"{file['path']} holds step {data.facts.step}, but step {step + 1} is due")
        mine = data.deal(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
        metrics = train_step(engine, [data.microbatch(index) for index in mine], data.facts)
        step += 1
        metrics.update(weights.publish(step))
        now = time.monotonic()
        metrics.update({names.WAIT_S: waited_s, names.STEP_S: now - ended})
        ended = now
        answer = {"stop": False, "save": False}
        if leader:
            answer = client.call(
                "trained",
                {"step": step, "metrics": metrics},
                deadline_s=child.config.control.wait_s,
                reason=f"step {step} is done",
            )
        answer = channel.broadcast(answer)
        if answer["stop"]:
            break
        if answer["save"]:
            _save(child, client, engine, channel, step)
            saved = step
    return step, saved


def _next_file(child: Child, client: ThreadedClient, channel: Channel, step: int) -> dict[str, Any] | None:
    """The step file's name, size and checksum, or None where the run ends instead. Every answer of the orchestrator goes to
    all ranks, so that none waits longer than one poll without a word."""
    control = child.config.control
    end = time.monotonic() + control.wait_s
    client.progress(f"waiting for step file {step}")
    while True:
        answer: Mapping[str, Any] | None = None
        if dist.get_rank() == 0:
            answer = client.call("next_step", {"step": step}, deadline_s=control.lost_after_s, reason=f"step file {step}")
        told = channel.broadcast(answer)
        if told["stop"]:
            return None
        file: dict[str, Any] | None = told["file"]
        if file is not None:
            return file
        if time.monotonic() > end:
            raise TimeoutError(f"no step file {step} within {control.wait_s:.0f} s: look at the preprocessor and the actors")


def _save(child: Child, client: ThreadedClient, engine: Engine, channel: Channel, step: int) -> None:
    """Checkpoint version `step`, and have the orchestrator write its manifest."""
    client.progress(f"saving version {step}")
    written = channel.gather([asdict(part) for part in save_checkpoint(engine, child.run.checkpoint(step), step)])
    if dist.get_rank() == 0:
        wait_s = child.config.control.wait_s
        body = {"step": step, "parts": [part for parts in written for part in parts]}
        client.call("checkpoint", body, deadline_s=wait_s, reason=f"checkpoint of version {step}")


def _export(child: Child, client: ThreadedClient, engine: Engine, step: int) -> None:
    """Write version `step`, the last, as a Hugging Face folder; with that the trainer is done."""
    client.progress(f"exporting version {step}")
    if shares_weights():
        weights = export_weights(engine.chunks, engine.config)  # gathered by all of these ranks
        if dist.get_rank() == 0:
            write_folder(child.run.export, weights, child.run.model, child.config.train.dtype)
            wait_s = child.config.control.wait_s
            client.call("exported", {"step": step}, deadline_s=wait_s, reason=f"export of version {step}")
        else:
            for _ in weights:
                pass
