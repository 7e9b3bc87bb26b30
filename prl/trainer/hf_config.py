"""A model's config.json in Hugging Face's form, read into what the trainer needs. No transformers import: it costs seconds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("qwen2", "qwen3", "llama")


class UnsupportedModelError(Exception):
    """The folder's model has something that the trainer would compute wrongly."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True)
class ModelConfig:
    architecture: str  # one of ARCHITECTURES
    vocabulary: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    tied: bool  # the output layer is the embedding
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "qwen3"

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """Rows of the embedding so that every tensor-parallel rank has equally many."""
        return -(-self.vocabulary // tensor_parallel) * tensor_parallel


def read_model_config(folder: Path) -> ModelConfig:
    """From `folder`/config.json. Raises UnsupportedModelError with the key that is in the way."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path} does not exist: model.path must be a Hugging Face model folder") from None
    try:
        return model_config(raw)
    except KeyError as error:
        raise UnsupportedModelError(f"{path}: the key {error.args[0]!r} is missing") from None
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """From the contents of a config.json, as transformers 4 or 5 writes it."""
    architecture = raw["model_type"]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(f"model_type {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    for key, wanted in (("hidden_act", "silu"), ("use_sliding_window", False), ("mlp_bias", False)):
        if raw.get(key, wanted) != wanted:
            raise UnsupportedModelError(f"{key} = {raw[key]!r} is not supported, only {wanted!r}")
    if architecture != "qwen2" and raw.get("attention_bias", False):
        raise UnsupportedModelError("attention_bias = true is not supported")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    return ModelConfig(
        architecture=architecture,
        vocabulary=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        ffn_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        norm_epsilon=raw["rms_norm_eps"],
        tied=raw.get("tie_word_embeddings", False),
        max_positions=raw["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        rope_scaling=_rope_scaling(rope),
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported, only default and llama3")
    return RopeScaling(
        factor=rope["factor"],
        low_frequency_factor=rope["low_freq_factor"],
        high_frequency_factor=rope["high_freq_factor"],
        original_positions=rope["original_max_position_embeddings"],
    )
