"""Questions to Slurm, each with a time-out."""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import product
from typing import Literal, NamedTuple

from prl.cluster.requests import Request
from prl.cluster.run import Output, ProgramError, Runner, beyond_signals, run
from prl.cluster.slurm_output import (
    ACCOUNTING_FIELDS,
    NODE_FORMAT,
    QUEUE_FORMAT,
    Expected,
    JobRow,
    NodeRow,
    fold_states,
    has_ended,
    parse_accounting,
    parse_expected,
    parse_nodes,
    parse_queue,
    parse_runs,
    parse_state,
)

LIMIT_S = 60.0  # Slurm keeps time limits by the minute
_FIELD = re.compile(r"(\w+)=(\S*)")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")  # else None, Unknown or N/A
_CLUSTER = re.compile(r"^ClusterName\s*=\s*(\S+)", re.MULTILINE)
_ADVICE = {  # what Slurm says: what to do about it
    "Requested operation not supported": "this site starts no heterogeneous jobs: set cluster.mode: plain",
    "Invalid account": "set cluster.account; sacctmgr show associations user=$USER lists yours",
    "Invalid qos": "set cluster.qos; sacctmgr show qos lists them",
    "Invalid partition": "set cluster.partition; sinfo lists them",
    "Invalid feature": "set the constraint in cluster.sbatch; sinfo -o '%P %f' lists the features",
    "Invalid generic resource": "set cluster.gpu_request and cluster.gpu_type; sinfo -o '%P %G' lists what nodes have",
    "node configuration is not available": "lower cluster.nodes, cluster.cpus_per_node, cluster.memory_per_node_gib or "
    "cluster.gpus_per_node",
    "Requested time limit": "lower cluster.time_min",
    "QOS": "a limit of your account or QOS: lower what is asked for, wait for other jobs, or set cluster.qos",
}

Termination = Literal["preempted", "requeued", "node failure", "time limit", "cancelled"]


def advice(said: str) -> str:
    """What to do about a refusal of Slurm's, to be put behind it; empty where that is not known."""
    return next((f"; {words}" for key, words in _ADVICE.items() if key in said), "")


class SlurmError(Exception):
    """Slurm does not answer, or cannot do what is asked; the message says what to do."""


def check_slurm(requests: Sequence[Request], runner: Runner = run) -> None:
    """Whether a controller answers and each component's partition has as many nodes as it needs, each with what is asked of
    it, also all components at once (Slurm itself lets a job that can never start wait for ever, and what lies behind it in
    the queue, too). Raises SlurmError."""
    total = sum(request.nodes for request in requests)
    wanted = f"the run asks for {total} Slurm node{'s' * (total != 1)}"
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
    try:
        rows = parse_nodes(runner(["sinfo", "-h", "-N", "-a", "-o", NODE_FORMAT], timeout_s=30.0).out)
    except ProgramError as error:
        raise SlurmError(str(error)) from None
    fitting = max((set[str]().union(*chosen) for chosen in product(*(_candidates(r, rows) for r in requests))), key=len)
    if len(fitting) < total:
        names = " and ".join(dict.fromkeys(_place(request) for request in requests))
        raise SlurmError(
            f"{wanted}, but {names} {'have' if ' and ' in names else 'has'} {len(fitting)} that fit; "
            "the job would wait for ever"
        )


def _candidates(request: Request, rows: Sequence[NodeRow]) -> list[set[str]]:
    """The nodes that fit a component, in each of the partitions that it could start in: Slurm chooses one of those that are
    named. Raises SlurmError where it could start in none, or one is not known."""
    found, refused = list[set[str]](), list[str]()
    for one in _by_partition(request):
        own = _of_partition(one, rows)
        try:
            found.append(_fitting(one, own))
        except SlurmError as error:
            refused.append(str(error))
    if not found:
        raise SlurmError("\n".join(refused))
    return found


def _by_partition(request: Request) -> list[Request]:
    names = request.partition.split(",")
    return [replace(request, options={**request.options, "partition": name}) for name in names] if len(names) > 1 else [request]


def _of_partition(request: Request, rows: Sequence[NodeRow]) -> list[NodeRow]:
    """The rows of the partition that a job of these options goes to. Where none is named, all of them: the default partition is
    not what counts where a site chooses by other options."""
    if not request.partition:
        return list(rows)
    found = [row for row in rows if row.partition == request.partition]
    if not found:
        raise SlurmError(
            f"{_partition_key(request)} = {request.partition}: Slurm knows no nodes of it; it has "
            f"{', '.join(dict.fromkeys(row.partition for row in rows)) or 'none'}"
        )
    return found


