"""Which nodes and devices train and which sample: pure arithmetic on the configuration.

Three kinds of run: `local` (this machine, no Slurm), `plain` (a homogeneous Slurm job) and `het` (a heterogeneous one:
component 0 trains, component 1 samples). The devices of one node alone are divided between the roles; of several nodes of a
plain job the first ones are the component that trains, as if it were heterogeneous.
"""

import math
from dataclasses import dataclass
from typing import Literal

from prl.config.layout import Layout, layout_of
from prl.config.load import ConfigError, replace
from prl.config.schema import Config

Kind = Literal["local", "plain", "het"]


@dataclass(frozen=True)
class NodeShare:
    """What one node of a component runs. A device is the number of an accelerator on its node."""

    trainer_ranks: int
    trainer_devices: tuple[int, ...]  # one a rank; empty without accelerators
    replicas: int
    replica_devices: tuple[tuple[int, ...], ...]  # one tuple a replica, each empty without accelerators


@dataclass(frozen=True)
class Component:
    name: Literal["train", "sample", "all"]
    nodes: int
    node: NodeShare  # every node of a component runs the same


@dataclass(frozen=True)
class Split:
    kind: Kind
    components: tuple[Component, ...]
    gpus_per_node: int
    layout: Layout
    sample_tensor_parallel: int

    @property
    def nodes(self) -> int:
        return sum(component.nodes for component in self.components)

    @property
    def world_size(self) -> int:
        """Trainer ranks in all."""
        return sum(component.nodes * component.node.trainer_ranks for component in self.components)

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.layout.model_ranks

    @property
    def replicas(self) -> int:
        """Samplers in all."""
        return sum(component.nodes * component.node.replicas for component in self.components)

    def describe(self) -> str:
        """The split in a few lines for people."""
        nodes = "one node" if self.nodes == 1 else f"{self.nodes} nodes"
        where = {"plain": f"{nodes}, a plain Slurm job", "het": f"{nodes}, a heterogeneous Slurm job"}
        lines = [where.get(self.kind, "this machine, without Slurm")]
        for component in self.components:
            share, nodes = component.node, f"{component.nodes} node{'s' * (component.nodes > 1)}"
            parts = []
            if share.trainer_ranks:
                on = f" on devices {_span(share.trainer_devices)}" if share.trainer_devices else " on CPUs"
                parts.append(_count(share.trainer_ranks, "trainer rank") + on)
            if share.replicas:
                devices = [_span(own) for own in share.replica_devices if own]
                on = f" on devices {' | '.join(devices)}" if devices else " on CPUs"
                parts.append(_count(share.replicas, "sampler") + on)
            lines.append(f"  {component.name:<7}{nodes}, each: {'; '.join(parts)}")
        lines.append(
            f"  in all {_count(self.world_size, 'trainer rank')} ({self.layout.describe(self.world_size)}), "
            f"{_count(self.replicas, 'sampler')} (tensor parallel {self.sample_tensor_parallel})"
        )
        return "\n".join(lines)


def kind_of(config: Config) -> Kind:
    """The kind of run that `cluster.mode` means; auto: by the number of nodes. Raises ConfigError."""
    cluster = config.cluster
    if cluster.mode == "auto":
        return "local" if cluster.nodes is None else "plain" if cluster.nodes == 1 else "het"
    if cluster.mode != "local" and cluster.nodes is None:
        raise ConfigError(f"cluster.mode = {cluster.mode}: a Slurm job needs a number of nodes: --nodes N, or cluster.nodes")
    if cluster.mode == "het" and cluster.nodes == 1:
        raise ConfigError("cluster.mode = het: one node is one component; ask for 2 nodes or more, or set plain")
    return cluster.mode


def settle_mode(config: Config, *, has_sbatch: bool) -> Config:
    """The configuration as it is run here: without nodes where it is run on this machine."""
    cluster = config.cluster
    if cluster.mode == "local":
        return replace(config, cluster={"nodes": None})
    if cluster.mode == "auto" and cluster.nodes is not None and not has_sbatch:
        return replace(config, cluster={"mode": "local", "nodes": None, "chain": 1})
    return config


