"""Checks over several keys, and of what the keys name: all problems at once, each with its key, its value and what to do."""

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prl.config.engine_args import engine_args_problems
from prl.config.hf_config import ModelConfig, UnsupportedModelError, model_config, new_model_config, read_model_config
from prl.config.layout import context_problems, layout_problems, tensor_misfit
from prl.config.load import ConfigError, out_of_bounds, replace, shown
from prl.config.loss_checks import loss_problems, loss_warnings
from prl.config.machine import free_memory_bytes, machine_problems
from prl.config.model_files import tokenizer_problems, weight_problems
from prl.config.optimizer_checks import optimizer_problems, optimizer_warnings
from prl.config.schema import Config
from prl.trainer.options import ModelOptions

NAME_CHARACTERS = 100
STEP_ROLLOUTS = 10**7
LIMITS = {  # of every number without a bound of its own: far above what any run needs, and below what breaks something
    2**63: "run.seed",
    10**9: "run.steps run.max_lag run.evaluate_every_steps run.evaluate_problems run.epochs train.warmup_steps "
    "train.schedule_steps train.max_skipped_steps train.checkpoint_keep_last train.checkpoint_keep_every_steps "
    "train.checkpoint_every_steps train.coefficient_steps preprocess.pack_tokens preprocess.denominator_tokens "
    "run.stop_at_reward train.learning_rate train.min_learning_rate train.epsilon train.weight_decay train.clip_grad "
    "train.clip_high train.truncate train.ratio_penalty train.value_coefficient train.value_rate_factor train.token_mask_low "
    "train.token_mask_high train.sequence_mask_low train.sequence_mask_high train.entropy_coefficient train.kl_coefficient "
    "train.entropy_coefficient_end train.kl_coefficient_end train.peak_tflops weights.anchor_every_steps",
    10**8: "sample.max_model_len actor.max_tokens model.max_positions",
    10**7: "model.ffn_size model.expert_ffn_size cluster.time_min",
    10**6: "run.steps_per_generation run.groups_per_step run.rollouts_per_group run.min_rollouts_per_group "
    "run.stop_after_evaluations model.hidden_size sample.max_num_seqs actor.max_groups actor.lease_groups streams.roll_groups "
    "actor.temperature cluster.gpu_memory_gib cluster.memory_per_node_gib "
    "run.group_deadline_s sample.restart_pause_s actor.request_s actor.rollout_s verifier.check_s weights.group_s "  # 11 days
    "weights.update_s streams.redis.full_s streams.redis.reconnect_s streams.roll_s metrics.flush_s control.heartbeat_s "
    "control.lost_after_s control.start_s control.wait_s control.stop_s",
    10**5: "model.layers model.heads model.kv_heads model.head_dim model.experts model.experts_per_token train.lora_rank "
    "cluster.nodes cluster.train_nodes cluster.cpus_per_node",
    10**4: "train.tensor_parallel train.pipeline_parallel train.virtual_pipeline train.context_parallel train.expert_parallel "
    "train.threads sample.tensor_parallel sample.threads sample.restarts actor.processes actor.rollout_tries "
    "verifier.processes preprocess.processes cluster.train_devices cluster.gpus_per_node cluster.replicas_per_node",
    2**24: "run.max_waiting_mib sample.kv_cache_mib verifier.memory_mib preprocess.memory_mib streams.redis.max_mib",  # 16 TiB
    2**17: "train.head_chunk_mib weights.bucket_mib streams.roll_mib streams.queue_mib",  # 128 GiB, in one piece
}
REDIS_SCHEMES = ("redis", "rediss", "unix")
UNUSABLE_IN_PATHS = ":%\\"  # of the run folder: it stands in PYTHONPATH, in sbatch's --output and in submitit's file names


def resolve_paths(config: Config, base: Path) -> Config:
    """The same configuration with an explicit run folder (default: runs/<name>) and every path absolute, so that it means
    the same in the job, on other nodes and at a resume. Relative paths count from `base`."""
    folder = _expand("run.folder", config.run.folder or f"runs/{config.run.name}", base)
    run = {"folder": folder, "replay": _expand("run.replay", config.run.replay, base)}
    config = replace(config, run=run, model={"path": _expand("model.path", config.model.path, base)})
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


