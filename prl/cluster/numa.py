"""The processors near accelerators: those of the same NUMA nodes, as nvidia-smi and the kernel tell them."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from prl.cluster.preflight.devices import DEVICES_S
from prl.cluster.run import run


@dataclass(frozen=True)
class Accelerator:
    """One that nvidia-smi tells of: the names by which CUDA_VISIBLE_DEVICES may call it, and the kernel's name of it."""

    index: str
    uuid: str
    pci: str  # domain:bus:device.function as in /sys/bus/pci/devices


class NotBound(Exception):
    """Why a process is to run on any processors; the message says it."""


def ask_accelerators() -> tuple[Accelerator, ...]:
    """All that this process may see. Raises ProgramError, and OSError where nvidia-smi cannot be run."""
    output = run(["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"], timeout_s=DEVICES_S)
    return parse_accelerators(output.out)


def parse_accelerators(text: str) -> tuple[Accelerator, ...]:
    """Of lines such as `0, GPU-8f3c..., 00000000:65:00.0`; what other lines say, of a device that is lost, say, is left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(Accelerator(row[0], row[1], _kernels_name(row[2])) for row in rows if len(row) == 3 and row[2].count(":") == 2)


def _kernels_name(bus_id: str) -> str:
    """nvidia-smi writes a PCI domain with eight digits, the kernel with four, or more where it has more."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


def near(
    devices: Sequence[str], accelerators: Iterable[Accelerator], allowed: Set[int], threads: int, sysfs: Path
) -> frozenset[int]:
    """Those of the `allowed` processors that belong to the NUMA nodes of `devices`, which are numbers or ids as in
    CUDA_VISIBLE_DEVICES. `sysfs`: where the kernel tells it. Raises NotBound where it does not, where these are all of the
    allowed ones or none, and where they are fewer than `threads`."""
    known = tuple(accelerators)
    nodes = sorted({_numa_node(device, known, sysfs) for device in devices})
    where = f"NUMA node {', '.join(map(str, nodes))}"
    found = frozenset[int]().union(*(_cpus_of(node, sysfs) for node in nodes)) & allowed
    if not found:
        raise NotBound(f"none of the processors {in_ranges(allowed)} that may be used here belongs to {where}")
    if found == allowed:
        raise NotBound(f"all processors that may be used here, {in_ranges(allowed)}, belong to {where}")
    if len(found) < threads:
        raise NotBound(f"{threads} threads (OMP_NUM_THREADS) are more than the processors {in_ranges(found)} of {where}")
    return found


def _numa_node(device: str, accelerators: Sequence[Accelerator], sysfs: Path) -> int:
    meant = [one for one in accelerators if one.index == device or one.uuid.startswith(device)]  # CUDA takes beginnings, too
    if len(meant) != 1:
        raise NotBound(f"nvidia-smi names {'several accelerators' if meant else 'no accelerator'} {device}")
    path = sysfs / "bus/pci/devices" / meant[0].pci / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError) as error:
        raise NotBound(f"the NUMA node of accelerator {device} is not known: {error}") from error
    if node < 0:
        raise NotBound(f"the NUMA node of accelerator {device} is not known: {path} says {node}")
    return node


def _cpus_of(node: int, sysfs: Path) -> frozenset[int]:
    path = sysfs / f"devices/system/node/node{node}/cpulist"
    try:
        return parse_cpus(path.read_text())
    except (OSError, ValueError) as error:
        raise NotBound(f"the processors of NUMA node {node} are not known: {error}") from error


def parse_cpus(text: str) -> frozenset[int]:
    """Of the kernel's lists, such as 0-15,64-79. Raises ValueError."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1))


def in_ranges(cpus: Set[int]) -> str:
    """As the kernel writes them."""
    runs = [[cpu for _, cpu in run] for _, run in groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
