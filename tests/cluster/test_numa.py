"""Which processors are near accelerators, in trees of files as /sys has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.cluster.numa import Accelerator, NotBound, in_ranges, near, parse_accelerators, parse_cpus

PRINTED = """\
0, GPU-11aa, 00000000:17:00.0
1, GPU-11bb, 00000000:65:00.0
2, GPU-22cc, 00000000:CA:00.0
3, GPU-33dd, 00010000:E3:00.1
Unable to determine the device handle for GPU 0000:9A:00.0: Unknown Error
5, GPU-55ff, [Unknown Error]
"""
ACCELERATORS = parse_accelerators(PRINTED)
ALL = frozenset(range(68))
FIRST = frozenset([*range(16), *range(32, 48)])
SECOND = frozenset([*range(16, 32), *range(48, 64)])


@pytest.fixture
def sysfs(tmp_path):
    """Two sockets of 16 cores, two threads each and two accelerators each; a NUMA node without any; one of memory alone."""
    for node, cpus in enumerate(("0-15,32-47\n", "16-31,48-63\n", "64-67\n", "\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    for pci, node in (("0000:17:00.0", 0), ("0000:65:00.0", 0), ("0000:ca:00.0", 1), ("10000:e3:00.1", 1)):
        put(tmp_path, pci, node)
    return tmp_path


def put(sysfs, pci, node):
    folder = sysfs / "bus/pci/devices" / pci
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numa_node").write_text(f"{node}\n")


def test_what_nvidia_smi_prints_is_read_with_the_kernels_names():
    assert parse_accelerators(PRINTED) == (
        Accelerator("0", "GPU-11aa", "0000:17:00.0"),
        Accelerator("1", "GPU-11bb", "0000:65:00.0"),
        Accelerator("2", "GPU-22cc", "0000:ca:00.0"),
        Accelerator("3", "GPU-33dd", "10000:e3:00.1"),
    )


@pytest.mark.parametrize(
    ("devices", "allowed", "found"),
    [
        ("0", ALL, FIRST),
        ("1", ALL, FIRST),
        ("2", ALL, SECOND),
        ("3", ALL, SECOND),
        ("GPU-22cc", ALL, SECOND),
        ("GPU-2", ALL, SECOND),
        ("0,1", ALL, FIRST),
        ("GPU-11bb,3", ALL, FIRST | SECOND),
        ("0", frozenset(range(8, 24)), frozenset(range(8, 16))),  # what Slurm gave
        ("2", frozenset({3, 31, 48}), frozenset({31, 48})),
    ],
)
def test_processors_of_the_same_numa_nodes_that_may_be_used(sysfs, devices, allowed, found):
    assert near(devices.split(","), ACCELERATORS, allowed, 2, sysfs) == found


@pytest.mark.parametrize(
    ("devices", "allowed", "threads", "why"),
    [
        ("4", ALL, 1, "nvidia-smi names no accelerator 4"),
        ("0,MIG-7", ALL, 1, "nvidia-smi names no accelerator MIG-7"),
        ("GPU-11", ALL, 1, "nvidia-smi names several accelerators GPU-11"),
        ("0", SECOND, 1, "none of the processors 16-31,48-63 that may be used here belongs to NUMA node 0"),
        ("0", frozenset({4, 5}), 1, "all processors that may be used here, 4-5, belong to NUMA node 0"),
        ("0,2", FIRST | SECOND, 1, "all processors that may be used here, 0-63, belong to NUMA node 0, 1"),
        ("0", frozenset({0, 1, 47, 48}), 4, "4 threads (OMP_NUM_THREADS) are more than the processors 0-1,47 of NUMA node 0"),
    ],
)
def test_nothing_is_bound_where_it_is_not_known_or_of_no_use(sysfs, devices, allowed, threads, why):
    with pytest.raises(NotBound) as raised:
        near(devices.split(","), ACCELERATORS, allowed, threads, sysfs)
    assert str(raised.value) == why


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("-1", "the NUMA node of accelerator 1 is not known: .*/0000:65:00.0/numa_node says -1"),
        ("", "the NUMA node of accelerator 1 is not known: invalid literal"),
        (None, "the NUMA node of accelerator 1 is not known: .*No such file"),
        ("3", "none of the processors 0-67 that may be used here belongs to NUMA node 3"),
        ("7", "the processors of NUMA node 7 are not known: .*No such file"),
    ],
)
def test_what_the_kernel_does_not_tell_of_one_accelerator_binds_to_none(sysfs, node, why):
    if node is None:
        (sysfs / "bus/pci/devices/0000:65:00.0/numa_node").unlink()
    else:
        put(sysfs, "0000:65:00.0", node)
    devices = ["1"] if node == "3" else ["0", "1"]
    with pytest.raises(NotBound, match=why):
        near(devices, ACCELERATORS, ALL, 1, sysfs)


@pytest.mark.parametrize(("text", "cpus"), [("0-2,5,7-8\n", {0, 1, 2, 5, 7, 8}), ("3\n", {3}), ("\n", set()), ("", set())])
def test_lists_of_processors(text, cpus):
    assert parse_cpus(text) == cpus
    assert in_ranges(cpus) == text.strip()


@given(st.frozensets(st.integers(0, 300)))
def test_lists_of_processors_are_read_as_they_were_written(cpus):
    assert parse_cpus(in_ranges(cpus)) == cpus
