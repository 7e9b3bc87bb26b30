"""What a run would look like, and whether accelerators and nodes have the memory that it needs."""

import math
import shutil
from collections.abc import Iterator, Sequence

from prl.cli import console
from prl.cluster.requests import Request, requests
from prl.cluster.script import render
from prl.cluster.split import Split
from prl.config.accelerators import accelerator_gib
from prl.config.layout import layout_problems
from prl.config.machine import free_memory_bytes
from prl.config.memory import (
    describe_memory,
    describe_weights,
    fullest_rank,
    gathered_bytes,
    kept_bytes,
    microbatch_tokens,
    saved_on_a_node,
    size_in_words,
)
from prl.config.model_checks import model_of
from prl.config.schema import Config
from prl.config.staging import describe_staging
from prl.runfolder.paths import RunFolder

JOB_BEFORE = "JOB"  # stands for the id of a job that was not sent


def show_scripts(config: Config, split: Split, folder: RunFolder, attempt: int) -> None:
    """Print the batch script of a Slurm job, and that of those behind it in a chain."""
    if split.kind == "local":
        return
    chain = config.cluster.chain
    print(f"batch script:\n{render(config, split, folder, attempt)}")
    if chain > 1:
        print(
            f"batch script of job 2{f' to {chain}' * (chain > 2)} of the chain, with the id of the one before it for "
            f"{JOB_BEFORE}:\n{render(config, split, folder, attempt, after=JOB_BEFORE)}"
        )


def show_plan(config: Config, split: Split, folder: RunFolder) -> None:
    """Print the split, what it asks of Slurm, and the memory that it takes as far as that is known."""
    print(f"run {config.run.name} in {folder}\n{split.describe()}")
    model = model_of(config)
    if model is None:
        print("  what a trainer rank needs in memory depends on the model, which is not there yet")
    elif not any(layout_problems(config.train, model)):
        sent = gathered_bytes(config, model), kept_bytes(config, model, split.world_size)
        print(describe_memory(model, config.train, split.world_size, microbatch_tokens(config), *sent))
        room_gib, said_by = accelerator_gib(config.cluster)
        if config.cluster.gpus_per_node and room_gib is not None:
            print(f"  an accelerator has {room_gib:g} GiB ({said_by})")
        saved = saved_on_a_node(model, config.train, split.world_size, _ranks_of_a_node(split))
        print(f"  a checkpoint is written from a copy of up to {size_in_words(saved)} in the memory of a node")
    if model is not None and not config.run.replay:
        print(describe_weights(model, config))
        print(describe_staging(config, model))
    if split.kind != "local":
        gpus, time_min, chain = config.cluster.gpus_per_node, config.cluster.time_min, config.cluster.chain
        used, unit = split.nodes * (gpus or 1) * time_min / 60, "GPU-hours" if gpus else "node-hours"
        print(f"  at the time limit of {time_min} minutes it has used {used:g} {unit}", end="")
        print(f", and {used * chain:g} at that of all {chain} jobs of the chain" if chain > 1 else "")
        asked = requests(config, split)
        named = (f"{key} {_named(key, asked)}" for key in ("partition", "account", "qos"))
        print(f"  {', '.join(named)} (--partition, --account, --qos)")
        if shutil.which("sbatch") is None:
            print("  there is no sbatch here: submit it on a login node of the cluster")


def _named(key: str, asked: Sequence[Request]) -> str:
    """What the components ask for of that name, of each its own where they differ."""
    values = [str(request.options.get(key, "")) or "the site's default" for request in asked]
    return (
        values[0] if len(set(values)) == 1 else " and ".join(f"{v} ({r.component})" for v, r in zip(values, asked, strict=True))
    )


def memory_problems(config: Config, split: Split) -> Iterator[str]:
    """Where a trainer rank needs more than its accelerator has, or a node's ranks more than the node; warns where an
    accelerator's is not known."""
    model, gpus = model_of(config), config.cluster.gpus_per_node
    if model is None or any(layout_problems(config.train, model)):
        return  # which is said
    room_gib, said_by = accelerator_gib(config.cluster)
    sent = gathered_bytes(config, model), kept_bytes(config, model, split.world_size)
    _, memory = fullest_rank(model, config.train, split.world_size, microbatch_tokens(config), *sent)
    if room_gib is None and gpus:
        console.tell(
            f"prl-submit: warning: {said_by}: whether an accelerator holds the {memory.total / 2**30:.1f} "
            f"GiB that a trainer rank needs is not checked; set it to an accelerator's memory"
        )
    if room_gib is not None and memory.total > room_gib * 2**30:
        of_type = config.cluster.gpu_memory_gib is None
        has = f", which has {room_gib:g} GiB" if of_type else ""
        yield (
            f"{said_by}{has}: a trainer rank needs about {memory.total / 2**30:.1f}; raise "
            f"train.tensor_parallel or train.pipeline_parallel, set train.distributed_optimizer, train.optimizer_offload or "
            f"train.recompute, or lower preprocess.pack_tokens; --dry-run shows the parts"
            f"{'; where yours has more, set cluster.gpu_memory_gib' * of_type}"
        )
    ranks = _ranks_of_a_node(split)
    saved = saved_on_a_node(model, config.train, split.world_size, ranks)
    yield from _node_memory_problems(config, split, ranks * (memory.on_the_host + (0 if gpus else memory.total)), saved)


def _node_memory_problems(config: Config, split: Split, held: int, saved: int) -> Iterator[str]:
    """What a node's trainer ranks hold, and copy for a checkpoint; a run on this machine's CPUs is checked with all else
    (`machine_problems`)."""
    if split.kind == "local":
        if not config.cluster.gpus_per_node:
            return
        has = free_memory_bytes() / 2**30
        who = f"this machine has {has:.1f} GiB of memory free"
    else:
        asked_mib = requests(config, split)[0].memory_mib  # the first component trains
        has = asked_mib / 1024 or math.inf  # 0: all of it, or the partition's default
        who = f"a node that trains gets {has:.4g} GiB (cluster.memory_per_node_gib, or cluster.sbatch_train.mem)"
    if held + saved > has * 2**30:
        how = ", with train.optimizer_offload = true" if config.train.optimizer_offload else ""
        yield (
            f"{who}: a node's {_ranks_of_a_node(split)} trainer ranks need about {size_in_words(held + saved)}{how}, "
            f"{size_in_words(saved)} of it for the copy that a checkpoint is written from; give it more, or fewer of them"
        )


def _ranks_of_a_node(split: Split) -> int:
    return max(component.node.trainer_ranks for component in split.components)
