"""What a node's task knows of the job around it, read from its environment."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


class AllocationError(Exception):
    """The environment of a task does not fit together; the message says what was found."""


@dataclass(frozen=True)
class Host:
    name: str  # the node's name in Slurm
    address: str  # IP address by which the other nodes reach it


@dataclass(frozen=True)
class Allocation:
    """One task of a job, which has one task a node. `hosts[c][r]` is the node of rank r of component c."""

    job_id: str | None  # Slurm's (of component 0), None on this machine without Slurm
    component: int
    rank: int  # within the component
    hosts: tuple[tuple[Host, ...], ...]
    restarts: int = 0  # how often Slurm has put the job into the queue again

    @property
    def host(self) -> Host:
        return self.hosts[self.component][self.rank]

    @property
    def first(self) -> bool:
        """Whether this task is rank 0 of component 0, which carries the orchestrator."""
        return self.component == 0 and self.rank == 0

    @property
    def task(self) -> int:
        """Number of this task over all components."""
        return sum(len(hosts) for hosts in self.hosts[: self.component]) + self.rank

    @property
    def master_address(self) -> str:
        """Address of rank 0 of component 0."""
        return self.hosts[0][0].address


def read_allocation(environ: Mapping[str, str] = os.environ) -> Allocation:
    """The allocation of the calling task. The batch scripts in slurm/ export PRL_NODES_0 and, in a heterogeneous job,
    PRL_NODES_1; without them the run is local. Raises AllocationError where Slurm's variables contradict them or a name
    does not resolve."""
    if "PRL_NODES_0" not in environ:
        return Allocation(None, 0, 0, ((Host("localhost", "127.0.0.1"),),))
    components: list[list[tuple[str, str]]] = []
    while f"PRL_NODES_{len(components)}" in environ:
        components.append(_parse_nodes(environ[f"PRL_NODES_{len(components)}"]))
    task = int(environ["SLURM_PROCID"])
    component, rank = _place(task, [len(nodes) for nodes in components])
    name, _ = components[component][rank]
    own = environ.get("SLURMD_NODENAME", name)
    if own != name:
        raise AllocationError(f"task {task} runs on node {own}, but the batch script counted {name} for it: {components}")
    hosts = tuple(tuple(Host(name, _resolve(address)) for name, address in nodes) for nodes in components)
    return Allocation(environ["SLURM_JOB_ID"], component, rank, hosts, int(environ.get("SLURM_RESTART_COUNT", "0")))


def _parse_nodes(text: str) -> list[tuple[str, str]]:
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(name and address for name, _, address in pairs):
        raise AllocationError(f"not a list of name=address pairs: {text!r} (did scontrol fail in the batch script?)")
    return [(name, address) for name, _, address in pairs]


def _place(task: int, sizes: list[int]) -> tuple[int, int]:
    """(component, rank in it) of a task: a spanning step numbers the components' tasks one after another."""
    rank = task
    for component, size in enumerate(sizes):
        if rank < size:
            return component, rank
        rank -= size
    raise AllocationError(f"task {task} is beyond the components' {sizes} nodes")


def _resolve(address: str) -> str:
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AllocationError(f"the node address {address!r} does not resolve here: {error}") from error
    # IPv4 first: gloo and NCCL bind to it where both exist.
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
