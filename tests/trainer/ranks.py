"""One process a rank, as torchrun would start them, and what they leave."""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from prl.control.ports import free_port


class Results:
    """What the workers wrote: results[ranks, name] is a mapping of arrays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, key: tuple[int, str]) -> Mapping[str, np.ndarray]:
        ranks, name = key
        with np.load(self.folder / f"ranks_{ranks}" / f"{name}.npz") as file:
            return dict(file)


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun, or the node agent, would set."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }


def run_ranks(command: list[str], ranks: int) -> None:
    """One process a rank; raises with their output when one fails."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryFile() as output:
        processes = [
            subprocess.Popen(command, env=rank_environment(rank, ranks, port), stdout=output, stderr=subprocess.STDOUT)
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=900) for process in processes]
        finally:
            for process in processes:
                process.kill()
        output.seek(0)
        assert codes == [0] * ranks, output.read().decode(errors="replace")[-8000:]
