"""Options of where a run runs: nodes, devices, and what Slurm is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from prl.config.bounds import Above, AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    nodes: Annotated[int | None, "nodes in all; null: this machine, without Slurm", AtLeast(1), Below(10**5)] = None
    train_nodes: Annotated[int, "nodes of the component that trains; the others sample", AtLeast(1), Below(10**5)] = 1
    train_devices: Annotated[
        int | None,
        "with one node: accelerators (without any: processes) that train; null: as many as one model is shared by",
        AtLeast(1),
        Below(10**4),
    ] = None
    gpus_per_node: Annotated[int, "accelerators a node; 0: train and sample on CPUs (gloo)", AtLeast(0), Below(10**4)] = 0
    gpu_memory_gib: Annotated[
        float | None,
        "memory of an accelerator in GiB, which a trainer rank must fit; null: not checked, with a warning",
        Above(0),
    ] = None
    replicas_per_node: Annotated[
        int | None, "samplers a node; null: as many as the devices allow, 1 on CPUs", AtLeast(1), Below(10**4)
    ] = None
    cpus_per_node: Annotated[
        int | None, "CPUs asked of Slurm a node; null: the partition's default", AtLeast(1), Below(10**5)
    ] = None
    memory_per_node_gib: Annotated[
        float | None, "memory asked of Slurm a node, in GiB; null: the partition's default", Above(0)
    ] = None
    time_min: Annotated[int, "time limit of the job, in minutes", AtLeast(1), Below(10**7)] = 60
    warning_s: Annotated[
        int,
        "seconds before the time limit at which Slurm warns the run, which then saves after the step in hand and ends; more "
        "where steps and saves of earlier attempts took longer",
        AtLeast(1),
        Below(65536),
    ] = 120
    requeue: Annotated[
        bool, "have Slurm put the job into the queue again after a time limit, a preemption or the loss of a node"
    ] = False
    fruitless_attempts: Annotated[
        int, "so many attempts in a row that train no step are not followed by another one", AtLeast(1)
    ] = 2
    partition: Annotated[str | None, "Slurm partition"] = None
    account: Annotated[str | None, "Slurm account"] = None
    qos: Annotated[str | None, "Slurm quality of service"] = None
    sbatch: Annotated[
        Mapping[str, str | int | float | bool],
        "further sbatch options of both components by their long names, e.g. {constraint: h100, exclude: n3}",
    ] = field(default_factory=dict)
    setup: Annotated[tuple[str, ...], "shell lines run in the batch script before the job starts, e.g. module load"] = ()
    interface: Annotated[
        str | None, "network interface of collectives, e.g. ib0; null: NCCL and gloo choose (without Slurm: the loopback)"
    ] = None
