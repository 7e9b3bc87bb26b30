"""A node's processes run on the processors near their accelerators. The processes are real; files stand for those of /sys,
and a program for nvidia-smi."""

import asyncio
import os
import re

import psutil
import pytest
from agent_rig import Orchestrator, run_of, started

import prl.cluster.numa
from prl.control.options import ControlOptions
from prl.orchestrator import node_devices
from prl.orchestrator.children import ChildPlan, end_child, start_child
from prl.orchestrator.node import run_agent
from prl.orchestrator.node_devices import processors

CPUS = os.sched_getaffinity(0)
CHILD = """
import os, subprocess, sys, time
own = os.sched_getaffinity(0)
worker = subprocess.run([sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"], capture_output=True, text=True)
print(os.getpid(), *sorted(own), *sorted(map(int, worker.stdout.split())), flush=True)
time.sleep(600)
"""
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="one processor: nothing to bind to")


@pytest.fixture
def node(tmp_path, monkeypatch):
    """NUMA node 0 has one of this machine's processors and accelerator 6, node 1 the others and 7; of 8 the kernel does not
    tell the node. Gives a function that has nvidia-smi do something else."""
    first, *others = sorted(CPUS)
    for number, cpus in enumerate(([first], others)):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, cpus)))
    for bus, number in (("0a", 0), ("0b", 1), ("0c", -1)):
        folder = tmp_path / f"sys/bus/pci/devices/0000:{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{number}\n")
    monkeypatch.setattr(node_devices, "SYSFS", tmp_path / "sys")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-7b,8")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def nvidia_smi(script):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    asked = '[ "$*" = "--query-gpu=index,uuid,pci.bus_id --format=csv,noheader" ] || exit 2\n'
    rows = "6, GPU-6a, 00000000:0A:00.0\\n7, GPU-7b, 00000000:0B:00.0\\n8, GPU-8c, 00000000:0C:00.0\\n"
    nvidia_smi(f"{asked}printf '{rows}'")
    return nvidia_smi


def sampler(index, *devices, near_devices=True, **environment):
    return ChildPlan("sampler", index, 0, devices, environment, near_devices=near_devices)


def test_a_child_its_programs_and_its_next_start_run_on_the_processors_near_its_accelerator(node, tmp_path, capfd):
    run, first, every = run_of(tmp_path, CHILD), min(CPUS), sorted(CPUS)

    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=1)
        orchestrator.devices, orchestrator.near_devices = [[0], [2]], True
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.2)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        pid, *bound = await started(run, 0, 0)
        _, *free = await started(run, 1, 0)
        psutil.Process(pid).kill()
        _, *again = await started(run, 0, 1)
        orchestrator.server.stopping, orchestrator.server.grace_s = True, 0.2
        orchestrator.bell.ring()
        await asyncio.wait_for(agent, 20)
        await orchestrator.server.close()
        return bound, free, again

    assert asyncio.run(asyncio.wait_for(main(), 60)) == ([first, first], [*every, *every], [first, first])
    assert os.sched_getaffinity(0) == CPUS  # the agent itself
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "processors" in line]
    assert line.startswith(
        f"prl: processors near accelerators: sampler 0: {first}; "
        "sampler 1: not bound (the NUMA node of accelerator 8 is not known: "
    )


def test_children_that_share_a_numa_node_share_its_processors_and_one_with_more_threads_has_all(node, capfd):
    plans = [
        sampler(0, 0),
        sampler(1, 0),
        sampler(2, 1),
        sampler(3, 0, OMP_NUM_THREADS="2,1"),
        sampler(4, 0, near_devices=False),
    ]
    first, *others = sorted(CPUS)
    assert asyncio.run(processors(plans)) == {"sampler 0": {first}, "sampler 1": {first}, "sampler 2": set(others)}
    said = capfd.readouterr().err
    assert said.startswith(f"prl: processors near accelerators: sampler 0, sampler 1: {first}; sampler 2: ")
    assert f"sampler 3: not bound (2 threads (OMP_NUM_THREADS) are more than the processors {first} of NUMA node 0)" in said
    assert "sampler 4" not in said


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no driver >&2; exit 9", "nvidia-smi: exit code 9 .*: no driver"),
        ("exec sleep 20", "nvidia-smi: no answer within 0.2 s"),
        (None, "nvidia-smi: no such program on PATH"),
    ],
)
def test_where_nvidia_smi_says_nothing_no_child_is_bound_and_the_log_says_why(node, tmp_path, monkeypatch, capfd, script, why):
    monkeypatch.setattr(prl.cluster.numa, "DEVICES_S", 0.2 if script == "exec sleep 20" else 10.0)
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    else:
        node(script)
    assert asyncio.run(processors([sampler(0, 0)])) == {}
    assert re.match(f"prl: no process is bound to processors near its accelerators: {why}", capfd.readouterr().err)


def test_nothing_is_asked_where_no_child_is_to_be_bound(node, tmp_path, capfd):
    node(f"touch {tmp_path}/asked")
    assert asyncio.run(processors([sampler(0, near_devices=False)])) == {}
    assert not (tmp_path / "asked").exists()
    assert capfd.readouterr().err == ""


def test_a_child_whose_processors_are_gone_runs_on_the_others_and_says_so(tmp_path):
    run_of(tmp_path, CHILD)
    environment = {"PYTHONPATH": str(tmp_path / "stub"), "PYTHONSAFEPATH": "1"}

    async def main():
        child = await start_child(sampler(0, 0, **environment), {}, tmp_path, cpus={max(CPUS) + 4000})
        async with asyncio.timeout(20):
            while child.log.read_text().count("\n") < 2:  # noqa: ASYNC110 (written by another process)
                await asyncio.sleep(0.02)
        await end_child(child, 5.0)
        return child.log.read_text().splitlines()

    said, found = asyncio.run(main())
    assert said == f"prl: not bound to processors [{max(CPUS) + 4000}]: [Errno 22] Invalid argument"
    assert {int(cpu) for cpu in found.split()[1:]} == CPUS
