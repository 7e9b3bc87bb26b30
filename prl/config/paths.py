"""Paths of a configuration: absolute before anything else is made of them."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prl.config.hub import cached_model
from prl.config.load import ConfigError, replace, shown
from prl.config.schema import Config


def resolve_paths(config: Config, base: Path) -> Config:
    """The same configuration with an explicit run folder (default: runs/<name>) and every path absolute, so that it means
    the same in the job, on other nodes and at a resume. Relative paths count from `base`; a model may be named as on Hugging
    Face's hub, where it lies in the cache of this machine."""
    folder = _expand("run.folder", config.run.folder or f"runs/{config.run.name}", base)
    run = {"folder": folder, "replay": _expand("run.replay", config.run.replay, base)}
    config = replace(config, run=run, model={"path": _model(config.model.path, base)})
    cluster = config.cluster
    if cluster.container == "apptainer" and cluster.container_image and "://" not in cluster.container_image:
        config = replace(config, cluster={"container_image": _expand("cluster.container_image", cluster.container_image, base)})
    redis = config.streams.redis
    if redis.password_file:
        password_file = _expand("streams.redis.password_file", redis.password_file, base)
        config = replace(config, streams={"redis": dataclasses.replace(redis, password_file=password_file)})
    domains = tuple(
        dataclasses.replace(domain, options=_with_absolute_paths(domain.options, f"domains[{number}].options.", base))
        for number, domain in enumerate(config.domains)
    )
    return dataclasses.replace(config, domains=domains)


def current_folder() -> Path:
    """Raises ConfigError where it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder does not exist any more; change to one that does") from None


def check_named(argument: str, path: str) -> None:
    """Raises ConfigError where a path is empty, which would be the current folder."""
    if not path:
        raise ConfigError(f"{argument} '': no run folder is named; where a variable was to name it, that one is not set")


def is_path_key(key: str) -> bool:
    """Whether an option of a domain names a file or files."""
    return key in ("path", "paths") or key.endswith(("_path", "_paths"))


def _model(path: str, base: Path) -> str:
    """A folder that is there counts more than a model of the hub of that name."""
    folder = _expand("model.path", path, base)
    return folder if os.path.lexists(folder) else cached_model(path) or folder


def _with_absolute_paths(options: Mapping[str, Any], where: str, base: Path) -> dict[str, Any]:
    return {key: _absolute(f"{where}{key}", value, base) if is_path_key(key) else value for key, value in options.items()}


def _absolute(name: str, value: Any, base: Path) -> Any:
    if isinstance(value, list | tuple):
        return [_absolute(name, item, base) for item in value]
    return _expand(name, value, base) if isinstance(value, str) else value


def _expand(name: str, path: str, base: Path) -> str:
    """A path of an option, absolute: ~ is a home folder, and relative ones count from `base`. An empty one stays so."""
    if "\0" in path:
        raise ConfigError(f"{name} = {shown(path)}: no path can hold NUL; give another")
    try:
        return str(base / Path(path).expanduser()) if path else path
    except RuntimeError:
        raise ConfigError(f"{name} = {path}: there is no such user; write the path out") from None
