"""Questions to Slurm, each with a time-out."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Literal, NamedTuple

from prl.cluster.executors import GOING_ON, fold_states
from prl.cluster.run import Output, ProgramError, Runner, run
from prl.cluster.split import Split
from prl.config.schema import Config

LIMIT_S = 60.0  # Slurm keeps time limits by the minute
_FIELD = re.compile(r"(\w+)=(\S*)")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")  # else None, Unknown or N/A
_GPUS = re.compile(r"(?:^|,)gpu:(?:(?:[^:,()]+|\(null\)):)?(\d+)")  # in "gpu:h100:4(S:0-1),nic:2"


class SlurmError(Exception):
    """Slurm does not answer, or cannot do what is asked; the message says what to do."""


def check_slurm(config: Config, split: Split, runner: Runner = run) -> None:
    """Whether a controller answers and the partition has as many nodes as the job needs, each with what it asks of a node
    (Slurm itself lets a heterogeneous job that can never start wait for ever). Raises SlurmError."""
    wanted = f"the run asks for {split.nodes} Slurm nodes"
    local = "run without --nodes and with cluster.nodes: null to use this machine alone"
    try:
        ping: Output = runner(["scontrol", "ping"], timeout_s=15.0, check=False)
    except ProgramError as error:
        raise SlurmError(f"{wanted}, but {error}; submit from a login node, or {local}") from None
    if " UP" not in ping.out:
        said = (ping.out.strip() or ping.err.strip()).splitlines()
        raise SlurmError(
            f"{wanted}, but no Slurm controller answers (scontrol ping: "
            f"{said[0] if said else 'no output'}); ask the site's operators, or {local}"
        )
    partition = config.cluster.partition
    asked = ["sinfo", "-h", "-N", "-o", "%N|%c|%m|%G", *(["-p", partition] if partition else [])]
    try:
        nodes = _nodes(runner(asked, timeout_s=30.0).out)
    except ProgramError as error:
        raise SlurmError(str(error)) from None
    except ValueError as error:
        raise SlurmError(f"sinfo: its answer to {' '.join(asked)} cannot be read: {error}") from error
    where = f"partition {partition}" if partition else "the cluster"
    if not nodes:
        raise SlurmError(f"cluster.partition = {partition}: Slurm knows no nodes of it (sinfo lists the partitions)")
    if len(nodes) < split.nodes:
        raise SlurmError(f"the run asks for {split.nodes} nodes, but {where} has {len(nodes)}; the job would wait for ever")
    cluster = config.cluster
    asked_of_each = _Node(cluster.cpus_per_node or 0, (cluster.memory_per_node_gib or 0) * 1024, cluster.gpus_per_node)
    fitting = [node for node in nodes.values() if all(has >= asks for has, asks in zip(node, asked_of_each, strict=True))]
    if len(fitting) < split.nodes:
        largest = _Node(*map(max, zip(*nodes.values(), strict=True)))
        raise SlurmError(
            f"the run asks for {split.nodes} nodes with {_words(asked_of_each, asked_of_each)} each, but {where} has "
            f"{len(fitting)} of that kind, its nodes having at most {_words(largest, asked_of_each)}; the job would wait for "
            f"ever: lower cluster.cpus_per_node, cluster.memory_per_node_gib or cluster.gpus_per_node, or name another "
            f"cluster.partition"
        )


class _Node(NamedTuple):
    cpus: float
    memory_mib: float
    gpus: float


def _nodes(text: str) -> Mapping[str, _Node]:
    """Nodes by name, from sinfo's lines name|CPUs|MiB|generic resources."""
    found = {}
    for name, cpus, memory, resources in (line.split("|") for line in text.splitlines() if line.strip()):
        found[name.strip()] = _Node(int(cpus), int(memory), sum(map(int, _GPUS.findall(resources))))
    return found


def _words(node: _Node, asked: _Node) -> str:
    """What it has of what is asked for."""
    parts = (f"{node.cpus:g} CPUs", f"{node.memory_mib / 1024:.4g} GiB of memory", f"{node.gpus:g} GPUs")
    return " and ".join(part for part, asks in zip(parts, asked, strict=True) if asks)


def job_state(job_id: str, runner: Runner = run) -> str | None:
    """State of a job, over all its components; None where neither the queue nor the accounting knows it (any more).
    Raises ProgramError where Slurm does not answer."""
    queue: Output = runner(["squeue", "-h", "-j", job_id, "-o", "%T"], timeout_s=30.0, check=False)
    if queue.code == 0 and queue.out.split():
        return fold_states(queue.out.splitlines())
    if queue.code != 0 and "Invalid job id" not in queue.err:
        raise ProgramError(f"squeue: {queue.err.strip() or queue.out.strip()}")
    account: Output = runner(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"], timeout_s=30.0, check=False)
    if account.code != 0 and "accounting storage is disabled" not in account.err:
        raise ProgramError(f"sacct: {account.err.strip() or account.out.strip()}")
    states = [line for line in account.out.splitlines() if line.strip()]
    return fold_states(states) if states else None


def why_terminated(job_id: str, now: float, runner: Runner = run) -> Literal["preempted", "time limit", "cancelled"]:
    """Why Slurm sends the job SIGTERM at `now` (seconds since the epoch). Raises ProgramError where it does not answer."""
    found = _FIELD.findall(runner(["scontrol", "-o", "show", "job", job_id], timeout_s=10.0).out)  # of all components
    states = {value for name, value in found if name == "JobState"}
    if "PREEMPTED" in states or any(name == "PreemptTime" and _TIME.fullmatch(value) for name, value in found):
        return "preempted"
    if "TIMEOUT" in states:
        return "time limit"
    # Of a job that is cancelled EndTime is now; of one that still runs it is the limit.
    limits = [_seconds(value) for name, value in found if name == "EndTime" and _TIME.fullmatch(value)]
    over = states == {"RUNNING"} and any(now >= limit - LIMIT_S for limit in limits)
    return "time limit" if over else "cancelled"


def requeue(job_id: str, runner: Runner = run) -> None:
    """Put a running job (of a heterogeneous one the whole, by its first component's id) into the queue again, which ends it
    here. Raises ProgramError."""
    runner(["scontrol", "requeue", job_id], timeout_s=30.0)


def _seconds(time: str) -> float:
    """Of a time as scontrol prints it, in this node's zone."""
    return datetime.fromisoformat(time).timestamp()


def ended(state: str | None) -> bool:
    """Whether a state is one that does not change any more."""
    return state not in GOING_ON
