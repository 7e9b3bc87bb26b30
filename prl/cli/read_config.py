"""The configuration that prl-submit is asked to run: a file's or a run's, with what the command line says."""

import argparse
import os
import secrets
import shlex
import string
from pathlib import Path

from prl.cli import console
from prl.cli.cluster_arguments import with_cluster_arguments
from prl.cluster.claims import check_not_running, next_attempt
from prl.cluster.script import site_folder
from prl.config.load import ConfigError, load, replace
from prl.config.paths import current_folder, resolve_paths
from prl.config.resumed import FIXED_KEYS, resume_changes
from prl.config.schema import Config
from prl.control.token import TokenError, read_token
from prl.runfolder.manifest import newest_manifest
from prl.runfolder.paths import RunFolder, run_of_attempt


def read_config(options: argparse.Namespace) -> tuple[Config, RunFolder, int]:
    """The configuration with all overrides and absolute paths, the run's folder, and the attempt that may be made there."""
    here, attempt = current_folder(), 1
    if options.host_is_gone and options.resume is None:
        raise ConfigError("--host-is-gone speaks of a run that is gone on with; name it with --resume RUN")
    if options.resume is not None:
        config, attempt = _read_resumed(options)
    elif options.config is None:
        raise ConfigError("name a configuration, e.g. configs/quickstart.yaml, or a run with --resume")
    else:
        config = load(options.config, options.set, site_folder())
        config = replace(config, run={"id": _new_id()})  # also where it is another run's config.yaml
    if options.replay is not None:
        config = replace(config, run={"replay": str(Path(options.replay).absolute())})
    if options.replay_rollouts:
        if not config.run.replay:
            raise ConfigError("--replay-rollouts says what --replay RUN trains on; name that run too")
        config = replace(config, run={"replay_from": "rollouts"})
    config = resolve_paths(with_cluster_arguments(config, options), here)
    return config, RunFolder(config.run.folder), attempt


def _new_id() -> str:
    """Letters alone, which YAML cannot take for a number."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(8))


def _read_resumed(options: argparse.Namespace) -> tuple[Config, int]:
    """The configuration of the run that is gone on with, and its next attempt's number."""
    folder, named = RunFolder(Path(options.resume).absolute()), f"--resume {options.resume}"
    if options.replay is not None:
        raise ConfigError("--resume goes on with a run, --replay begins one; leave out one of them")
    if options.config is not None:
        raise ConfigError(f"--resume takes the configuration from the run itself; leave out {options.config}")
    whole = run_of_attempt(folder.path)
    if whole is not None:
        raise ConfigError(f"{named}: is one attempt of a run, and a run folder is wanted: --resume {shlex.quote(str(whole))}")
    if not folder.config.is_file():
        raise ConfigError(f"{named}: no run lies there (no {folder.config})")
    for request in (folder.stop, folder.save):
        if request.is_dir() and not request.is_symlink():
            raise ConfigError(f"{named}: {request} is a folder, and a file is what asks for something; remove it")
    if os.path.lexists(folder.token):
        try:
            read_token(folder.token)
        except TokenError as error:
            raise ConfigError(f"{named}: {error}") from error
    attempt = next_attempt(folder)
    check_not_running(folder, host_is_gone=options.host_is_gone)
    if not folder.manifests():
        raise ConfigError(
            f"{named}: the run has no finished checkpoint to go on from (no manifest.json under {folder.checkpoints}); submit "
            f"it anew, with train.checkpoint_every_steps set"
        )
    manifest, refused = newest_manifest(folder)
    for words in refused:
        console.tell(f"prl-submit: warning: {console.printable(words)}")
    if manifest is None:
        raise ConfigError(f"{named}: none of the run's checkpoints can be gone on from; submit it anew")
    before = load(folder.config)
    config = load(folder.config, options.set)
    fixed = resume_changes(before, config)
    if fixed:
        raise ConfigError(
            f"{named}: {', '.join(fixed)} cannot be changed in a run that has begun; begin a new one for that (what belongs to "
            f"the run for good: {', '.join(FIXED_KEYS)})"
        )
    step = manifest.step
    if step >= config.run.steps:
        raise ConfigError(
            f"{named}: run.steps = {config.run.steps} are trained, the newest checkpoint is that of step {step}; raise "
            f"run.steps: --set run.steps=N, with N above {step}"
        )
    return replace(config, run={"folder": str(folder)}), attempt
