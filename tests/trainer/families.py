"""Tiny models of every family as transformers writes them, that the worker and the tests of families make alike."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from trainer_data import VOCABULARY

from prl.config.hf_config import read_model_config
from prl.streams.records import MicroBatch
from prl.trainer.table import random_weights

LENGTHS = (3, 17, 9, 1, 41, 9)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "mistral": (transformers.MistralConfig, {"head_dim": 16, "sliding_window": 7}),
    "mistral_unwindowed": (transformers.MistralConfig, {"sliding_window": None, "tie_word_embeddings": True}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "llama_yarn": (transformers.LlamaConfig, {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2_linear": (transformers.Qwen2Config, {"rope_parameters": LINEAR, "tie_word_embeddings": False}),
    "qwen2_tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3_tied": (transformers.Qwen3Config, {"head_dim": 16, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3_untied": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_shares": (transformers.Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": False, "tie_word_embeddings": True}),
}
LARGE = {"vocab_size": 999, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}  # megabytes
EXPERT_MODELS = [name for name in CONFIGS if "moe" in name]


def microbatch() -> MicroBatch:
    """Sequences of LENGTHS whose tokens weigh differently, some of them less than nothing."""
    random, tokens = np.random.default_rng(3), sum(LENGTHS)
    positions = np.concatenate([np.arange(n) for n in LENGTHS]).astype(np.int32)
    none = np.zeros(tokens, np.float32)
    return MicroBatch(
        tokens=random.integers(0, VOCABULARY, tokens).astype(np.int32),
        positions=positions,
        boundaries=np.cumsum([0, *LENGTHS]).astype(np.int32),
        loss_weights=np.where(positions > 0, random.normal(size=tokens), 0.0).astype(np.float32),
        advantages=none,
        old_logprobs=none,
        reference_logprobs=None,
        lags=np.full(tokens, -1, np.int32),
        rollouts=(),
    )


def routings() -> np.ndarray:
    """Two of four experts for each token and layer, as if a sampler had recorded them; none for the first tokens."""
    found = np.random.default_rng(5).permuted(np.tile(np.arange(4), (sum(LENGTHS), 2, 1)), axis=-1)[:, :, :2].astype(np.int16)
    found[:5] = -1
    return found


def write_models(folder: Path) -> None:
    """A folder a model; `qwen3_moe_fused` is `qwen3_moe` with all experts of a layer in one tensor, `large` a `qwen3_untied` of
    megabytes."""
    for name, (kind, options) in CONFIGS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES, **options), dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias") or "norm" in key:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                if "mlp.gate.weight" in key:
                    parameter.normal_()  # so that experts are far apart
        model.save_pretrained(folder / name, max_shard_size="20KB" if name == "mistral" else "5GB")
        if name == "qwen3_moe":
            model.save_pretrained(folder / "qwen3_moe_fused", save_original_format=False)
    large = folder / "large"
    large.mkdir()
    config = json.loads((folder / "qwen3_untied" / "config.json").read_text())
    (large / "config.json").write_text(json.dumps(config | LARGE))
    save_file(dict(random_weights(read_model_config(large), 1)), large / "model.safetensors")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
