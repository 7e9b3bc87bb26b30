"""Options of where a run runs: nodes, devices, and what Slurm is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from prl.config.bounds import Above, AlsoCalled, AtLeast, AtMost, Below


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """What is looked at on every node before anything of a run is loaded there."""

    enabled: Annotated[bool, "look at every node first, and end the run, naming them, where some will not do"] = True
    visible_s: Annotated[
        float, "seconds that a file which prl-submit wrote into the run folder may take until a node can read it", Above(0)
    ] = 30.0
    clock_s: Annotated[float, "largest difference in seconds between a node's clock and the orchestrator's", Above(0)] = 2.0
    memory_gib: Annotated[float, "least free memory of a node, in GiB", AtLeast(0)] = 1.0
    disk_gib: Annotated[
        float,
        "least room in GiB in the run folder (its filesystem's, and its quota's) and in each node's folder for temporary files",
        AtLeast(0),
    ] = 1.0
    files: Annotated[int, "least number of files that may still be made in each of these folders", AtLeast(0)] = 1000
    ports: Annotated[
        int, "least number of a node's free ports between 20,000 and 32,000, where its servers listen", AtLeast(1)
    ] = 100
    device_memory_gib: Annotated[
        float, "most memory in GiB of an accelerator that others, or what an earlier job left, may use", AtLeast(0)
    ] = 4.0
    target_percent: Annotated[
        float, "a storage target of Lustre that is fuller than so many per cent is warned of", Above(0), AtMost(100)
    ] = 98.0
    bandwidth_mib_per_s: Annotated[
        float, "least MiB a second over one TCP connection between a node that trains and one that samples", AtLeast(0)
    ] = 20.0


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    profile: Annotated[
        str | None,
        "site profile, whose keys of `cluster` count where the configuration sets none: a name in slurm/sites/, or the path of "
        "a YAML file",
    ] = None
    mode: Annotated[
        Literal["auto", "het", "plain", "local"],
        "het: a heterogeneous job, one component a role; plain: one homogeneous job whose nodes choose their roles by rank, "
        "for sites without steps over several components; local: this machine, without Slurm; auto: local without nodes or "
        "where there is no sbatch, plain with one node, else het",
    ] = "auto"
    nodes: Annotated[int | None, "nodes in all; null: this machine, without Slurm", AtLeast(1), Below(10**5)] = None
    train_nodes: Annotated[int, "nodes of the component that trains; the others sample", AtLeast(1), Below(10**5)] = 1
    train_devices: Annotated[
        int | None,
        "with one node: accelerators (without any: processes) that train; null: as many as one model is shared by",
        AtLeast(1),
        Below(10**4),
    ] = None
    gpus_per_node: Annotated[int, "accelerators a node; 0: train and sample on CPUs (gloo)", AtLeast(0), Below(10**4)] = 0
    gpu_request: Annotated[
        Literal["gpus-per-node", "gres", "none"],
        "how accelerators are asked of Slurm: --gpus-per-node=N, --gres=gpu:N, or not at all, where whole nodes are given",
    ] = "gpus-per-node"
    gpu_type: Annotated[str | None, "their type in Slurm, where it has to be named, e.g. h100"] = None
    gpu_memory_gib: Annotated[
        float | None,
        "memory of an accelerator in GiB, which a trainer rank must fit; null: that of gpu_type where it is known (h100, say), "
        "else not checked, with a warning",
        Above(0),
    ] = None
    replicas_per_node: Annotated[
        int | None, "samplers a node; null: as many as the devices allow, 1 on CPUs", AtLeast(1), Below(10**4)
    ] = None
    cpus_per_node: Annotated[
        int | None, "CPUs asked of Slurm a node; null: the partition's default", AtLeast(1), Below(10**5)
    ] = None
    bind_cpus: Annotated[
        Literal["auto", "never"],
        "auto: a process with accelerators runs on the CPUs of their NUMA nodes alone (of those that Slurm gave), which it "
        "shares with others there; on all CPUs where these are not known, as the log then says; never: all on all CPUs",
    ] = "auto"
    memory_per_node_gib: Annotated[
        float | None,
        "memory asked of Slurm a node, in GiB; 0: all of it; null: the partition's default",
        AtLeast(0),
        AlsoCalled("mem"),
    ] = None
    time_min: Annotated[int, "time limit of the job, in minutes", AtLeast(1), Below(10**7)] = 60
    warning_s: Annotated[
        int,
        "seconds before the time limit at which Slurm warns the run, which then saves after the step in hand and ends; more "
        "where steps and saves of earlier attempts took longer, half the limit at most",
        AtLeast(1),
        Below(65536),
    ] = 120
    requeue: Annotated[
        bool,
        "have Slurm put the job into the queue again after a time limit, a preemption, or the loss of a node, its agent or the "
        "orchestrator",
    ] = False
    chain: Annotated[
        int,
        "jobs in all that are submitted at once, each to go on with the run where the one before it has left, for sites that "
        "put no job into the queue again; those that are left once the run has ended are taken out of it",
        AtLeast(1),
        Below(100),
    ] = 1
    fruitless_attempts: Annotated[
        int, "so many attempts in a row that train no step are not followed by another one", AtLeast(1)
    ] = 2
    partition: Annotated[str | None, "Slurm partition"] = None
    account: Annotated[str | None, "Slurm account"] = None
    qos: Annotated[str | None, "Slurm quality of service"] = None
    sbatch: Annotated[
        Mapping[str, str | int | float | bool],
        "further sbatch options of all nodes by their long names, e.g. {constraint: h100, exclude: n3}; true: an option "
        "without a value, false: none",
        AlsoCalled("extra", "additional_parameters"),
    ] = field(default_factory=dict)
    sbatch_train: Annotated[
        Mapping[str, str | int | float | bool],
        "het: those of the component that trains, in the place of or beside the others, e.g. {partition: h200, mem: 900G}",
    ] = field(default_factory=dict)
    sbatch_sample: Annotated[Mapping[str, str | int | float | bool], "het: those of the component that samples, likewise"] = (
        field(default_factory=dict)
    )
    srun: Annotated[
        Mapping[str, str | int | float | bool],
        "options of the job's srun by their long names, e.g. {network: disable_rdzv_get}",
    ] = field(default_factory=dict)
    modules: Annotated[tuple[str, ...], "environment modules that the batch script loads, in this order, before `setup`"] = ()
    setup: Annotated[tuple[str, ...], "shell lines run in the batch script before the job starts, e.g. a venv's activate"] = ()
    environment: Annotated[Mapping[str, str | int | float], "environment variables of all processes of the run"] = field(
        default_factory=dict
    )
    python: Annotated[str | None, "Python on the nodes; null: the one that runs prl-submit, and python3 in a container"] = None
    container: Annotated[
        Literal["none", "pyxis", "apptainer"],
        "what each node's task runs in; pyxis: srun --container-image; apptainer: apptainer exec",
    ] = "none"
    container_image: Annotated[str | None, "image of the container: an address for enroot, or the path of a file"] = None
    container_mounts: Annotated[
        tuple[str, ...],
        "folders that the container sees, as FOLDER or FROM:TO[:ro], beside the run's and the model's; name the data here",
    ] = ()
    container_arguments: Annotated[
        tuple[str, ...], "further arguments of apptainer exec, e.g. --rocm (default with accelerators: --nv)"
    ] = ()
    fabric: Annotated[
        Literal["unset", "ib", "efa", "slingshot", "ethernet"],
        "network between nodes, by which NCCL's and libfabric's variables are set (slurm/README.md lists them): NCCL fails "
        "where it is not there, instead of falling back to a slower one; unset: none is set",
    ] = "unset"
    interface: Annotated[
        str | None, "network interface of collectives, e.g. ib0; null: NCCL and gloo choose (without Slurm: the loopback)"
    ] = None
    local_folder: Annotated[
        str | None,
        "under Slurm: folder on a disk of each node, made where it is missing, e.g. /local/$USER (variables are the node's), "
        "for a copy of the model and, with accelerators, the caches of compilers, which are removed at the end; null: "
        "$SLURM_TMPDIR where that is set, else $TMPDIR or /tmp",
    ] = None
    stage_model: Annotated[
        Literal["auto", "always", "never"],
        "under Slurm: copy the model into local_folder before anything is loaded on a node; auto: where it lies on a network "
        "filesystem, and local_folder on a disk. Where that fails the shared model is read, and log and report say why",
    ] = "auto"
    preflight: Annotated[PreflightOptions, "what every node is asked before anything of the run is loaded there"] = field(
        default_factory=PreflightOptions
    )
