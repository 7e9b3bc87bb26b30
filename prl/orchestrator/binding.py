"""Binding of the plan: which process runs on which of the nodes that the job was given."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prl.cluster.allocation import Allocation
from prl.cluster.split import NodeShare, Split
from prl.config.schema import Config
from prl.orchestrator.children import ChildPlan


@dataclass(frozen=True)
class Plan:
    attempt: int
    nodes: tuple[Mapping[str, Any], ...]  # name, address and component of each node, in the order of the tasks
    children: tuple[ChildPlan, ...]
    data_parallel: int  # ranks, or groups of ranks, among which the micro-batches of a step are dealt

    def on_node(self, node: int) -> list[ChildPlan]:
        return [child for child in self.children if child.node == node]

    def name_of(self, node: int) -> str:
        return str(self.nodes[node]["name"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bind(config: Config, split: Split, allocation: Allocation, attempt: int) -> Plan:
    """Put every process of the run on a node. Trainer ranks follow one another node by node, so that a tensor-parallel group
    stays within one; actors and verifiers live beside the samplers."""
    nodes: list[Mapping[str, Any]] = []
    children: list[ChildPlan] = []
    sampling: list[int] = []
    interface = _interface(config, split)
    near = config.cluster.bind_cpus == "auto" and split.gpus_per_node > 0
    rank = replica = 0
    for component, (part, hosts) in enumerate(zip(split.components, allocation.hosts, strict=True)):
        if len(hosts) != part.nodes:
            raise ValueError(f"component {component} ({part.name}) has {len(hosts)} nodes, the plan needs {part.nodes}")
        for host in hosts:
            node = len(nodes)
            nodes.append({"name": host.name, "address": host.address, "component": component})
            for local in range(part.node.trainer_ranks):
                environment = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(split.world_size),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(part.node.trainer_ranks),
                    "MASTER_ADDR": allocation.master_address,
                    **({"PRL_YIELDS_CPU": "1"} if _yields_cpu(config, part.node) else {}),
                    **interface,
                    **_devices(part.node.trainer_devices, config.train.threads),
                }
                devices = part.node.trainer_devices[local : local + 1]
                children.append(ChildPlan("trainer", rank, node, devices, environment, near_devices=near))
                rank += 1
            for devices in part.node.replica_devices:
                environment = {**interface, **_devices(devices, config.sample.threads)}
                children.append(ChildPlan("sampler", replica, node, devices, environment, serves=True, near_devices=near))
                replica += 1
            if part.node.replicas:
                sampling.append(node)
    if not config.run.replay or config.run.replay_from == "rollouts":
        children.append(ChildPlan("preprocess", 0, 0, (), _devices((), 1)))
    if not config.run.replay:
        children += _around_samplers(config, sampling)
    return Plan(attempt, tuple(nodes), tuple(children), split.data_parallel)


def _around_samplers(config: Config, sampling: Sequence[int]) -> list[ChildPlan]:
    """What samplers are asked by, and who judges; `sampling` are the nodes with samplers."""
    one_thread = _devices((), 1)
    children = [
        ChildPlan("actor", index, sampling[index % len(sampling)], (), one_thread) for index in range(config.actor.processes)
    ]
    if config.verifier.processes:
        children.append(ChildPlan("verifier", 0, sampling[0], (), one_thread, serves=True))
    return children


def _yields_cpu(config: Config, node: NodeShare) -> bool:
    """Whether trainer ranks share a node's cores with samplers and leave them to these."""
    return config.train.yields_cpu and not node.trainer_devices and bool(node.replica_devices)


def _devices(devices: tuple[int, ...], threads: int) -> dict[str, str]:
    """Trainer ranks see all training devices of their node and choose by LOCAL_RANK; a sampler sees its own alone."""
    if devices:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}


def _interface(config: Config, split: Split) -> dict[str, str]:
    """Collectives stay on one interface; without Slurm that is the loopback."""
    name = config.cluster.interface or ("lo" if split.kind == "local" else None)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}
