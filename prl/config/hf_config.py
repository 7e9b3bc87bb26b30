"""A model's config.json in Hugging Face's form: read into what the trainer needs, and made for a model that starts from random
weights. No transformers import: it costs seconds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.trainer.options import ModelOptions

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
VOCABULARIES = {"digits": 16, "bytes": 260}  # tokens of the tokenizers that prl.runfolder.model writes
_ROPE_THETA = 10000.0


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
        return model_config(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path} does not exist: model.path must be a Hugging Face model folder") from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
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
    turned = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    if turned != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor = {turned} is not supported, only 1")
    heads, hidden_size = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    return ModelConfig(
        architecture=architecture,
        vocabulary=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        ffn_size=_size(raw, "intermediate_size"),
        layers=_size(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads if raw.get("num_key_value_heads") is None else _size(raw, "num_key_value_heads"),
        head_dim=hidden_size // heads if raw.get("head_dim") is None else _size(raw, "head_dim"),
        norm_epsilon=float(raw["rms_norm_eps"]),
        tied=raw.get("tie_word_embeddings", False),
        max_positions=_size(raw, "max_position_embeddings"),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", _ROPE_THETA))),
        rope_scaling=_rope_scaling(rope),
    )


def new_model_config(options: ModelOptions, end: int, pad: int) -> dict[str, Any]:
    """The contents of a config.json for a model of an architecture and sizes, whose tokenizer ends a text with the token `end`
    and fills up with `pad`."""
    assert options.architecture is not None
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[options.architecture]],
        "model_type": options.architecture,
        "vocab_size": VOCABULARIES[options.tokenizer],
        "hidden_size": options.hidden_size,
        "intermediate_size": options.ffn_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": options.max_positions,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "rope_theta": _ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
        "tie_word_embeddings": options.tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    if options.architecture != "qwen2":  # Qwen2 always has biases on queries, keys and values
        config["attention_bias"] = False
    if options.architecture == "llama":
        config["mlp_bias"] = False
    return config


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw[key]
    if type(value) is not int or value < 1:
        raise UnsupportedModelError(f"{key} = {value!r}: expected a whole number of at least 1")
    return value


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
