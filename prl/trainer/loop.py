"""A trainer rank's life: load, publish the starting version, then step after step until the orchestrator says stop."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from prl.config.hf_config import read_model_config
from prl.config.load import load
from prl.config.schema import Config
from prl.control.child import Child, EndsRun
from prl.control.threaded import ThreadedClient
from prl.metrics import names
from prl.runfolder.paths import RunFolder
from prl.streams.files import StreamError, UnreadableError
from prl.streams.steps import StepFile, read_step
from prl.trainer.agreement import compare_with_rank_0
from prl.trainer.checkpoint import load_checkpoint
from prl.trainer.engine import Engine, build_engine
from prl.trainer.hf_folder import read_weights, write_folder
from prl.trainer.mapping import export_weights, load_weights
from prl.trainer.model import build_model
from prl.trainer.parallel import Channel, shares_weights, start_groups, stop_groups
from prl.trainer.publisher import Publisher
from prl.trainer.reference import build_reference
from prl.trainer.saver import Saver
from prl.trainer.step import train_step
from prl.trainer.table import Sliced, random_weights
from prl.trainer.weights_out import WeightsOut


class TooManySkipped(EndsRun):
    """One gradient after another is not finite."""


class DamagedStep(EndsRun):
    """A step file is not what was announced: who begins again would only find it so again."""


def run(child: Child, client: ThreadedClient) -> None:
    """The whole life of one rank. Raises what ended it, if anything did."""
    config = child.config
    # The longest wait of a rank for another: rank 0 offering a version and sending it, and once more where that failed.
    timeout_s = config.control.start_s + config.control.wait_s + 4 * config.weights.group_s + 6 * config.weights.update_s
    begins = client.call("training", {}, deadline_s=config.control.start_s, reason="where the trainer begins")
    start_groups(config.train, timeout_s=timeout_s, port=begins["port"], before_collectives=compare_with_rank_0)
    channel = Channel(timeout_s)
    leader = dist.get_rank() == 0

    engine, step = _start_engine(child, client, resumes=begins["resumes"])
    client.join({})
    out = WeightsOut(
        engine,
        client if leader else None,
        Channel(timeout_s, in_python=config.weights.overlap),  # none that training goes on with meanwhile
        host=child.host,
        lineage=begins["lineage"],
        dtype=config.sample.dtype,
        workers=config.sample.tensor_parallel,
        options=config.weights,
        folder=child.run.weights,
        start_s=config.control.start_s,
    )
    publisher = Publisher(out, client, overlap=config.weights.overlap)
    # Also where it fails: whoever ends while a thread of its waits for the others' store aborts.
    with closing(publisher) as weights:
        weights.publish(step)
        saver = Saver(child, client, channel, engine, step if begins["resumes"] else None)
        step, leaves = _train(child, client, engine, channel, weights, saver, step)
        saver.finish(step)
        weights.join()
        if not leaves:
            _export(child, client, engine, step)
        if leader:
            client.call("finished", {"step": step}, deadline_s=config.control.wait_s, reason=f"version {step} is saved")
    channel.barrier()
    stop_groups()


def _start_engine(child: Child, client: ThreadedClient, *, resumes: bool) -> tuple[Engine, int]:
    """Model and optimizer, fresh or from the checkpoint that the orchestrator names, with the reference, and the version they
    are."""
    config = child.config
    options = replace(config.train, schedule_steps=config.train.schedule_steps or config.run.steps)
    model = read_model_config(child.model)
    chunks = build_model(model, options)

    def initial_weights() -> Iterator[tuple[str, Sliced]]:
        drawn = config.model.init == "random"
        return random_weights(model, config.run.seed) if drawn else read_weights(child.model, model)

    if resumes:
        _clear(chunks)
    else:
        load_weights(chunks, model, initial_weights())
    reference = build_reference(model, options, initial_weights()) if options.reference == "initial" else None
    engine = build_engine(chunks, model, options, reference)
    # Answered once it is certain what lies behind it, and all of its files have been checked, which goes on since before.
    answer = client.call("resume", {}, deadline_s=config.control.wait_s, reason="the checkpoint to go on from")
    return engine, load_checkpoint(engine, Path(answer["checkpoint"])) if resumes else 0


def _clear(chunks: Sequence[torch.nn.Module]) -> None:
    """A checkpoint overwrites all weights but, perhaps, what pads the vocabulary, which must not be whatever was in memory."""
    for parameter in chain.from_iterable(chunk.parameters() for chunk in chunks):
        parameter.data.zero_()


def _train(
    child: Child, client: ThreadedClient, engine: Engine, channel: Channel, weights: Publisher, saver: Saver, step: int
) -> tuple[int, bool]:
    """Train until told to stop; returns the last step, and whether the run leaves its nodes before its end. Raises
    TooManySkipped where too many steps in a row are skipped."""
    leader = dist.get_rank() == 0
    written_by = _writing_run(child.config)
    ended = time.monotonic()
    skipped = 0  # steps in a row
    while True:
        ordered = _next_order(child, client, channel, weights, saver, step + 1)
        if ordered["stop"]:
            return step, bool(ordered.get("leave"))
        file = ordered["file"]
        told = time.monotonic()
        sent_s = weights.spent_s()
        client.progress(f"reading the file of step {step + 1}, {file['path']}")
        data = _read(child, file, step + 1, run=written_by, vocabulary=engine.config.vocabulary)
        microbatches = data.microbatches()
        read = time.monotonic()
        client.progress(f"training step {step + 1}")
        metrics = train_step(engine, microbatches, data.facts, before_change=weights.join)
        skipped = skipped + 1 if metrics[names.SKIPPED] else 0
        if skipped > engine.options.max_skipped_steps:
            raise TooManySkipped(
                f"step {step + 1} is the {skipped}. in a row whose gradient is not finite (train.max_skipped_steps = "
                f"{engine.options.max_skipped_steps}): look at the losses and log-probs of the steps before; a lower "
                f"learning rate, or clipping, may help from the last checkpoint on"
            )
        step += 1
        weights.begin(step)
        saving = saver.spent()
        metrics |= saving | {
            names.WAIT_S: told - ended - sent_s - sum(saving.values()),
            names.DATA_S: read - told,
            names.SEND_S: sent_s + weights.spent_s(),
        }
        now = time.monotonic()
        metrics[names.STEP_S] = now - ended
        ended = now
        answer: dict[str, Any] = {}
        if leader:
            answer = client.call(
                "trained",
                {"step": step, "metrics": metrics, "data": dict(data.metrics)},
                deadline_s=child.config.control.wait_s,
                reason=f"step {step} is done",
            )
        answer = channel.broadcast(answer)
        if answer["stop"]:
            return step, bool(answer.get("leave"))
        if answer["save"]:
            saver.begin(step)


def _read(child: Child, file: Mapping[str, Any], step: int, *, run: str, vocabulary: int) -> StepFile:
    """What of a step's file is this rank's. Raises DamagedStep, and UnreadableError, which another start may be spared."""
    share = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    try:
        return read_step(
            child.run.path / file["path"],
            file["bytes"],
            file["checksum"],
            run=run,
            step=step,
            vocabulary=vocabulary,
            share=share,
            wait_s=child.config.control.lost_after_s,
        )
    except UnreadableError:
        raise
    except StreamError as error:
        raise DamagedStep(
            f"step {step} cannot be trained: {error}; where it was never trained, prl-submit --resume has it made anew, else "
            f"restore the file"
        ) from error


def _writing_run(config: Config) -> str:
    """The mark of the run whose preprocessor writes the step files: this one, but where another's are trained on again."""
    replays_files = config.run.replay and config.run.replay_from == "steps"
    return load(RunFolder(config.run.replay).config).run.mark if replays_files else config.run.mark