def make_split(config: Config) -> Split:
    """Divide the nodes that `cluster.nodes` names. Raises ConfigError saying which number does not fit and what would."""
    kind, nodes = kind_of(config), config.cluster.nodes
    if nodes is not None and nodes < 1:
        raise ConfigError(f"cluster.nodes = {nodes}: a Slurm job needs at least 1 node; null runs on this machine")
    layout = layout_of(config.train)
    if min(layout.tensor, layout.pipeline, layout.context, layout.expert, config.sample.tensor_parallel) < 1:
        raise ConfigError("train.tensor_parallel, all other train.*_parallel and sample.tensor_parallel must be at least 1")
    if config.cluster.gpus_per_node < 0:
        raise ConfigError(f"cluster.gpus_per_node = {config.cluster.gpus_per_node}: write 0 for a run without accelerators")
    if kind == "local" or nodes is None or nodes == 1:
        split = _split_by_device(config, kind)
    else:
        split = _split_by_node(config, kind, nodes)
    _check_enough_work(config, split)
    return split


def _split_by_device(config: Config, kind: Kind) -> Split:
    cluster, unit = config.cluster, layout_of(config.train).unit
    if cluster.train_nodes != 1:
        raise ConfigError(
            f"cluster.train_nodes = {cluster.train_nodes}: with one node all roles share it; set it to 1, or ask for at least "
            f"{cluster.train_nodes + 1} nodes"
        )
    ranks = unit if cluster.train_devices is None else cluster.train_devices
    if ranks < 1 or ranks % unit:
        raise _not_a_multiple(ranks, 1, config)
    gpus = cluster.gpus_per_node
    if gpus and config.run.replay and ranks > gpus:
        raise ConfigError(f"cluster.gpus_per_node = {gpus}: {ranks} to train; lower {_widths(config)} or cluster.train_devices")
    if gpus and not config.run.replay and ranks + config.sample.tensor_parallel > gpus:
        raise ConfigError(
            f"cluster.gpus_per_node = {gpus}: {ranks} to train and {config.sample.tensor_parallel} for one sampler "
            f"(sample.tensor_parallel) do not fit on one node; lower {_widths(config)}, cluster.train_devices or "
            f"sample.tensor_parallel, or ask for 2 nodes"
        )
    trainer_devices = tuple(range(ranks)) if gpus else ()
    replica_devices = () if config.run.replay else _replica_devices(config, first=ranks)
    share = NodeShare(ranks, trainer_devices, len(replica_devices), replica_devices)
    return _result(config, kind, (Component("all", 1, share),))


