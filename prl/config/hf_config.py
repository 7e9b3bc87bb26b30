"""A model's config.json in Hugging Face's form: read into what the trainer needs, and made for a model that starts from random
weights. No transformers import: it costs seconds."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.config.plain_files import read_plain
from prl.trainer.options import ModelOptions

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
VOCABULARIES = {"digits": 16, "bytes": 260}  # tokens of the tokenizers that prl.runfolder.model writes
_MANY = 10**5  # layers, heads, experts
_LARGE = 1e12
_ROPE_THETA = 10000.0
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_KEYS = {  # of config.json, by the fields of ModelConfig that must fit each other
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}


class UnsupportedModelError(Exception):
    """The folder's model has something that the trainer would compute wrongly; `args` are what that is, one by one."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


@dataclass(frozen=True)
class LinearScaling:
    """All rotary frequencies divided by a factor."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretching of the rotary frequencies."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's: dimensions that turn more than `fast_turns` times within the original context keep their frequency, those that
    turn less than `slow_turns` times have it divided by `factor`, with a linear passage between."""

    factor: float
    attention_factor: float  # queries and keys are each multiplied by it as they are turned
    fast_turns: float
    slow_turns: float
    original_positions: int
    whole_dimensions: bool  # the passage's ends are rounded outwards to whole dimensions


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
    rope_scaling: LinearScaling | Llama3Scaling | YarnScaling | None
    window: int | None  # how many tokens a token attends to, itself and those before it; None: all
    experts: int  # 0: dense; else all layers have experts in the place of the feed-forward layer
    experts_per_token: int
    expert_ffn_size: int
    experts_weights_sum_to_one: bool  # else a token's weights of its experts are their shares among all experts

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.architecture in ("qwen3", "qwen3_moe")

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """Rows of the embedding so that every tensor-parallel rank has equally many."""
        return -(-self.vocabulary // tensor_parallel) * tensor_parallel


def read_model_config(folder: Path) -> ModelConfig:
    """From `folder`/config.json. Raises UnsupportedModelError with the key that is in the way."""
    path = folder / "config.json"
    try:
        raw = json.loads(read_plain(path))
        if not isinstance(raw, dict):
            raise UnsupportedModelError("holds no keys and values; download it again")
        return model_config(raw)
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path} does not exist: model.path must be a Hugging Face model folder") from None
    except (OSError, ValueError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    except KeyError as error:
        raise UnsupportedModelError(f"{path}: the key {error.args[0]!r} is missing") from None
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None


def model_config(raw: Mapping[str, Any], keys: Mapping[str, str] = _KEYS) -> ModelConfig:
    """From the contents of a config.json, as transformers 4 or 5 writes it. `keys`: what messages call fields of the answer."""
    architecture = raw["model_type"]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(f"model_type {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    for key, wanted in (("hidden_act", "silu"), ("mlp_bias", False), ("decoder_sparse_step", 1)):
        if raw.get(key, wanted) != wanted:
            raise UnsupportedModelError(f"{key} = {raw[key]!r} is not supported, only {wanted!r}")
    for key in ("attention_bias", "mlp_only_layers", "quantization_config"):
        if raw.get(key) and (key, architecture) != ("attention_bias", "qwen2"):  # Qwen2 always has biases, whatever is said
            raise UnsupportedModelError(f"{key} = {raw[key]!r} is not supported")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # of two, transformers takes the older name's alone
    turned = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    if turned != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor = {turned} is not supported, only 1")
    heads, hidden_size = _size(raw, "num_attention_heads", _MANY), _size(raw, "hidden_size")
    model = ModelConfig(
        architecture=architecture,
        vocabulary=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        ffn_size=_size(raw, "intermediate_size"),
        layers=_size(raw, "num_hidden_layers", _MANY),
        heads=heads,
        kv_heads=heads if raw.get("num_key_value_heads") is None else _size(raw, "num_key_value_heads"),
        head_dim=hidden_size // heads if raw.get("head_dim") is None else _size(raw, "head_dim"),
        norm_epsilon=_positive(raw, "rms_norm_eps"),
        tied=_flag(raw, "tie_word_embeddings"),
        max_positions=_size(raw, "max_position_embeddings"),
        rope_theta=_positive({"rope_theta": _ROPE_THETA, **raw, **rope}, "rope_theta"),
        rope_scaling=_rope_scaling(raw, rope),
        window=_window(raw),
        **_experts(raw),
    )
    problems = list(_inconsistencies(model, keys))
    if problems:
        raise UnsupportedModelError(*problems)
    return model


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
    if options.architecture not in ("qwen2", "mistral"):  # Qwen2 always has biases on queries, keys and values, Mistral never
        config["attention_bias"] = False
    if options.architecture == "llama":
        config["mlp_bias"] = False
    if options.architecture == "mistral":
        config["sliding_window"] = None
    if options.architecture == "qwen3_moe":
        config |= {
            "num_experts": options.experts,
            "num_experts_per_tok": options.experts_per_token,
            "moe_intermediate_size": options.expert_ffn_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _size(raw: Mapping[str, Any], key: str, limit: int = 10**8) -> int:
    value = raw[key]
    if type(value) is not int or value < 1:
        raise UnsupportedModelError(f"{key} = {value!r}: expected a whole number of at least 1")
    if value >= limit:
        raise UnsupportedModelError(f"{key} = {str(value)[:20]}{'...' * (value >= 10**20)}: must be below {limit}")
    return value


def _positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw[key] if default is None or raw.get(key) is not None else default
    if type(value) not in (int, float) or not 0 < value < _LARGE:
        raise UnsupportedModelError(f"{key} = {value!r:.40}: expected a number above 0 and below {_LARGE:g}")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = raw.get(key)
    if value is not None and type(value) is not bool:
        raise UnsupportedModelError(f"{key} = {value!r:.40}: expected true or false")
    return default if value is None else value


def _inconsistencies(model: ModelConfig, keys: Mapping[str, str]) -> Iterator[str]:
    """Which sizes do not go together; `keys` says what they are called."""
    if model.heads % model.kv_heads:
        yield f"{keys['kv_heads']} = {model.kv_heads}: must divide {keys['heads']} = {model.heads}"
    if model.head_dim < 2 or model.head_dim % 2:
        yield f"{keys['head_dim']} = {model.head_dim}: must be even (rotary positions turn pairs) and at least 2"
    elif model.architecture == "qwen2" and model.head_dim * model.heads != model.hidden_size:
        yield (
            f"{keys['head_dim']} = {model.head_dim}: qwen2 wants {keys['hidden_size']} / {keys['heads']} = "
            f"{model.hidden_size}/{model.heads}; change one of the three"
        )
    if model.architecture == "llama" and model.hidden_size % model.heads:  # else the samplers refuse it
        yield f"{keys['hidden_size']} = {model.hidden_size}: llama wants a multiple of {keys['heads']} = {model.heads}"
    if model.experts_per_token > model.experts:
        yield f"{keys['experts_per_token']} = {model.experts_per_token}: there are {keys['experts']} = {model.experts}"
    if model.rope_theta <= 1:
        yield f"rope_theta = {model.rope_theta:g}: must be above 1 (rotary frequencies fall with the dimension)"


def _rope_scaling(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError("rope_parameters that differ between layers are not supported")
    if kind not in _ROPE_TYPES:
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported, only {', '.join(_ROPE_TYPES)}")
    positions = "original_max_position_embeddings"
    original = _size({**raw, positions: raw.get(positions) or rope.get(positions) or raw["max_position_embeddings"]}, positions)
    if kind == "linear":
        return LinearScaling(_positive(rope, "factor"))
    if kind == "llama3":
        factor, low, high = (_positive(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise UnsupportedModelError(f"high_freq_factor = {high}: must be above low_freq_factor = {low}")
        return Llama3Scaling(factor, low, high, original)
    if kind == "yarn":
        factor = _positive(rope, "factor", raw["max_position_embeddings"] / original)
        return YarnScaling(
            factor=factor,
            attention_factor=_attention_factor(rope, factor),
            fast_turns=_positive(rope, "beta_fast", 32),
            slow_turns=_positive(rope, "beta_slow", 1),
            original_positions=original,
            whole_dimensions=_flag(rope, "truncate", True),
        )
    return None


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's, as given or else from the factor (and the two multipliers of its logarithm, where there are any)."""

    def growth(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return _positive(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return growth(_positive(rope, "mscale")) / growth(_positive(rope, "mscale_all_dim"))
    return growth(1.0)


def _window(raw: Mapping[str, Any]) -> int | None:
    mistral = raw["model_type"] == "mistral"
    window = raw.get("sliding_window", 4096) if mistral or _flag(raw, "use_sliding_window") else None
    if window is None or _size({**raw, "sliding_window": window}, "sliding_window") >= raw["max_position_embeddings"]:
        return None
    if not mistral:  # the samplers refuse them too
        raise UnsupportedModelError(f"use_sliding_window = true with sliding_window = {window} is not supported")
    return int(window)


def _experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw["model_type"] != "qwen3_moe":
        return {"experts": 0, "experts_per_token": 0, "expert_ffn_size": 0, "experts_weights_sum_to_one": False}
    key = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts, chosen = _size(raw, key, _MANY), _size(raw, "num_experts_per_tok")
    to_one = _flag(raw, "norm_topk_prob")
    if chosen == 1 and to_one:
        raise UnsupportedModelError("norm_topk_prob = true is not supported with one expert a token: its weight is always 1")
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_ffn_size": _size(raw, "moe_intermediate_size"),
        "experts_weights_sum_to_one": to_one,
    }
