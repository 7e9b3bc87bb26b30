"""Replay: a run that trains on the step files of another one, or on steps made of its rollouts, without samplers."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow.compute as pc

from prl.config.load import ConfigError, load
from prl.config.schema import Config
from prl.orchestrator.steps import StepEntry
from prl.runfolder.paths import RunFolder, run_of_attempt
from prl.runfolder.reclaim import read_reclaimed
from prl.streams.files import StreamError, StreamFile
from prl.streams.ledger import read_ledger
from prl.streams.steps import all_steps, read_own

log = logging.getLogger(__name__)


def replayed_steps(config: Config, after: int) -> list[StepEntry]:
    """The step files after+1, ..., run.steps of the run that is replayed; none where the preprocessor makes them from its
    rollouts. Their rollouts belong to that run: none has an end in this one. Raises ConfigError where a file is missing."""
    if config.run.replay_from == "rollouts":
        return []
    run = RunFolder(config.run.replay)
    name, found, newest = load(run.config).run.mark, all_steps(run.steps), max(run.attempts(), default=0)
    entries = []
    for step in range(after + 1, config.run.steps + 1):
        if step not in found:
            raise ConfigError(_missing(config, set(found)))
        file = _own(found[step], step, name, newest)
        entries.append(
            StepEntry({"step": step, "path": str(file.path), "bytes": file.bytes, "checksum": file.checksum}, trained=())
        )
    return entries


def _own(files: Sequence[StreamFile], step: int, name: str, newest_attempt: int) -> StreamFile:
    """The latest file of a step that the run of this name has written; where there is none the latest, whose reader refuses
    it."""
    for file in files if len(files) > 1 else ():
        try:
            read_own(file, run=name, step=step, newest_attempt=newest_attempt)
        except StreamError as error:
            log.warning("passed over: %s", error)
            continue
        return file
    return files[0]


def replay_problems(config: Config) -> Iterator[str]:
    """Why the run that run.replay names cannot be replayed with this configuration."""
    run = RunFolder(config.run.replay)
    whole = run_of_attempt(run.path)
    if whole is not None:
        yield f"run.replay = {run}: is one attempt of a run, and a run folder is wanted: {whole}"
        return
    if not run.config.is_file():
        yield f"run.replay = {run}: no run lies there (no {run.config})"
        return
    try:
        original = load(run.config)
    except ConfigError as error:
        yield from (f"run.replay = {run}: its configuration cannot be read: {problem}" for problem in error.args)
        return
    theirs, ours = asdict(original.model), asdict(config.model)
    for key in (key for key in ours if theirs[key] != ours[key]):
        yield f"model.{key} = {ours[key]}: run.replay = {run} was trained with {theirs[key]}; a replay trains the same model"
    if config.model.init == "random" and original.run.seed != config.run.seed:
        yield (
            f"run.seed = {config.run.seed}: draws the initial weights, and run.replay = {run} began with those of seed "
            f"{original.run.seed}; set it to that"
        )
    if config.run.replay_from == "rollouts":
        if original.streams.backend != "folder":
            yield (
                f"run.replay = {run}: its rollouts went through Redis (streams.backend: redis), which keeps none; replay its "
                "step files (run.replay_from: steps)"
            )
        yield from _deleted_rollouts(run)
        yield from _untrained_steps(run, config.run.steps)
        return
    if config.train.value_head and original.preprocess.advantage != "reward":
        yield (
            f"train.value_head = true: needs rewards, and the step files of run.replay = {run} hold advantages "
            f"(preprocess.advantage = {original.preprocess.advantage}); replay its rollouts (run.replay_from: rollouts)"
        )
    found = all_steps(run.steps)
    wanted = range(1, config.run.steps + 1)
    if not set(wanted) <= set(found):
        yield _missing(config, set(found))
        return
    torn = next((step for step in wanted if not any(map(_has_its_size, found[step]))), None)
    if torn is not None:
        to_do = f"set at most run.steps={torn - 1}" if torn > 1 else "name another run"
        yield f"run.replay = {run}: the file of step {torn} is not whole ({found[torn][0].path}); {to_do}"


def _has_its_size(file: StreamFile) -> bool:
    """What else may be wrong with a file, its checksums tell whoever trains on it."""
    try:
        return file.path.is_file() and file.path.stat().st_size == file.bytes
    except OSError:
        return False


def _deleted_rollouts(run: RunFolder) -> Iterator[str]:
    try:
        if any(file.kind == "rollouts" for file in read_reclaimed(run)):
            yield f"run.replay = {run}: rollouts of it were deleted behind its checkpoints (streams.keep: needed)"
    except ValueError as error:
        yield f"run.replay = {run}: whether rollouts of it were deleted cannot be read: {error}"


def _untrained_steps(run: RunFolder, steps: int) -> Iterator[str]:
    try:
        ledger = read_ledger(run.ledgers)
    except (StreamError, OSError) as error:
        yield f"run.replay = {run}: what it trained on cannot be read: {error}"
        return
    trained = set(ledger.filter(pc.field("event") == "trained").column("step").unique().to_pylist())
    first = next((step for step in range(1, steps + 1) if step not in trained), None)
    if first == 1:
        yield f"run.replay = {run}: trained on no rollouts of its own (a replay, or it never began); name the run that did"
    elif first is not None:
        yield f"run.steps = {steps}: run.replay = {run} trained the steps 1 to {first - 1}; set at most run.steps={first - 1}"


def _missing(config: Config, found: set[int]) -> str:
    run = Path(config.run.replay)
    first = next(step for step in range(1, config.run.steps + 2) if step not in found)
    if first > 1:
        return (
            f"run.steps = {config.run.steps}: run.replay = {run} has the step files 1 to {first - 1}; set at most "
            f"run.steps={first - 1}"
        )
    deleted = ", which were deleted behind its checkpoints (streams.keep: needed)" if RunFolder(run).reclaimed.exists() else ""
    return (
        f"run.replay = {run}: has no step file 1{deleted}; give a run that is to be replayed streams.keep: all (with "
        f"streams.backend: folder)"
    )
