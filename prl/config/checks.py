"""Checks over several keys, and of what the keys name: all problems at once, each with its key, its value and what to do."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from prl.config.cluster_checks import cluster_problems
from prl.config.engine_args import engine_args_problems
from prl.config.folder_checks import new_folder_problems, resumed_folder_problems
from prl.config.load import ConfigError, out_of_bounds
from prl.config.loss_checks import loss_problems, loss_warnings
from prl.config.machine import free_memory_bytes, machine_problems
from prl.config.memory import copies_versions
from prl.config.model_checks import model_and_problems, model_file_problems, shape_problems
from prl.config.optimizer_checks import optimizer_problems, optimizer_warnings
from prl.config.paths import is_path_key
from prl.config.schema import Config
from prl.config.staging import needs_whole_versions

NAME_CHARACTERS = 100
STEP_ROLLOUTS = 10**7
REDIS_SCHEMES = ("redis", "rediss", "unix")
UNUSABLE_IN_PATHS = ":%\\"  # of the run folder: it stands in PYTHONPATH, in sbatch's --output and in submitit's file names


def check_numbers(config: Config) -> None:
    """What everything else reckons with. Raises ConfigError that lists every number out of its bounds, one a line."""
    outside, run = out_of_bounds(config), config.run
    if not outside and run.groups_per_step * run.rollouts_per_group >= STEP_ROLLOUTS:
        outside.append(
            f"run.groups_per_step = {run.groups_per_step}: with run.rollouts_per_group = {run.rollouts_per_group} a step has "
            f"{run.groups_per_step * run.rollouts_per_group} rollouts; it must have fewer than {STEP_ROLLOUTS}"
        )
    if outside:
        raise ConfigError(*outside)


def check(config: Config, *, resume: bool = False, memory_bytes: int | None = None) -> list[str]:
    """Check a configuration whose paths are resolved, before anything is written. Gives warnings; raises ConfigError that
    lists every problem, one a line. `memory_bytes` is what this machine has free (default: asked of it)."""
    check_numbers(config)
    model, problems = model_and_problems(config)
    problems += model_file_problems(config, model)
    problems += _run(config)
    problems += cluster_problems(config)
    problems += _parts(config)
    problems += loss_problems(config)
    problems += optimizer_problems(config)
    problems += shape_problems(config, model)
    problems += engine_args_problems(config.sample.engine_args)
    problems += _domains(config)
    problems += _image(config)
    problems += resumed_folder_problems(config, model) if resume else new_folder_problems(config)
    if config.cluster.nodes is None:
        problems += machine_problems(config, model, free_memory_bytes() if memory_bytes is None else memory_bytes)
    if problems:
        raise ConfigError(*problems)
    return _warnings(config)


def _run(config: Config) -> Iterator[str]:
    run = config.run
    name = run.name
    if not name.isprintable() or "/" in name or name != name.strip() or name in ("", ".", "..") or len(name) > NAME_CHARACTERS:
        yield (
            f"run.name = {name[: NAME_CHARACTERS + 1]!r}: give a name without slashes, outer blanks and control characters, "
            f"of at most {NAME_CHARACTERS} characters, and neither . nor .."
        )
    if not run.folder.isprintable():
        yield f"run.folder = {run.folder!r}: give a path without control characters"
    unusable = [character for character in UNUSABLE_IN_PATHS if character in run.folder]
    if unusable:
        yield (
            f"run.folder = {run.folder}: holds {' and '.join(unusable)}, which PYTHONPATH (:) or Slurm's names of log files "
            "(% and \\) give another meaning; choose another run.folder or run.name"
        )
    if run.stop_at_reward is not None and not run.evaluate_every_steps:
        yield f"run.stop_at_reward = {run.stop_at_reward}: needs evaluations; set run.evaluate_every_steps, or null here"
    compared = config.preprocess.advantage != "reward"
    if run.rollouts_per_group == 1 and compared:
        yield (
            f"run.rollouts_per_group = 1: preprocess.advantage = {config.preprocess.advantage} compares the rollouts of a "
            f"group, so that one alone has no advantage and nothing is learned; set at least 2"
        )
    elif run.rollouts_per_group == 1 and config.preprocess.drop_equal_groups:
        yield "preprocess.drop_equal_groups = true: with run.rollouts_per_group = 1 no group would be left; set false"
    fewest, least = run.min_rollouts_per_group, 2 if compared else 1
    if fewest is not None and not least <= fewest <= run.rollouts_per_group:
        why = "rollouts are compared with each other; " if compared else ""
        yield (
            f"run.min_rollouts_per_group = {fewest}: {why}set {least} to run.rollouts_per_group = {run.rollouts_per_group}, or "
            f"null"
        )
    back_s = config.actor.rollout_s + config.streams.roll_s
    if run.group_deadline_s is not None and run.group_deadline_s <= back_s:
        yield (
            f"run.group_deadline_s = {run.group_deadline_s}: actors work on a group for actor.rollout_s = "
            f"{config.actor.rollout_s} s and may keep it for streams.roll_s = {config.streams.roll_s} s; set more than both, "
            f"or null"
        )


def _parts(config: Config) -> Iterator[str]:
    sample, actor, control = config.sample, config.actor, config.control
    if not config.cluster.gpus_per_node and sample.kv_cache_mib is None:
        yield "sample.kv_cache_mib = null: without accelerators the KV cache needs a size in MiB, e.g. 256"
    if sample.quantization != "none":
        yield from _quantized(config)
    if actor.max_tokens >= sample.max_model_len:
        yield (
            f"actor.max_tokens = {actor.max_tokens}: leaves no room for a prompt in sample.max_model_len = "
            f"{sample.max_model_len}; lower the one or raise the other"
        )
    if config.preprocess.pack_tokens <= actor.max_tokens:
        yield (
            f"preprocess.pack_tokens = {config.preprocess.pack_tokens}: an answer of actor.max_tokens = {actor.max_tokens} and "
            f"its prompt do not fit, so that it would be discarded; set at least sample.max_model_len = {sample.max_model_len}"
        )
    if actor.rollout_s > control.no_progress_s:
        yield (
            f"control.no_progress_s = {control.no_progress_s}: a run in which nothing moves for so long fails, but one rollout "
            f"may take actor.rollout_s = {actor.rollout_s}; set control.no_progress_s to at least that"
        )
    redis = config.streams.redis
    if config.streams.backend == "redis" and redis.start == bool(redis.url):
        yield (
            f"streams.redis.start = {str(redis.start).lower()} with streams.redis.url = {redis.url!r}: streams.backend = redis "
            "needs one of them, a server of the run's own or the URL of another"
        )
    if config.streams.backend == "redis" and redis.url and not _is_redis_address(redis.url):
        yield (
            f"streams.redis.url = {redis.url}: is no address of a Redis server; write e.g. redis://host:6379/0 "
            f"({', '.join(REDIS_SCHEMES)})"
        )
    elif config.streams.backend == "redis" and redis.url and urlsplit(redis.url).password:
        yield (
            "streams.redis.url: holds a password, which logs would show; write it into a file, and name that by "
            "streams.redis.password_file"
        )
    if config.streams.backend == "redis" and redis.password_file:
        trouble = _trouble_of_file(redis.password_file)
        if not trouble and not Path(redis.password_file).is_file():
            trouble = "is no regular file"
        if trouble:
            yield f"streams.redis.password_file = {redis.password_file}: {trouble}; name the file with the server's password"
    if config.streams.backend == "redis" and redis.full_s < control.trainers_s:
        yield (
            f"streams.redis.full_s = {redis.full_s}: trainers that begin again may take control.start_s + control.wait_s = "
            f"{control.trainers_s} s, and nobody makes room in Redis meanwhile; set at least that, or lower those"
        )
    if config.streams.backend == "redis" and config.streams.keep == "all":
        yield (
            "streams.keep = all: Redis keeps no rollout that is done with; set streams.backend: folder, or streams.keep: needed"
        )
    if config.weights.staging == "chunked":
        whole = needs_whole_versions(config, None)
        if whole:
            yield f"weights.staging = chunked: {whole}; give up one of the two"
        for key in ("request_s", "rollout_s"):
            if getattr(actor, key) <= config.weights.stillness_s:
                yield (
                    f"actor.{key} = {getattr(actor, key)}: with weights.staging = chunked samplers may stand still for "
                    f"weights.group_s + weights.update_s = {config.weights.stillness_s} s before they hand back what they were "
                    f"asked; set more than that, or lower those"
                )
    if config.weights.delta and config.weights.transport == "lanes" and sample.quantization != "none":
        yield (
            f"weights.delta = true: what samplers quantise (sample.quantization = {sample.quantization}) cannot be read back, "
            f"for lanes to send what differs from it; set weights.transport: gather, or false here"
        )
    if config.weights.overlap and copies_versions(config):
        yield (
            f"weights.overlap = true: with weights.transport = {config.weights.transport} tensors of this trainer are put "
            f"together, cast or merged first, which takes groups and memory that its passes need; set weights.transport: "
            f"lanes, or false here"
        )
    if control.lost_after_s <= control.heartbeat_s:
        yield (
            f"control.lost_after_s = {control.lost_after_s}: every process would count as lost between two heartbeats "
            f"(control.heartbeat_s = {control.heartbeat_s}); set several times that"
        )


def _is_redis_address(url: str) -> bool:
    """Whether it names a host, with a port and a database's number or without, or the path of a socket."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return bool(parts.path)
        # redis-py takes database 0 for a path that is no number.
        is_database = re.fullmatch(r"/?|/\d+", parts.path) is not None
        return parts.scheme in REDIS_SCHEMES and parts.port != 0 and bool(parts.hostname) and is_database
    except ValueError:  # brackets that are not closed, a port that is no number or too large
        return False


