"""What a job asks of Slurm: sbatch's options for each component, from the configuration."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prl.cluster.names import name_trouble
from prl.cluster.option_names import long_name, unknown_names
from prl.cluster.run import Runner, run
from prl.cluster.slurm_output import SlurmOutputError, parse_memory_mib
from prl.cluster.split import Split
from prl.config.schema import Config

Value = str | int | float | bool

_SET = "is set by prl-submit and cannot be changed"
_REFUSED = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "output", "error", "open-mode", "job-name"), _SET),
    **dict.fromkeys(("wrap", "parsable", "quiet", "verbose", "wait", "help", "usage", "version"), _SET),
    "array": f"{_SET}: a run is one job",
    "test-only": "is a command of its own: prl-submit --test-only",
    "requeue": "has a key of its own, cluster.requeue",
    "no-requeue": "has a key of its own, cluster.requeue",
    "signal": "has a key of its own, cluster.warning_s",
    "clusters": "prl asks the cluster of the login node about its jobs; submit from a login node of that one",
    "time": "has a key of its own, cluster.time_min",
    "gpus-per-node": "has a key of its own, cluster.gpus_per_node",
    **dict.fromkeys(
        ("gpus", "gpus-per-task", "gpus-per-socket"),
        "accelerators are asked for by cluster.gpus_per_node, in the way of cluster.gpu_request",
    ),
}
_REFUSED_OF_STEP = frozenset(
    {
        *("het-group", "export", "unbuffered", "kill-on-bad-exit", "wait", "output", "error"),
        *("nodes", "ntasks", "ntasks-per-node", "container-image", "container-mounts", "help", "usage", "version", "test-only"),
    }
)
_OF_BOTH = {  # what has a key for all components, and may be another one for each
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "cpus-per-task": "cluster.cpus_per_node",
    "mem": "cluster.memory_per_node_gib",
}


@dataclass(frozen=True)
class Request:
    """What a component, or a homogeneous job as a whole, asks for."""

    component: Literal["train", "sample", "all"]
    nodes: int
    options: Mapping[str, Value]  # of sbatch, by their long names
    gpus: int  # a node, as far as Slurm knows of them
    time_min: int

    @property
    def partition(self) -> str:
        return str(self.options.get("partition", ""))

    @property
    def qos(self) -> str:
        return str(self.options.get("qos", ""))

    @property
    def cpus(self) -> int:
        """At least, a node."""
        return int(self.options.get("cpus-per-task", 0))

    @property
    def memory_mib(self) -> int:
        """At least, a node."""
        return parse_memory_mib(str(self.options.get("mem", 0)))


def requests(config: Config, split: Split) -> tuple[Request, ...]:
    """One for each component of a heterogeneous job; one for all of a homogeneous one."""
    if split.kind == "plain":
        return (_request(config, "all", split.nodes),)
    return tuple(_request(config, component.name, component.nodes) for component in split.components)


def key_of(option: str, value: str) -> str:
    """What to do in order to give sbatch an option, by its long name; `value` is empty where none is known."""
    if option in _OF_BOTH:
        return f"write --set {_OF_BOTH[option]}=VALUE"
    if option in _REFUSED:
        return f"it {_REFUSED[option]}"
    key = f"cluster.sbatch.{option}={value or 'VALUE'}"
    return f"write --set {shlex.quote(key)}"


def _request(config: Config, component: Literal["train", "sample", "all"], nodes: int) -> Request:
    cluster = config.cluster
    memory_mib = None if cluster.memory_per_node_gib is None else int(cluster.memory_per_node_gib * 1024)
    options: dict[str, Value] = {"nodes": nodes, "ntasks-per-node": 1, "time": cluster.time_min}
    given: dict[str, Value | None] = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "cpus-per-task": cluster.cpus_per_node,
        "mem": None if memory_mib is None else f"{memory_mib}M",
    }
    options |= {name: value for name, value in given.items() if value not in (None, "")}
    if cluster.gpus_per_node and cluster.gpu_request != "none":
        count = f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else cluster.gpus_per_node
        options |= {"gres": f"gpu:{count}"} if cluster.gpu_request == "gres" else {"gpus-per-node": count}
    own = {"train": cluster.sbatch_train, "sample": cluster.sbatch_sample, "all": {}}[component]
    further = {**_named(cluster.sbatch), **_named(own)}
    if "gres" in options and "gres" in further:  # beside the accelerators
        further["gres"] = ",".join(str(value) for value in (options["gres"], further["gres"]) if value is not False)
    options = {name: value for name, value in {**options, **further}.items() if value is not False}
    gpus = 0 if cluster.gpu_request == "none" else cluster.gpus_per_node
    return Request(component, nodes, options, gpus, cluster.time_min)


def _named(options: Mapping[str, Value]) -> dict[str, Value]:
    return {long_name(key): value for key, value in options.items()}


def request_problems(config: Config, split: Split, runner: Runner = run) -> Iterator[str]:
    """What cannot be asked of sbatch, and of the job's srun: options that it has not, and those that prl sets itself."""
    cluster = config.cluster
    sections = {"sbatch": cluster.sbatch, "sbatch_train": cluster.sbatch_train, "sbatch_sample": cluster.sbatch_sample}
    unknown = unknown_names("sbatch", {long_name(key) for options in sections.values() for key in options}, runner)
    for section, options in sections.items():
        for key, value in options.items():
            name, where = long_name(key), f"cluster.{section}.{key}"
            if name in unknown:
                yield f"{where}: {unknown[name]}"
            elif name in _REFUSED:
                yield f"{where}: {_REFUSED[name]}"
            elif section == "sbatch" and name in _OF_BOTH:
                yield f"{where}: has a key of its own, {_OF_BOTH[name]}"
            elif name == "gres" and "gpu" in str(value):
                yield f"{where} = {value}: {_REFUSED['gpus']}"
        if options and section != "sbatch" and split.kind == "plain":
            yield (
                f"cluster.{section}: is for one component of a heterogeneous job, which this is not (plain); put what is for "
                f"all nodes into cluster.sbatch"
            )
    yield from _name_problems(config)
    for section in ("sbatch_train", "sbatch_sample"):
        options = {name: value for name, value in _named(sections[section]).items() if value is not False}
        cpus, memory = options.get("cpus-per-task", 1), options.get("mem", 0)
        if not str(cpus).isdecimal():
            yield f"cluster.{section}.cpus-per-task = {cpus}: must be a whole number"
        try:
            parse_memory_mib(str(memory))
        except SlurmOutputError as error:
            yield f"cluster.{section}.mem = {memory}: {error}"
    yield from _step_problems(config, runner)
    yield from _setup_problems(config, runner)


