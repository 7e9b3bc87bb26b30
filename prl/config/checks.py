"""Checks over several keys, and of what the keys name: all problems at once, each with its key, its value and what to do."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from prl.config.load import ConfigError, replace
from prl.config.schema import Config

_MIB = 1024**2
_GIB = 1024**3

# Resident memory of a process before it holds any model: measured on machines without a GPU.
_TRAINER_BYTES = 550 * _MIB
_SAMPLER_BYTES = 1000 * _MIB
_SMALL_PROCESS_BYTES = 150 * _MIB  # orchestrator, preprocessor, actors, verifiers and their workers
_TRAINED_PARAMETER_BYTES = 16  # float32: weight, gradient and AdamW's two moments
_LOADING_BYTES = 4  # a full copy while weights are loaded or sent


def resolve_paths(config: Config, base: Path) -> Config:
    """The same configuration with an explicit run folder (default: runs/<name>) and every path absolute, so that it means
    the same in the job, on other nodes and at a resume. Relative paths count from `base`."""
    folder = config.run.folder or f"runs/{config.run.name}"
    config = replace(config, run={"folder": str(base / folder)})
    if config.model.path:
        config = replace(config, model={"path": str(base / Path(config.model.path).expanduser())})
    domains = tuple(
        dataclasses.replace(domain, options={key: _absolute(key, value, base) for key, value in domain.options.items()})
        for domain in config.domains
    )
    return dataclasses.replace(config, domains=domains)


def check(config: Config, *, resume: bool = False, memory_bytes: int | None = None) -> list[str]:
    """Check a configuration whose paths are resolved, before anything is written. Gives warnings; raises ConfigError that
    lists every problem, one a line. `memory_bytes` is what this machine has free (default: asked of it)."""
    model, problems = _model(config)
    problems += _run(config)
    problems += _parts(config)
    problems += _domains(config)
    if model is not None:
        problems += _fit(config, model)
    if not resume:
        problems += _folder(config)
    if config.cluster.nodes is None:
        problems += _machine(config, model, _free_memory_bytes() if memory_bytes is None else memory_bytes)
    if problems:
        raise ConfigError("\n".join(problems))
    return _warnings(config, model)


def is_path_key(key: str) -> bool:
    """Whether an option of a domain names a file or files."""
    return key in ("path", "paths") or key.endswith(("_path", "_paths"))


def _absolute(key: str, value: Any, base: Path) -> Any:
    if not is_path_key(key):
        return value
    if isinstance(value, str):
        return str(base / Path(value).expanduser()) if value else value
    if isinstance(value, list | tuple):
        return [_absolute(key, item, base) for item in value]
    return value


def _model(config: Config) -> tuple[Mapping[str, Any] | None, list[str]]:
    """The model's config.json, or what it will be, with the problems of its folder."""
    options = config.model
    if not options.path:
        if options.init == "random" and options.architecture is not None:
            return _random_model(config)
        if options.init == "random":
            return None, [
                "model.architecture = null: with init: random give an architecture, or a path with config and tokenizer"
            ]
        return None, ["model.path is empty: name a Hugging Face folder, or set model.init: random and model.architecture"]
    if options.architecture is not None:
        return None, [f"model.architecture = {options.architecture}: is for models without a path; remove it or model.path"]
    folder = Path(options.path)
    if not folder.is_dir():
        return None, [f"model.path = {folder}: no such folder; give the folder of a downloaded Hugging Face model"]
    problems = [
        f"model.path = {folder}: has no {name}; it must be a complete Hugging Face folder"
        for name in ("config.json", "tokenizer.json")
        if not (folder / name).is_file()
    ]
    if options.init == "pretrained" and not any(folder.glob("*.safetensors")):
        problems.append(f"model.path = {folder}: has no *.safetensors weights; convert them, or set model.init: random")
    if problems:
        return None, problems
    try:
        model = json.loads((folder / "config.json").read_text())
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
            int(model[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, [f"model.path = {folder}: its config.json cannot be read: {type(error).__name__}: {error}"]
    if model.get("model_type") not in ("qwen2", "qwen3", "llama"):
        problems.append(f"model.path = {folder}: model_type {model.get('model_type')} is none of qwen2, qwen3, llama")
    return model, problems


def _random_model(config: Config) -> tuple[Mapping[str, Any] | None, list[str]]:
    options = config.model
    sizes = ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "ffn_size", "max_positions")
    problems = [f"model.{key} = {getattr(options, key)}: must be at least 1" for key in sizes if getattr(options, key) < 1]
    if not problems and options.heads % options.kv_heads:
        problems.append(f"model.kv_heads = {options.kv_heads}: must divide model.heads = {options.heads}")
    if options.head_dim % 2:
        problems.append(f"model.head_dim = {options.head_dim}: must be even (rotary positions turn pairs)")
    elif options.architecture == "qwen2" and options.head_dim * options.heads != options.hidden_size:
        problems.append(
            f"model.head_dim = {options.head_dim}: qwen2 wants hidden_size / heads = {options.hidden_size}/{options.heads}; "
            f"change one of the three"
        )
    if problems:
        return None, problems
    return {
        "model_type": options.architecture,
        "hidden_size": options.hidden_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "intermediate_size": options.ffn_size,
        "vocab_size": 16 if options.tokenizer == "digits" else 260,
        "tie_word_embeddings": options.tied,
        "max_position_embeddings": options.max_positions,
    }, []


def _fit(config: Config, model: Mapping[str, Any]) -> Iterator[str]:
    """Does the model fit the split and the lengths?"""
    heads = int(model["num_attention_heads"])
    for key, width in (
        ("train.tensor_parallel", config.train.tensor_parallel),
        ("sample.tensor_parallel", config.sample.tensor_parallel),
    ):
        if width >= 1 and heads % width:
            fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            yield f"{key} = {width}: does not divide the model's {heads} query heads; choose one of {', '.join(fitting)}"
    longest = model.get("max_position_embeddings")
    if longest is not None and config.sample.max_model_len > int(longest):
        yield f"sample.max_model_len = {config.sample.max_model_len}: the model has {longest} positions; lower it to that"


def _run(config: Config) -> Iterator[str]:
    run = config.run
    for key in ("steps", "groups_per_step", "rollouts_per_group", "steps_per_generation", "stop_after_evaluations"):
        if getattr(run, key) < 1:
            yield f"run.{key} = {getattr(run, key)}: must be at least 1"
    for key in ("max_lag", "evaluate_every_steps"):
        if getattr(run, key) < 0:
            yield f"run.{key} = {getattr(run, key)}: must not be negative"
    if not run.name or "/" in run.name or run.name != run.name.strip():
        yield f"run.name = {run.name!r}: give a name without slashes and outer blanks"
    if run.evaluate_every_steps and run.evaluate_problems < 1:
        yield f"run.evaluate_problems = {run.evaluate_problems}: must be at least 1 (evaluate_every_steps: 0 for none)"
    if run.stop_at_reward is not None and not run.evaluate_every_steps:
        yield f"run.stop_at_reward = {run.stop_at_reward}: needs evaluations; set run.evaluate_every_steps, or null here"
    if run.rollouts_per_group == 1:
        yield (
            f"run.rollouts_per_group = 1: preprocess.advantage = {config.preprocess.advantage} compares the rollouts of a "
            f"group, so that one alone has no advantage and nothing is learned; set at least 2"
        )


def _parts(config: Config) -> Iterator[str]:
    train, sample, actor, preprocess, cluster = config.train, config.sample, config.actor, config.preprocess, config.cluster
    at_least_one = {
        "train.tensor_parallel": train.tensor_parallel,
        "train.threads": train.threads,
        "sample.tensor_parallel": sample.tensor_parallel,
        "sample.threads": sample.threads,
        "sample.max_num_seqs": sample.max_num_seqs,
        "actor.processes": actor.processes,
        "actor.max_groups": actor.max_groups,
        "actor.lease_groups": actor.lease_groups,
        "actor.max_tokens": actor.max_tokens,
        "preprocess.pack_tokens": preprocess.pack_tokens,
        "weights.bucket_mib": config.weights.bucket_mib,
        "cluster.time_min": cluster.time_min,
    }
    for key, value in at_least_one.items():
        if value < 1:
            yield f"{key} = {value}: must be at least 1"
    if train.kl_coefficient and preprocess.reference == "none":
        yield (
            f"train.kl_coefficient = {train.kl_coefficient}: the KL term needs the log-probs of a reference model, but "
            f"preprocess.reference is none; set the coefficient to 0"
        )
    if train.sequence_parallel and train.tensor_parallel == 1:
        yield "train.sequence_parallel = true: needs train.tensor_parallel above 1; switch it off"
    if not cluster.gpus_per_node and sample.kv_cache_mib is None:
        yield "sample.kv_cache_mib = null: without accelerators the KV cache needs a size in MiB, e.g. 256"
    if actor.max_tokens >= sample.max_model_len:
        yield (
            f"actor.max_tokens = {actor.max_tokens}: leaves no room for a prompt in sample.max_model_len = "
            f"{sample.max_model_len}; lower the one or raise the other"
        )
    if preprocess.pack_tokens <= actor.max_tokens:
        yield (
            f"preprocess.pack_tokens = {preprocess.pack_tokens}: an answer of actor.max_tokens = {actor.max_tokens} and its "
            f"prompt do not fit, so that it would be discarded; set at least sample.max_model_len = {sample.max_model_len}"
        )
    if actor.temperature <= 0:
        yield f"actor.temperature = {actor.temperature}: must be above 0; greedy answers of a group are all the same"
    if not 0 < actor.top_p <= 1:
        yield f"actor.top_p = {actor.top_p}: must be above 0 and at most 1"


def _domains(config: Config) -> Iterator[str]:
    if not config.domains:
        yield "domains is empty: name at least one task, e.g. domains: [{name: digits}]"
    for number, domain in enumerate(config.domains):
        if domain.weight <= 0:
            yield f"domains[{number}].weight = {domain.weight}: must be above 0; remove the domain to leave it out"
        for key, value in domain.options.items():
            paths = [value] if isinstance(value, str) else value
            if is_path_key(key) and isinstance(paths, list | tuple):
                for path in paths:
                    if not Path(str(path)).exists():
                        yield f"domains[{number}].options.{key} = {path}: no such file; name the data of domain {domain.name}"


def _folder(config: Config) -> Iterator[str]:
    folder = Path(config.run.folder)
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        yield (
            f"run.folder = {folder}: already holds another run; go on with it by prl-submit --resume {folder}, or choose "
            f"another run.folder or run.name"
        )


def _machine(config: Config, model: Mapping[str, Any] | None, memory_bytes: int) -> Iterator[str]:
    """Is this machine big enough for a run without Slurm?"""
    gpus = config.cluster.gpus_per_node
    if gpus:
        found = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if found < gpus:
            yield f"cluster.gpus_per_node = {gpus}: this machine has {found}; lower it, or send the run to Slurm with --nodes"
        return
    if model is None:
        return
    needed = estimate_memory_bytes(config, model)
    if needed > memory_bytes:
        yield (
            f"this machine has {memory_bytes / _GIB:.1f} GiB of memory free, the run needs about {needed / _GIB:.1f}: lower "
            f"sample.kv_cache_mib = {config.sample.kv_cache_mib}, cluster.replicas_per_node, actor.processes or "
            f"verifier.processes, take a smaller model, or send the run to Slurm with --nodes"
        )


def estimate_memory_bytes(config: Config, model: Mapping[str, Any]) -> int:
    """What a run on this machine alone needs, without accelerators: processes, weights, optimizer and KV caches."""
    parameters = count_parameters(model)
    ranks = config.cluster.train_devices or config.train.tensor_parallel
    replicas = config.cluster.replicas_per_node or 1
    trained = parameters * _TRAINED_PARAMETER_BYTES // max(config.train.tensor_parallel, 1)
    sampled = parameters * (4 if config.sample.dtype == "float32" else 2)
    small = 2 + config.actor.processes + config.verifier.processes
    return (
        ranks * (_TRAINER_BYTES + trained)
        + parameters * _LOADING_BYTES
        # weights twice: those in use and the version that arrives
        + replicas * (_SAMPLER_BYTES + 2 * sampled + (config.sample.kv_cache_mib or 0) * _MIB)
        + small * _SMALL_PROCESS_BYTES
    )


def count_parameters(model: Mapping[str, Any]) -> int:
    """Parameters of a dense decoder, from its config.json; norms and biases left out."""
    hidden, heads = int(model["hidden_size"]), int(model["num_attention_heads"])
    head_dim = int(model.get("head_dim") or hidden // heads)
    kv_heads = int(model.get("num_key_value_heads") or heads)
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    layer = attention + 3 * hidden * int(model["intermediate_size"])
    embeddings = (1 if model.get("tie_word_embeddings") else 2) * int(model["vocab_size"]) * hidden
    return int(model["num_hidden_layers"]) * layer + embeddings


def _free_memory_bytes() -> int:
    """Free memory of the machine, or of the container where that has a limit of its own."""
    free = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def _warnings(config: Config, model: Mapping[str, Any] | None) -> list[str]:
    found = []
    for key, value in (("temperature", config.actor.temperature), ("top_p", config.actor.top_p)):
        if value != 1:
            found.append(f"actor.{key} = {value}: training assumes 1; the importance ratios will be biased")
    if config.preprocess.pack_tokens < config.sample.max_model_len:
        found.append(
            f"preprocess.pack_tokens = {config.preprocess.pack_tokens} is below sample.max_model_len = "
            f"{config.sample.max_model_len}: longer rollouts are discarded"
        )
    return found