def _quantized(config: Config) -> Iterator[str]:
    """Quantised weights come out of vLLM's loader, which needs whole tensors; on CPUs it quantises linear layers by channel."""
    sample = config.sample
    key = f"sample.quantization = {sample.quantization}"
    if sample.dtype != "bfloat16":
        yield f"{key}: vLLM quantises weights of bfloat16 alone; set sample.dtype: bfloat16"
    if config.weights.transport == "lanes" and sample.tensor_parallel > 1:
        yield f"{key}: lanes bring a worker parts of tensors, of which none can be quantised; set weights.transport: gather"
    if not config.cluster.gpus_per_node and sample.quantization != "fp8_per_channel":
        yield f"{key}: without accelerators only fp8_per_channel can be had; set that, or none"


def _domains(config: Config) -> Iterator[str]:
    """What can be said without loading the domains' modules; prl.domains.registry checks the rest."""
    if not config.domains:
        yield "domains is empty: name at least one task, e.g. domains: [{name: digits}]"
    names = [domain.name for domain in config.domains]
    for number, domain in enumerate(config.domains):
        if domain.name in names[:number]:
            yield (
                f"domains[{number}].name = {domain.name}: is named already by domains[{names.index(domain.name)}]; name a task "
                f"once, with all its data and its weight"
            )
        for key, value in domain.options.items():
            paths = [value] if isinstance(value, str) else value
            if is_path_key(key) and isinstance(paths, list | tuple):
                for path in paths:
                    trouble = _trouble_of_file(str(path))
                    if trouble:
                        yield f"domains[{number}].options.{key} = {path}: {trouble}; name the data of domain {domain.name}"


