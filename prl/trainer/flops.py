"""Floating-point operations of a model and of accelerators, from which model FLOP utilisation (MFU) follows. No torch."""

import re

import numpy as np
import numpy.typing as npt

from prl.config.hf_config import ModelConfig

# Dense FLOP/s in bfloat16 without sparsity, by words of the name that the driver gives; the first that fits counts.
_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # of one of its two dies, which are a device each
}


def peak_flops(accelerator: str) -> float | None:
    """FLOP/s in bfloat16 of the accelerator of this name; None where it is not known."""
    return next((peak for words, peak in _PEAKS.items() if re.search(rf"\b{words}\b", accelerator)), None)


def step_flops(model: ModelConfig, lengths: npt.NDArray[np.int64], *, frozen: bool = False) -> float:
    """Of the forward and backward pass over sequences of these lengths, nothing computed twice: a product's gradients cost
    twice what it does, once for each side. `frozen`: the weights need none, but for adapters, which are left out of account."""
    weights, attention = _products(model, lengths)
    return (2 if frozen else 3) * weights + 3 * attention


def forward_flops(model: ModelConfig, lengths: npt.NDArray[np.int64]) -> float:
    """Of the forward pass."""
    return sum(_products(model, lengths))


def _products(model: ModelConfig, lengths: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Of matrix products alone, a multiplication and an addition being two: those with weights, and those of attention. Each
    token attends to itself and to those before it in its sequence, as far as the model's window goes; each goes through the
    output layer."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    dense, router = (model.experts_per_token * model.expert_ffn_size, model.experts) if model.experts else (model.ffn_size, 0)
    layer = model.hidden_size * (2 * queries + 2 * keys + 3 * dense + router)
    weights = model.layers * layer + model.hidden_size * model.vocabulary
    pairs = lengths * (lengths + 1) / 2
    if model.window is not None:
        beyond = np.maximum(lengths - model.window, 0)
        pairs = pairs - beyond * (beyond + 1) / 2
    return 2.0 * weights * float(lengths.sum()), 4.0 * model.layers * queries * float(pairs.sum())