def _split_by_node(config: Config, kind: Kind, nodes: int) -> Split:
    if config.run.replay:
        raise ConfigError(f"cluster.nodes = {nodes}: a replay needs no samplers and runs on one node; set it to 1 or null")
    cluster, layout, gpus = config.cluster, layout_of(config.train), config.cluster.gpus_per_node
    if not 1 <= cluster.train_nodes < nodes:
        raise ConfigError(
            f"cluster.train_nodes = {cluster.train_nodes}: of {nodes} nodes at least 1 must train and at least 1 must sample; "
            f"set it to 1 ... {nodes - 1}, or ask for at least {max(cluster.train_nodes, 1) + 1} nodes"
        )
    if gpus:
        if layout.tensor > gpus or gpus % layout.tensor:
            raise ConfigError(
                f"train.tensor_parallel = {layout.tensor}: must divide cluster.gpus_per_node = {gpus} (a tensor-parallel "
                f"group stays within a node)"
            )
        if cluster.train_devices not in (None, gpus):
            raise ConfigError(
                f"cluster.train_devices = {cluster.train_devices}: with {nodes} nodes the training nodes train with all their "
                f"{gpus} accelerators; leave it null"
            )
        ranks = gpus
    elif cluster.train_devices is None:  # the fewest that all nodes together can make use of
        ranks = math.lcm(layout.tensor, layout.unit // math.gcd(layout.unit, cluster.train_nodes))
    else:
        ranks = cluster.train_devices
        if ranks < 1 or ranks % layout.tensor:
            raise _not_a_multiple(ranks, cluster.train_nodes, config)
    if cluster.train_nodes * ranks % layout.unit:
        raise _not_a_multiple(ranks, cluster.train_nodes, config)
    replica_devices = _replica_devices(config, first=0)
    train = NodeShare(ranks, tuple(range(ranks)) if gpus else (), 0, ())
    sample = NodeShare(0, (), len(replica_devices), replica_devices)
    components = (Component("train", cluster.train_nodes, train), Component("sample", nodes - cluster.train_nodes, sample))
    return _result(config, kind, components)


def _replica_devices(config: Config, first: int) -> tuple[tuple[int, ...], ...]:
    """Devices of each sampler of a node whose devices from `first` on sample."""
    wanted, width, gpus = config.cluster.replicas_per_node, config.sample.tensor_parallel, config.cluster.gpus_per_node
    if wanted is not None and wanted < 1:
        raise ConfigError(f"cluster.replicas_per_node = {wanted}: at least 1 sampler a node")
    if not gpus:
        return ((),) * (1 if wanted is None else wanted)
    possible = (gpus - first) // width
    if possible < 1 or (wanted or 0) > possible:
        raise ConfigError(
            f"{gpus - first} of cluster.gpus_per_node = {gpus} accelerators sample: room for {possible} samplers of "
            f"sample.tensor_parallel = {width}, not for {wanted or 1}; lower cluster.replicas_per_node or that"
        )
    return tuple(tuple(range(first + k * width, first + (k + 1) * width)) for k in range(wanted or possible))


def _not_a_multiple(ranks: int, nodes: int, config: Config) -> ConfigError:
    layout = layout_of(config.train)
    if nodes > 1 or config.cluster.train_devices is None:
        return ConfigError(
            f"cluster.train_nodes = {nodes}: {nodes * ranks} trainer ranks, {ranks} a node, must be a multiple of "
            f"{layout.unit}, to be shared by {_widths(config)}; take more or fewer nodes, or lower one of these"
        )
    return ConfigError(f"cluster.train_devices = {ranks}: must be a multiple of {_widths(config)} = {layout.unit}")


def _widths(config: Config) -> str:
    """The options that say how many ranks share a model, as far as they do."""
    names = ("tensor", "pipeline", "context", "expert")
    used = [f"train.{name}_parallel" for name in names if name == "tensor" or getattr(config.train, f"{name}_parallel") > 1]
    return " x ".join(used)


def _check_enough_work(config: Config, split: Split) -> None:
    """More ranks or samplers than there is work for would stand idle, or wait for ever."""
    run = config.run
    rollouts = run.groups_per_step * run.rollouts_per_group
    if split.data_parallel > rollouts:
        raise ConfigError(
            f"{split.nodes} nodes train with data parallel {split.data_parallel}, but a step has {rollouts} rollouts "
            f"(run.groups_per_step x run.rollouts_per_group); lower cluster.train_nodes or raise those"
        )
    steps_in_flight = run.max_lag + 1 if run.mode == "pipeline" else run.steps_per_generation
    groups = run.groups_per_step * steps_in_flight
    if split.replicas > groups:
        raise ConfigError(
            f"{split.nodes} nodes hold {split.replicas} samplers, but at most {groups} groups are in flight at once "
            f"(run.groups_per_step x {'(run.max_lag + 1)' if run.mode == 'pipeline' else 'run.steps_per_generation'}); ask for "
            f"fewer nodes or raise those"
        )


def _result(config: Config, kind: Kind, components: tuple[Component, ...]) -> Split:
    return Split(kind, components, config.cluster.gpus_per_node, layout_of(config.train), config.sample.tensor_parallel)


def _span(devices: tuple[int, ...]) -> str:
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