def _name_problems(config: Config) -> Iterator[str]:
    cluster = config.cluster
    given: dict[str, Value | None] = {key: getattr(cluster, key) for key in ("partition", "account", "qos")}
    for section in ("sbatch", "sbatch_train", "sbatch_sample"):
        given |= {f"{section}.{key}": value for key, value in getattr(cluster, section).items()}
    for key, value in given.items():
        trouble = name_trouble(long_name(key.rpartition(".")[2]), value)
        if trouble:
            yield f"cluster.{key} = {value}: {trouble}"


def _step_problems(config: Config, runner: Runner) -> Iterator[str]:
    keys = {key: long_name(key) for key in config.cluster.srun}
    unknown = unknown_names("srun", {*keys.values()} - _REFUSED_OF_STEP, runner)  # container-image is a plugin's
    for key, name in keys.items():
        if name in unknown:
            yield f"cluster.srun.{key}: {unknown[name]}"
        elif name in _REFUSED_OF_STEP:
            yield f"cluster.srun.{key}: {_SET}"


def _setup_problems(config: Config, runner: Runner) -> Iterator[str]:
    """Bash reads a script as it goes: a quote that is open would be found on the nodes, after a wait in the queue."""
    lines = "\n".join(config.cluster.setup)
    if lines and (said := runner(["bash", "-n"], stdin=lines, check=False)).code:
        yield f"cluster.setup: bash cannot read these lines: {' '.join(said.err.split())}"
