"""Checks of the run folder: free for a new run, whole for one that is gone on with."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from prl.config.hf_config import ModelConfig, UnsupportedModelError, read_model_config
from prl.config.model_files import tokenizer_problems
from prl.config.resumed import model_changes
from prl.config.schema import Config

_KERNELS = ("/proc", "/sys", "/dev")  # where no file can be kept, though root may write there as access(2) has it
_SHARED_MEMORY = "/dev/shm"  # noqa: S108


def new_folder_problems(config: Config) -> Iterator[str]:
    if not config.run.folder.isprintable():
        return  # is said already
    run = Path(config.run.folder)
    other = "choose another run.folder or run.name"
    try:
        real = Path(os.path.realpath(run))
        around = next(filter(_holds_run, real.parents), None)
        kernels = next(filter(real.is_relative_to, _KERNELS), None)
        if kernels is not None and not real.is_relative_to(_SHARED_MEMORY):
            yield f"run.folder = {run}: {kernels} is the kernel's, and keeps no files; {other}"
        elif around is not None:
            yield f"run.folder = {run}: lies in the folder of another run, {around}; {other}"
        elif not run.is_dir():
            first = next(path for path in (run, *run.parents) if os.path.lexists(path))
            if first == run or not first.is_dir():
                yield f"run.folder = {run}: {first} is no folder; {other}"
            elif not _may_write(first):
                yield f"run.folder = {run}: {first} cannot be written; {other}, or have its owner permit it (chmod)"
        elif not any(run.iterdir()):
            if not _may_write(run):
                yield f"run.folder = {run}: cannot be written; {other}, or have its owner permit it (chmod)"
        elif not _holds_run(run):
            yield f"run.folder = {run}: is not empty and holds no run; {other}"
        elif any(run.glob("checkpoints/step_*/manifest.json")):
            yield (
                f"run.folder = {run}: already holds another run; go on with it by prl-submit --resume {shlex.quote(str(run))}, "
                f"or {other}"
            )
        else:
            yield (
                f"run.folder = {run}: already holds another run, which has no checkpoint to go on from; delete the folder, or "
                f"{other}"
            )
    except OSError as error:
        yield f"run.folder = {run}: {error.strerror}; {other}"


def resumed_folder_problems(config: Config, model: ModelConfig | None) -> Iterator[str]:
    """Does a run that is gone on with have what a checkpoint has not? A model that is not known is told already."""
    run = Path(config.run.folder)
    if not _may_write(run):
        yield f"--resume {run}: the run's folder cannot be written; have its owner permit it (chmod)"
    if model is None:
        return
    folder = run / "model"
    troubles = list(tokenizer_problems(folder))
    try:
        changes = model_changes(asdict(model), read_model_config(folder))
        if changes:
            troubles.append(f"config.json is of another model than the run's configuration: {changes}")
    except UnsupportedModelError as error:
        troubles = [str(error)] if (folder / "config.json").exists() else ["has no config.json", *troubles]
    if troubles:
        what = f"make it a link to {config.model.path} again" if config.model.path else "restore it, or submit the run anew"
        yield f"--resume {run}: the run's model folder {folder} is not whole ({'; '.join(troubles)}); {what}"


def _holds_run(folder: Path) -> bool:
    """Each attempt's folder holds a config.yaml, too, and so may folders that are not prl's."""
    return os.path.lexists(folder / "config.yaml") and any(folder.glob("attempt_*"))


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
