"""What tests do to the nodes of the lab cluster (tools/slurmlab.sh), and what they find there."""

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

SCRIPT = Path(__file__).parents[1] / "tools" / "slurmlab.sh"


def slurm(*command: str) -> str:
    """What a command of Slurm's prints; it has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def wait_until(condition: Callable[[], object], deadline_s: float, what: Callable[[], object]) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:g} s: {what()}"
        time.sleep(0.2)


def to_node(verb: str, node: str) -> None:
    """kill-node, start-node, cut or heal. Not through pipes: a daemon that is started would keep them open."""
    subprocess.run(["bash", str(SCRIPT), verb, node], check=True, timeout=60, stdout=subprocess.DEVNULL)


def link(node: str) -> str:
    """The interface of this machine that leads to the node: what it sends the node receives."""
    return f"v{os.environ.get('LAB_ID', '1')}-{node}"


def slow_down(node: str, rate: str) -> None:
    """What the node receives comes at this rate from now on (in tc's words, e.g. 2mbit), whatever it was."""
    shape = ["tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", link(node), "root", *shape], check=True, timeout=30)


@contextmanager
def slow(nodes: Iterable[str], rate: str) -> Iterator[None]:
    """Behind the block they are as fast as before."""
    nodes = list(nodes)
    try:
        for node in nodes:
            slow_down(node, rate)
        yield
    finally:
        for node in nodes:
            subprocess.run(["tc", "qdisc", "del", "dev", link(node), "root"], check=True, timeout=30)


@contextmanager
def small_buffers(nodes: Iterable[str]) -> Iterator[None]:
    """Sockets of these nodes hold little of what is on its way; behind the block as much as before."""
    before = {}
    try:
        for node in nodes:
            for name in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
                before[node, name] = _on_node(node, "sysctl", "-n", name).strip()
                _on_node(node, "sysctl", "-w", f"{name}=4096 16384 32768")
        yield
    finally:
        for (node, name), value in before.items():
            _on_node(node, "sysctl", "-w", f"{name}={value}")


def _on_node(node: str, *command: str) -> str:
    line = ["bash", str(SCRIPT), "exec", node, *command]
    return subprocess.run(line, check=True, timeout=30, capture_output=True, text=True).stdout


def received_bytes(node: str) -> int:
    """By the node, since it is there."""
    return int(Path(f"/sys/class/net/{link(node)}/statistics/tx_bytes").read_text())


def processes(node: str) -> list[psutil.Process]:
    """Of a node, without Slurm's own, of which a step's waits for the controller where the network is cut."""
    return [process for process in _all_processes(node) if _name(process) not in (None, "slurmd", "slurmstepd")]


def _all_processes(node: str) -> list[psutil.Process]:
    printed = subprocess.run(["bash", str(SCRIPT), "processes", node], capture_output=True, text=True, check=True, timeout=60)
    return [psutil.Process(int(pid)) for pid in printed.stdout.split() if psutil.pid_exists(int(pid))]


def _name(process: psutil.Process) -> str | None:
    """None of a process that has ended, also where nobody has reaped it."""
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.name())
    except psutil.NoSuchProcess:
        return None


def census(nodes: Iterable[str], temporary: Path) -> dict[str, list[str]]:
    """What jobs have left: by node its processes and the names in its /dev/shm, and all that lies in the folder in which the
    processes of all nodes make their temporary files and sockets. Nodes without anything are left out."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        left = [f"{p.pid} {words}" for p in processes(node) if (words := _words(p))]
        for daemon in _all_processes(node):
            if _name(daemon) == "slurmd":  # the mounts of a node are its
                left += [str(path) for path in Path(f"/proc/{daemon.pid}/root/dev/shm").iterdir()]
        if left:
            found[node] = left
    if names := sorted(str(path) for path in temporary.rglob("*")):
        found[str(temporary)] = names
    return found


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def configured(line: str) -> Iterator[None]:
    """With this line in slurm.conf."""
    path = Path(os.environ["SLURM_CONF"])
    before = path.read_text()
    try:
        path.write_text(f"{before}{line}\n")
        slurm("scontrol", "reconfigure")
        yield
    finally:
        path.write_text(before)
        slurm("scontrol", "reconfigure")


@contextmanager
def partition(name: str, nodes: str) -> Iterator[None]:
    slurm("scontrol", "create", f"PartitionName={name}", f"Nodes={nodes}", "State=UP")
    try:
        yield
    finally:
        slurm("scontrol", "delete", f"PartitionName={name}")


def nodes_that_are(state: str) -> set[str]:
    return set(slurm("sinfo", "-h", "-N", "-t", state, "-o", "%N").split())


@contextmanager
def mended(nodes: list[str]) -> Iterator[None]:
    """Whatever happens to jobs and nodes in the block, afterwards the queue is empty and all nodes are idle."""
    try:
        yield
    finally:
        for job in {line.partition("+")[0] for line in slurm("squeue", "-h", "-o", "%i").split()}:
            subprocess.run(["scancel", job], check=False, timeout=30)
        for node in nodes:
            to_node("heal", node)
            to_node("start-node", node)
        wait_until(lambda: nodes_that_are("idle") >= set(nodes), 90, lambda: slurm("sinfo", "-N") + slurm("squeue"))