def check_numbers(config: Config) -> None:
    """What everything else reckons with. Raises ConfigError that lists every number out of its bounds, one a line."""
    outside = [*out_of_bounds(config), *_too_large(config)]
    if outside:
        raise ConfigError(*outside)


def shape_problems(config: Config) -> list[str]:
    """What keeps the model, as far as it is known, from being laid out over devices as the configuration says."""
    model = model_of(config)
    return [
        *layout_problems(config.train, model),
        *context_problems(config.train, model, config.cluster.gpus_per_node),
        *(_fit(config, model) if model is not None else ()),
    ]


def check(config: Config, *, resume: bool = False, memory_bytes: int | None = None) -> list[str]:
    """Check a configuration whose paths are resolved, before anything is written. Gives warnings; raises ConfigError that
    lists every problem, one a line. `memory_bytes` is what this machine has free (default: asked of it)."""
    check_numbers(config)
    model, problems = _model(config)
    problems += _model_files(config, model)
    problems += _run(config)
    problems += _sbatch(config)
    problems += _parts(config)
    problems += loss_problems(config)
    problems += optimizer_problems(config)
    problems += layout_problems(config.train, model)
    problems += context_problems(config.train, model, config.cluster.gpus_per_node)
    problems += engine_args_problems(config.sample.engine_args)
    problems += _domains(config)
    if model is not None:
        problems += _fit(config, model)
    if not resume:
        problems += _folder(config)
    else:
        problems += _resumed_folder(config, model)
    if config.cluster.nodes is None:
        problems += machine_problems(config, model, free_memory_bytes() if memory_bytes is None else memory_bytes)
    if problems:
        raise ConfigError(*problems)
    return _warnings(config)


def model_of(config: Config) -> ModelConfig | None:
    """The model that a configuration names; None where it cannot be known or trained."""
    return _model(config)[0]


def is_path_key(key: str) -> bool:
    """Whether an option of a domain names a file or files."""
    return key in ("path", "paths") or key.endswith(("_path", "_paths"))


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


def _model(config: Config) -> tuple[ModelConfig | None, list[str]]:
    """What the trainer makes of the model's config.json, or of what that will be, with the problems of the model's folder."""
    options = config.model
    if not options.path:
        if options.init == "random" and options.architecture is not None:
            return _random_model(options)
        if options.init == "random":
            return None, [
                "model.architecture = null: with init: random give an architecture, or a path with config and tokenizer"
            ]
        return None, ["model.path is empty: name a Hugging Face folder, or set model.init: random and model.architecture"]
    if options.architecture is not None:
        return None, [f"model.architecture = {options.architecture}: is for models without a path; remove it or model.path"]
    folder = Path(options.path)
    try:
        there, whole = folder.is_dir(), (folder / "config.json").is_file()
    except OSError as error:
        return None, [f"model.path = {folder}: {error.strerror}; have its owner permit it (chmod), or name another folder"]
    if not there:
        return None, [f"model.path = {folder}: no such folder; give the folder of a downloaded Hugging Face model"]
    if not whole:
        return None, [f"model.path = {folder}: has no config.json; it must be a complete Hugging Face folder"]
    try:
        return read_model_config(folder), []
    except UnsupportedModelError as error:
        return None, [f"model.path = {folder}: prl cannot train this model: {error}"]


def _model_files(config: Config, model: ModelConfig | None) -> Iterator[str]:
    folder = Path(config.model.path)
    reachable = os.access(folder, os.R_OK | os.X_OK, effective_ids=True)  # else that is said already
    if config.model.path and config.model.architecture is None and reachable:
        weights = weight_problems(folder, model) if config.model.init == "pretrained" else []
        yield from (f"model.path = {folder}: {problem}" for problem in [*tokenizer_problems(folder), *weights])


def _random_model(options: ModelOptions) -> tuple[ModelConfig | None, list[str]]:
    names = {field.name: f"model.{field.name}" for field in dataclasses.fields(options)}
    try:
        return model_config(new_model_config(options, end=0, pad=0), names), []
    except UnsupportedModelError as error:
        return None, list(error.args)


