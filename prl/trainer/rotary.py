"""Rotary positions: the frequencies of a model and what its scaling of them means for attention."""

import math

import torch
from torch import Tensor

from prl.config.hf_config import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling


def inverse_frequencies(model: ModelConfig) -> Tensor:
    """Rotary frequencies [head_dim / 2] in radians a position: theta^(-2i / head_dim), scaled as the model's config says."""
    plain = 1.0 / (model.rope_theta ** (torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim))
    match model.rope_scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            turns = scaling.original_positions * plain / (2 * math.pi)  # within the original context
            passage = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
        case YarnScaling() as scaling:
            first, last = (_dimension(model, scaling, turns) for turns in (scaling.fast_turns, scaling.slow_turns))
            if scaling.whole_dimensions:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, model.head_dim - 1)
            width = last - first or 0.001
            passage = 1 - (torch.arange(len(plain), dtype=torch.float32) - first) / width
        case None:
            return plain
    keep = passage.clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _dimension(model: ModelConfig, scaling: YarnScaling, turns: float) -> float:
    """The dimension whose frequency makes so many full turns within the original context."""
    return model.head_dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))


def attention_scale(model: ModelConfig) -> float:
    """What products of queries and keys are multiplied by. YaRN's factor is on both, so it is here twice."""
    factor = model.rope_scaling.attention_factor if isinstance(model.rope_scaling, YarnScaling) else 1.0
    return factor**2 / math.sqrt(model.head_dim)