def _fitting(request: Request, rows: Sequence[NodeRow]) -> set[str]:
    """Names of the nodes that have what one component asks of each. Raises SlurmError where they are too few, or its time
    limit is above the partition's."""
    limits = [row.limit_min for row in rows if row.limit_min is not None]
    if (
        limits and len(limits) == len(rows) and request.time_min > max(limits) and not request.qos
    ):  # a QOS may lift a partition's limit
        raise SlurmError(
            f"cluster.time_min = {request.time_min}: {_place(request)} allows {max(limits)} minutes; lower it, or name another "
            f"cluster.partition"
        )
    names = {row.name for row in rows}
    wanted = f"the run asks for {request.nodes} node{'s' * (request.nodes != 1)}{_of_component(request)}"
    if len(names) < request.nodes:
        raise SlurmError(f"{wanted}, but {_place(request)} has {len(names)}; the job would wait for ever")
    asked = _Node(request.cpus, request.memory_mib, request.gpus)
    nodes = {row.name: _Node(row.cpus, row.memory_mib, row.gpus) for row in rows}
    fitting = {name for name, has in nodes.items() if all(has[k] >= asked[k] for k in range(3))}
    if len(fitting) < request.nodes:
        largest = _Node(*map(max, zip(*nodes.values(), strict=True)))
        raise SlurmError(
            f"{wanted} with {_words(asked, asked)} each, but {_place(request)} has "
            f"{len(fitting)} of that kind, its nodes having at most {_words(largest, asked)}; the job would wait for "
            f"ever: lower cluster.cpus_per_node, cluster.memory_per_node_gib or cluster.gpus_per_node, or name another "
            f"cluster.partition"
        )
    return fitting


def _of_component(request: Request) -> str:
    return "" if request.component == "all" else f" that {request.component}{'s' * (request.nodes == 1)}"


def _partition_key(request: Request) -> str:
    return "cluster.partition" if request.component == "all" else f"cluster.partition (or cluster.sbatch_{request.component})"


class _Node(NamedTuple):
    cpus: float
    memory_mib: float
    gpus: float


def _place(request: Request) -> str:
    return f"partition {request.partition}" if request.partition else "the cluster"


def _words(node: _Node, asked: _Node) -> str:
    """What it has of what is asked for."""
    parts = (f"{node.cpus:g} CPUs", f"{node.memory_mib / 1024:.4g} GiB of memory", f"{node.gpus:g} GPUs")
    return " and ".join(part for part, asks in zip(parts, asked, strict=True) if asks)


def job_rows(job_id: str, runner: Runner = run) -> list[JobRow]:
    """A job's components, as the queue (which forgets them some minutes after their end) or else the accounting knows them;
    none where neither does. `job_id` is that of a heterogeneous job's leader. Raises ProgramError where Slurm does not answer,
    or what it says cannot be read."""
    queue: Output = runner(["squeue", "-h", "-j", job_id, "-t", "all", "-o", QUEUE_FORMAT], timeout_s=30.0, check=False)
    if queue.code == 0 and queue.out.split():
        return parse_queue(queue.out)
    if queue.code != 0 and "Invalid job id" not in queue.err:
        raise ProgramError(f"squeue: {queue.err.strip() or queue.out.strip()}")
    return parse_accounting(_accounting(["-j", job_id], runner))


def past_runs(job_id: str, runner: Runner = run) -> list[list[JobRow]]:
    """What became of a job each time that it was put into the queue, the last time included, as the accounting knows it; a row
    for each component. Raises ProgramError."""
    return parse_runs(_accounting(["-D", "-j", job_id], runner))


def _accounting(arguments: Sequence[str], runner: Runner) -> str:
    """What sacct prints, nothing where a cluster keeps no accounts. Raises ProgramError."""
    answer: Output = runner(["sacct", "-X", "-P", *arguments, "-o", ACCOUNTING_FIELDS], timeout_s=30.0, check=False)
    if answer.code == 0:
        return answer.out
    if "accounting storage is disabled" in answer.err:
        return ""
    raise ProgramError(f"sacct: {answer.err.strip() or answer.out.strip()}")