def _image(config: Config) -> Iterator[str]:
    """An image that is named as a file (others are addresses) is one that this machine sees, too."""
    image = config.cluster.container_image or ""
    if config.cluster.container != "none" and image.startswith("/"):
        trouble = _trouble_of_file(image)
        if trouble:
            yield f"cluster.container_image = {image}: {trouble}; name an image that lies on a filesystem of all nodes"


def _trouble_of_file(path: str) -> str:
    """Why nothing lies there that could be read; empty where something does."""
    try:
        return "" if Path(path).exists() else "no such file"
    except OSError as error:
        return f"{error.strerror}"


def _warnings(config: Config) -> list[str]:
    found = [*loss_warnings(config), *optimizer_warnings(config)]
    for key, value in (("temperature", config.actor.temperature), ("top_p", config.actor.top_p)):
        if value != 1:
            found.append(f"actor.{key} = {value}: training assumes 1; the importance ratios will be biased")
    if config.train.lora_rank and config.cluster.gpus_per_node and config.cluster.nodes is not None:
        found.append(
            f"train.lora_rank = {config.train.lora_rank}: adapters are for models without Transformer Engine, and whether that "
            f"is installed on the job's nodes is not known here; where it is, the trainer refuses to start"
        )
    if config.train.context_parallel > 1 and config.cluster.nodes is not None:
        found.append(
            f"train.context_parallel = {config.train.context_parallel}: needs Transformer Engine, and whether that is "
            f"installed on the job's nodes is not known here; where it is not, the trainer refuses to start"
        )
    if config.control.no_progress_s >= config.control.wait_s:
        found.append(
            f"control.no_progress_s = {config.control.no_progress_s}: is not below control.wait_s = {config.control.wait_s}, "
            f"at which waits end without a word on who was waited for; lower the one or raise the other"
        )
    if config.preprocess.pack_tokens < config.sample.max_model_len:
        found.append(
            f"preprocess.pack_tokens = {config.preprocess.pack_tokens} is below sample.max_model_len = "
            f"{config.sample.max_model_len}: longer rollouts are discarded"
        )
    return found