def _fit(config: Config, model: ModelConfig) -> Iterator[str]:
    """Does the model fit the split and the lengths?"""
    for key, width in (
        ("train.tensor_parallel", config.train.tensor_parallel),
        ("sample.tensor_parallel", config.sample.tensor_parallel),
    ):
        misfit = tensor_misfit(model, width)
        if misfit:
            fitting = [str(n) for n in range(1, model.heads + 1) if not tensor_misfit(model, n)]
            yield f"{key} = {width}: {misfit}; choose one of {', '.join(fitting)}"
    if model.experts:
        yield from _sampled_experts(config, model)
    elif config.sample.record_routing:
        yield "sample.record_routing = true: the model has no experts; set it to false"
    if config.sample.max_model_len > model.max_positions:
        yield (
            f"sample.max_model_len = {config.sample.max_model_len}: the model has {model.max_positions} positions; lower it to "
            f"that"
        )


def _sampled_experts(config: Config, model: ModelConfig) -> Iterator[str]:
    """A sampler's workers share each expert; on CPUs vLLM computes with experts in tiles."""
    workers = config.sample.tensor_parallel
    if model.experts < workers or model.expert_ffn_size % workers:
        yield (
            f"sample.tensor_parallel = {workers}: samplers share {model.experts} experts, each {model.expert_ffn_size} wide; "
            f"choose at most {model.experts}, of which the width is a multiple"
        )
    elif not config.cluster.gpus_per_node and (model.hidden_size % 32 or model.expert_ffn_size // workers % 16):
        yield (
            f"model: without accelerators vLLM wants a hidden size that is a multiple of 32 and experts whose width is one of "
            f"16 on each worker; they are {model.hidden_size} and {model.expert_ffn_size // workers}"
        )
    if config.sample.record_routing and not config.cluster.gpus_per_node:
        yield "sample.record_routing = true: vLLM records no routing without accelerators; set it to false"
    if config.sample.record_routing and config.train.recompute == "selective" and config.train.pipeline_parallel > 1:
        yield (
            "sample.record_routing = true: with train.recompute = selective, stages of a pipeline would compute experts again "
            "with the routing of another micro-batch; set train.recompute to none or full"
        )


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
    if actor.rollout_s > control.wait_s:
        yield (
            f"control.wait_s = {control.wait_s}: a run in which nothing moves for so long fails, but one rollout may take "
            f"actor.rollout_s = {actor.rollout_s}; set control.wait_s to at least that"
        )
    if config.cluster.sbatch.get("requeue"):
        yield (
            "cluster.sbatch.requeue = true: a job that Slurm starts again does not go on from its checkpoint in this version; "
            "leave it out, and go on with prl-submit --resume RUN"
        )
    redis = config.streams.redis
    if config.streams.backend == "redis" and redis.start == bool(redis.url):
        yield (
            f"streams.redis.start = {str(redis.start).lower()} with streams.redis.url = {redis.url!r}: streams.backend = redis "
            "needs one of them, a server of the run's own or the URL of another"
        )
    if config.streams.backend == "redis" and redis.url and urlsplit(redis.url).scheme not in REDIS_SCHEMES:
        yield (
            f"streams.redis.url = {redis.url}: is no address of a Redis server; write e.g. redis://host:6379/0 "
            f"({', '.join(REDIS_SCHEMES)})"
        )
    if config.streams.backend == "redis" and redis.password_file:
        trouble = _trouble_of_file(redis.password_file)
        if trouble:
            yield f"streams.redis.password_file = {redis.password_file}: {trouble}; name the file with the server's password"
    if config.streams.backend == "redis" and config.streams.keep == "all":
        yield (
            "streams.keep = all: Redis keeps no rollout that is done with; set streams.backend: folder, or streams.keep: needed"
        )
    if config.weights.delta and config.weights.transport == "lanes":
        yield ("weights.delta = true: lanes send all values of each version; set weights.transport: gather, or false here")
    if control.lost_after_s <= control.heartbeat_s:
        yield (
            f"control.lost_after_s = {control.lost_after_s}: every process would count as lost between two heartbeats "
            f"(control.heartbeat_s = {control.heartbeat_s}); set several times that"
        )


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


def _trouble_of_file(path: str) -> str:
    """Why nothing lies there that could be read; empty where something does."""
    try:
        return "" if Path(path).exists() else "no such file"
    except OSError as error:
        return f"{error.strerror}"


def _folder(config: Config) -> Iterator[str]:
    if not config.run.folder.isprintable():
        return  # is said already
    run = Path(config.run.folder)
    other = "choose another run.folder or run.name"
    try:
        if not run.is_dir():
            first = next(path for path in (run, *run.parents) if os.path.lexists(path))
            if first == run or not first.is_dir():
                yield f"run.folder = {run}: {first} is no folder; {other}"
            elif not _may_write(first):
                yield f"run.folder = {run}: {first} cannot be written; {other}, or have its owner permit it (chmod)"
        elif not any(run.iterdir()):
            if not _may_write(run):
                yield f"run.folder = {run}: cannot be written; {other}, or have its owner permit it (chmod)"
        elif not (run / "config.yaml").exists():
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


def _resumed_folder(config: Config, model: ModelConfig | None) -> Iterator[str]:
    """Does a run that is gone on with have what a checkpoint has not? A model that is not known is told already."""
    run = Path(config.run.folder)
    if not _may_write(run):
        yield f"--resume {run}: the run's folder cannot be written; have its owner permit it (chmod)"
    if model is None:
        return
    folder = run / "model"
    troubles = list(tokenizer_problems(folder))
    try:
        read_model_config(folder)
    except UnsupportedModelError as error:
        troubles = [str(error)] if (folder / "config.json").exists() else ["has no config.json", *troubles]
    if troubles:
        what = f"make it a link to {config.model.path} again" if config.model.path else "restore it, or submit the run anew"
        yield f"--resume {run}: the run's model folder {folder} is not whole ({'; '.join(troubles)}); {what}"


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _too_large(config: Config) -> Iterator[str]:
    """Numbers that no run needs, and that arrays, seeds, sockets, timers or a machine's memory cannot take."""
    found = False
    for limit, keys in LIMITS.items():
        for section, key in (name.rsplit(".", 1) for name in keys.split()):
            value = getattr(attrgetter(section)(config), key)
            if value is not None and value >= limit:
                yield f"{section}.{key} = {shown(value)}: must be below {limit}"
                found = True
    run = config.run
    if not found and run.groups_per_step * run.rollouts_per_group >= STEP_ROLLOUTS:
        yield (
            f"run.groups_per_step = {run.groups_per_step}: with run.rollouts_per_group = {run.rollouts_per_group} a step has "
            f"{run.groups_per_step * run.rollouts_per_group} rollouts; it must have fewer than {STEP_ROLLOUTS}"
        )


def _sbatch(config: Config) -> Iterator[str]:
    """Every value becomes one line of a batch script."""
    cluster = config.cluster
    named = {f"cluster.{key}": getattr(cluster, key) for key in ("partition", "account", "qos", "interface")}
    named |= {f"cluster.sbatch.{key}": f"{key}={value}" for key, value in cluster.sbatch.items()}
    for key, value in named.items():
        if value is not None and not value.isprintable():
            yield f"{key!r} = {value!r}: give one line without control characters"
    for key in cluster.sbatch:
        if not re.fullmatch("(--)?[A-Za-z][A-Za-z0-9_-]*", key):
            yield f"cluster.sbatch.{key}: is no option of sbatch; give the name of one, e.g. constraint"
    for number, line in enumerate(cluster.setup):
        if "\0" in line:
            yield f"cluster.setup[{number}] = {line!r}: give a line without NUL"


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
    if config.preprocess.pack_tokens < config.sample.max_model_len:
        found.append(
            f"preprocess.pack_tokens = {config.preprocess.pack_tokens} is below sample.max_model_len = "
            f"{config.sample.max_model_len}: longer rollouts are discarded"
        )
    return found