def jobs_in_queue(job_ids: Sequence[str], runner: Runner = run) -> list[str]:
    """Which of these jobs wait or run, in their order. Raises ProgramError where Slurm does not answer."""
    if not job_ids:
        return []
    queue: Output = runner(["squeue", "-h", "-j", ",".join(job_ids), "-o", QUEUE_FORMAT], timeout_s=10.0, check=False)
    if queue.code != 0 and "Invalid job id" not in queue.err:
        raise ProgramError(f"squeue: {queue.err.strip() or queue.out.strip()}")
    found = {row.job_id for row in parse_queue(queue.out) if not has_ended(row.state)}
    return [job_id for job_id in job_ids if job_id in found]


def cancel_waiting(job_ids: Sequence[str], runner: Runner = run) -> None:
    """End those of a chain's jobs that wait, the last one first: each would begin once the one before it is gone. Raises
    ProgramError."""
    with beyond_signals():
        runner(["scancel", "--state=PENDING", *reversed(job_ids)], timeout_s=30.0)


def cluster_name(runner: Runner = run) -> str | None:
    """The cluster's name in Slurm; None where Slurm does not say it. Nothing depends on it but what people are told."""
    try:
        found = _CLUSTER.search(runner(["scontrol", "show", "config"], timeout_s=10.0).out)
    except ProgramError:
        return None
    return found[1] if found else None


def why_terminated(job_id: str, now: float, restarts: int, runner: Runner = run) -> Termination | None:
    """Why Slurm sends the job, or a component of it, SIGTERM at `now` (seconds since the epoch). `restarts`: how often it had
    been put into the queue again before. None where the job goes on: somebody has sent it the signal, or srun ends its step, as
    a task of it has ended. Raises ProgramError where Slurm does not answer, or what it says cannot be read."""
    with beyond_signals():
        shown = runner(["scontrol", "-o", "show", "job", job_id], timeout_s=10.0).out  # all components
    return termination(shown, now, restarts)


def termination(shown: str, now: float, restarts: int) -> Termination | None:
    """The same by what `scontrol -o show job` prints. Raises SlurmOutputError."""
    found = _FIELD.findall(shown)
    states = {value for name, value in found if name == "JobState"}  # COMPLETING, as long as Slurm waits for its processes
    reasons = {value for name, value in found if name == "Reason"}
    if "NODE_FAIL" in states or "NodeDown" in reasons:
        return "node failure"
    if "PREEMPTED" in states or any(name == "PreemptTime" and _TIME.fullmatch(value) for name, value in found):
        return "preempted"
    if _restarts(found) > restarts:
        return "requeued"
    if "TIMEOUT" in states or "TimeLimit" in reasons:
        return "time limit"
    # Of a job that is cancelled EndTime is now; of one that still runs it is the limit.
    limits = [_seconds(value) for name, value in found if name == "EndTime" and _TIME.fullmatch(value)]
    if {parse_state(state) for state in states} != {"RUNNING"}:
        return "cancelled"
    return "time limit" if any(now >= limit - LIMIT_S for limit in limits) else None


def still_runs(shown: str, restarts: int) -> bool:
    """Whether a job that has begun for the (`restarts` + 1)th time has not ended since then, nor been put into the queue again,
    by what `scontrol -o show job` prints (nothing, where it does not answer). Raises SlurmOutputError."""
    found = _FIELD.findall(shown)
    if _restarts(found) != restarts:
        return False
    return {parse_state(value) for name, value in found if name == "JobState"} == {"RUNNING"}


def _restarts(found: Sequence[tuple[str, str]]) -> int:
    return max((int(value) for name, value in found if name == "Restarts" and value.isdecimal()), default=0)


def requeue(job_id: str, runner: Runner = run) -> None:
    """Put a running job (of a heterogeneous one the whole, by its first component's id) into the queue again, which ends it
    here. Raises ProgramError."""
    with beyond_signals():
        runner(["scontrol", "requeue", job_id], timeout_s=30.0)


def _seconds(time: str) -> float:
    """Of a time as scontrol prints it, in this node's zone."""
    return datetime.fromisoformat(time).timestamp()


def job_state(job_id: str, runner: Runner = run) -> str | None:
    """State of a job, over all its components; None where neither the queue nor the accounting knows it (any more).
    Raises ProgramError."""
    rows = job_rows(job_id, runner)
    return fold_states([row.state for row in rows]) if rows else None


def expected_start(script: str, runner: Runner = run) -> Expected:
    """When the scheduler would start a batch script's job, as it estimates now. Nothing is sent. Raises ProgramError where
    it does not answer."""
    answer: Output = runner(["sbatch", "--test-only"], timeout_s=60.0, check=False, stdin=script)
    return parse_expected(f"{answer.err}\n{answer.out}")
