import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from trainer_data import VOCABULARY

WORKER = Path(__file__).with_name("trainer_worker.py")


class Results:
    """What the workers wrote: results[ranks, name] is a mapping of arrays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, key: tuple[int, str]) -> Mapping[str, np.ndarray]:
        ranks, name = key
        with np.load(self.folder / f"ranks_{ranks}" / f"{name}.npz") as file:
            return dict(file)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
    port = free_port()
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


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models as transformers writes them: qwen2/, qwen3/ and llama/ (with Llama 3's stretched rotary embedding)."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    stretched = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    configs = {
        "qwen2": Qwen2Config(**sizes, num_key_value_heads=1, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
        "llama": LlamaConfig(**sizes, num_key_value_heads=4, tie_word_embeddings=False, rope_parameters=stretched),
    }
    folder = tmp_path_factory.mktemp("models")
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias") or "norm" in key:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def results(model_folders: Path) -> Results:
    for ranks in (1, 2):
        (model_folders / f"ranks_{ranks}").mkdir()
        run_ranks([sys.executable, str(WORKER), str(model_folders)], ranks)
    return Results(model_folders)
