import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Results, run_ranks
from trainer_data import VOCABULARY

WORKERS = Path(__file__).parent


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
        run_ranks([sys.executable, str(WORKERS / "trainer_worker.py"), str(model_folders)], ranks)
    return Results(model_folders)


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Tiny models of every family, each in its folder, and what one rank and two have made of them."""
    from families import write_models

    folder = tmp_path_factory.mktemp("families")
    write_models(folder)
    for ranks in (1, 2):
        (folder / f"ranks_{ranks}").mkdir()
        run_ranks([sys.executable, str(WORKERS / "families_worker.py"), str(folder)], ranks)
    return Results(folder)
