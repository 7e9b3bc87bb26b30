"""Whether a run without Slurm fits this machine: its memory, its accelerators, its network and what is installed."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import psutil

from prl.config.hf_config import ModelConfig
from prl.config.layout import Layout, layout_of
from prl.config.memory import kept_bytes, microbatch_tokens, rank_memory, rank_parameters, saved_on_a_node
from prl.config.schema import Config

_MIB = 1024**2
_GIB = 1024**3
_CGROUPS = Path("/sys/fs/cgroup")  # where they are mounted

# Resident memory of a process beside weights, training state and KV cache, which are counted from the model. Measured on the
# quickstart (two cores, no GPU, a model of 0.5 MB, a KV cache of 64 MiB): a sampler with its engine 1.4 GB, a trainer rank
# 1.0 GB, an actor or the preprocessor 0.12 GB. Pages that processes share count in each, so the sum is on the safe side.
_SAMPLER_BYTES = 1270 * _MIB
_TRAINER_BYTES = 950 * _MIB
_SMALL_PROCESS_BYTES = 115 * _MIB  # orchestrator, preprocessor, actors, verifiers and their workers
_LOADING_BYTES = 4  # a full copy while weights are loaded or sent


def machine_problems(config: Config, model: ModelConfig | None, memory_bytes: int) -> Iterator[str]:
    """What this machine, with so much memory free, lacks for the run; a model that is not known is left out of account."""
    gpus, interface, there = config.cluster.gpus_per_node, config.cluster.interface, psutil.net_if_addrs()
    if interface is not None and interface not in there:
        yield f"cluster.interface = {interface}: this machine has {', '.join(there)}; name one of these, or null"
    yield from _missing_programs(config)
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
            f"preprocess.pack_tokens = {config.preprocess.pack_tokens}, sample.kv_cache_mib = {config.sample.kv_cache_mib}, "
            f"cluster.replicas_per_node, actor.processes or verifier.processes, set train.recompute, take a smaller model, or "
            f"send the run to Slurm with --nodes"
        )


def _missing_programs(config: Config) -> Iterator[str]:
    """What is no part of every installation, and is asked for, or is there and stands in the way."""
    if config.streams.backend == "redis":
        if find_spec("redis") is None:
            yield (
                "streams.backend = redis: redis-py is not installed here; pip install '.[redis]', or set streams.backend: "
                "folder"
            )
        if config.streams.redis.start and shutil.which("redis-server") is None:
            yield (
                "streams.redis.start = true: there is no redis-server on PATH; install Redis (Debian: apt-get install "
                "redis-server), give streams.redis.url, or set streams.backend: folder"
            )
    train, has_engine = config.train, find_spec("transformer_engine") is not None
    if config.cluster.gpus_per_node and train.lora_rank and has_engine:
        yield (
            f"train.lora_rank = {train.lora_rank}: adapters are for models without Transformer Engine, which is installed "
            f"here; set it to 0, or use an environment without that"
        )
    if config.cluster.gpus_per_node and train.context_parallel > 1 and not has_engine:
        yield (
            f"train.context_parallel = {train.context_parallel}: needs Transformer Engine, which is not installed here; "
            f"install it, or set 1"
        )


def estimate_memory_bytes(config: Config, model: ModelConfig) -> int:
    """What a run on this machine alone needs, without accelerators: processes, weights, optimizer, KV caches,
    the activations of the largest micro-batch that a step can have and the copy that a checkpoint is written from."""
    parameters = count_parameters(model)
    ranks = config.cluster.train_devices or layout_of(config.train).unit
    stages = config.train.pipeline_parallel
    tokens = microbatch_tokens(config)
    trained = [rank_memory(model, config.train, ranks, tokens, stage).total for stage in range(stages)]
    replicas = config.cluster.replicas_per_node or 1
    sampled = parameters * (4 if config.sample.dtype == "float32" else 2)
    builders = config.preprocess.processes if config.preprocess.processes > 1 else 0
    small = 2 + config.actor.processes + config.verifier.processes + builders
    return (
        ranks * _TRAINER_BYTES
        + ranks // stages * sum(trained)
        + saved_on_a_node(model, config.train, ranks, ranks)
        + (ranks if config.weights.transport == "lanes" else 1) * kept_bytes(config, model, ranks)
        + parameters * _LOADING_BYTES
        # weights twice: those in use and the version that arrives, unless it is written over them
        + replicas
        * (
            _SAMPLER_BYTES
            + (1 if config.weights.staging == "chunked" else 2) * sampled
            + (config.sample.kv_cache_mib or 0) * _MIB
        )
        + small * _SMALL_PROCESS_BYTES
    )


def count_parameters(model: ModelConfig) -> int:
    return rank_parameters(model, Layout(tensor=1, pipeline=1, virtual=1, context=1, expert=1), 0).all


def free_memory_bytes() -> int:
    """Free memory of the machine, or of what this process is in where that has a limit: a container, a job of Slurm's."""
    limited = (cgroup_free_bytes(_CGROUPS, group) for group in own_groups(_own_cgroups()))
    return min([int(psutil.virtual_memory().available), *(free for free in limited if free is not None)])


def memory_kills() -> int:
    """How many processes of this one's control group the kernel has killed so far, as memory ran out; 0 where it does not count
    them."""
    innermost_first = sorted(own_groups(_own_cgroups()), key=len, reverse=True)
    counts = (cgroup_kills(_CGROUPS, group) for group in innermost_first)
    return next((count for count in counts if count is not None), 0)


def _own_cgroups() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except FileNotFoundError:  # a kernel without them
        return ""


def own_groups(text: str) -> list[str]:
    """The control groups that limit this process's memory, from /proc/self/cgroup: its own and those around it. In a container
    those that it cannot see do not exist."""
    paths = [path for _, kinds, path in (line.split(":", 2) for line in text.splitlines()) if kinds in ("", "memory")]
    around = [PurePosixPath(path.lstrip("/")) for path in paths]
    return sorted({"", *(str(group) for path in around for group in (path, *path.parents) if str(group) != ".")})


def cgroup_free_bytes(root: Path, group: str = "") -> int | None:
    """What a control group leaves: its limit less what is used, where files that the kernel keeps in memory and would give up
    (inactive_file) count as free. `root` is where cgroups are mounted, version 2 or 1. None where there is no limit."""
    for folder, limit_name, used_name, inactive in (
        (root / group, "memory.max", "memory.current", "inactive_file"),
        (root / "memory" / group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except FileNotFoundError:
            continue
        return None if limit == "max" else int(limit) - used + int(counts.get(inactive, 0))
    return None


def cgroup_kills(root: Path, group: str = "") -> int | None:
    """Processes of a control group that the kernel has killed as memory ran out, its own or the machine's; in version 2 also
    those of the groups below. None where `root` has no such group, or does not count them."""
    for path in (root / group / "memory.events", root / "memory" / group / "memory.oom_control"):
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
        except FileNotFoundError:
            continue
        return int(counts["oom_kill"]) if "oom_kill" in counts else None
    return None
