"""Trainer ranks whose environments differ, before their first collective."""

import os
import subprocess
import sys

from ranks import rank_environment

from prl.control.ports import free_port

PROGRAM = """
from prl.trainer import device
device.install(1, yields_cpu=False)
from prl.trainer.agreement import compare_with_rank_0
from prl.trainer.options import TrainOptions
from prl.trainer.parallel import start_groups, stop_groups
start_groups(TrainOptions(), timeout_s=60.0, before_collectives=compare_with_rank_0)
stop_groups()
"""


def ranks_with(*environments):
    """One process a rank, with what each says and returns; those that wait for one that has failed are ended."""
    port = free_port("127.0.0.1")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=rank_environment(rank, len(environments), port) | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, environment in enumerate(environments)
    ]
    said = []
    for process in reversed(processes):
        if any(other.returncode for other in processes):
            process.kill()
        said.append(process.communicate(timeout=120)[1])
    return list(zip([process.returncode for process in processes], said[::-1], strict=True))


def test_ranks_say_what_their_collectives_depend_on_and_end_where_it_differs():
    here = os.uname().nodename
    alike = {"NCCL_ALGO": "Ring"}
    (first, said_first), (second, said_second) = ranks_with(alike, alike | {"NCCL_DEBUG": "WARN"})
    assert (first, second) == (0, 0)
    assert f"prl: trainer rank 0 on {here}: torch " in said_first
    assert "library gloo, GLOO_SOCKET_IFNAME lo, NCCL_ALGO Ring" in said_first
    assert f"prl: trainer rank 1 on {here}: torch " in said_second
    harmless = f"NCCL_DEBUG is not set at trainer rank 0 on {here} and WARN at trainer rank 1 on {here}: it changes"
    assert f"prl: differences from rank 0 that do no harm: {harmless}" in said_second

    (_, said_first), (second, said_second) = ranks_with(alike, {"NCCL_ALGO": "Tree"})
    assert second == 1
    assert (
        "prl.trainer.agreement.RanksDiffer: the trainer's ranks cannot work together: these differ: NCCL_ALGO is Ring at "
        f"trainer rank 0 on {here} and Tree at trainer rank 1 on {here}: set it alike on all nodes, in cluster.setup"
    ) in said_second