def _next_order(
    child: Child, client: ThreadedClient, channel: Channel, weights: Publisher, saver: Saver, step: int
) -> Mapping[str, Any]:
    """`file`: the step file's name, size and checksum; or `stop` where the run ends instead. Every answer of the orchestrator
    goes to all ranks, so that none waits longer than one poll without a word; a checkpoint that has been written counts after
    the next one at the latest. Samplers that came meanwhile get the present version."""
    control = child.config.control
    end = time.monotonic() + control.wait_s
    client.progress(f"waiting for step file {step}")
    while True:
        saver.look()
        answer: Mapping[str, Any] | None = None
        if dist.get_rank() == 0:
            asked = {"step": step, "sends": weights.under_way()}
            answer = client.call("next_step", asked, deadline_s=control.lost_after_s, reason=f"step file {step}")
        told = channel.broadcast(answer)
        if told["stop"] or told["file"] is not None:
            return told
        if told.get("send"):
            weights.begin(step - 1)
            client.progress(f"waiting for step file {step}")
        if time.monotonic() > end:
            raise TimeoutError(f"no step file {step} within {control.wait_s:.0f} s: look at the preprocessor and the actors")


def _export(child: Child, client: ThreadedClient, engine: Engine, step: int) -> None:
    """Write version `step`, the last, as a Hugging Face folder."""
    client.progress(f"exporting version {step}")
    if shares_weights():
        weights = export_weights(engine.chunks, engine.config)  # gathered by all of these ranks
        if dist.get_rank() == 0:
            write_folder(child.run.export, weights, child.model, child.config.train.dtype)
        else:
            for _ in weights:
                pass
