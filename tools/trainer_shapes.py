"""Shapes, random models and random micro-batches for the programs that measure the trainer.

It wants torch and megatron-core alone. Import it before anything of prl.trainer: it finds prl in this checkout and prepares the
process for Megatron.
"""

# ruff: noqa: E402 - Megatron is imported after device.install

import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prl.trainer import device

device.install(os.cpu_count() or 1)
warnings.filterwarnings("ignore", module="megatron")  # about kernels that it does without
logging.getLogger("megatron").setLevel(logging.ERROR)

import numpy as np
import torch
from torch import Tensor

from prl.config.hf_config import ModelConfig, model_config
from prl.config.tensors import tensor_shapes
from prl.streams.records import MicroBatch, StepFacts
from prl.trainer.batch import Batch, to_device
from prl.trainer.engine import Engine, build_engine
from prl.trainer.head import hidden_states, token_logprobs
from prl.trainer.mapping import load_weights
from prl.trainer.model import build_model
from prl.trainer.options import TrainOptions
from prl.trainer.parallel import start_groups


@dataclass(frozen=True)
class Shape:
    """A model's shape, as its config.json gives it."""

    name: str
    raw: Mapping[str, Any]

    @property
    def config(self) -> ModelConfig:
        return model_config(self.raw)

    def cut(self, layers: int) -> "Shape":
        return Shape(f"{self.name}, {layers} layers", {**self.raw, "num_hidden_layers": layers})


def qwen(name: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool) -> Shape:
    return Shape(
        name,
        {
            "model_type": "qwen2",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    )


def start_alone() -> None:
    """One rank with groups of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start_groups(TrainOptions(), timeout_s=120.0)


def random_tensors(config: ModelConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Full tensors, drawn where they will live; norms and biases too, so that a comparison sees them."""
    generator = torch.Generator(device.device()).manual_seed(seed)
    for name, shape in tensor_shapes(config).items():
        drawn = torch.empty(shape, device=device.device()).normal_(0.0, 0.02, generator=generator)
        yield name, drawn + 1 if "norm" in name else drawn


def microbatch(lengths: np.ndarray, vocabulary: int, seed: int = 0) -> MicroBatch:
    """Random sequences of which the first quarter is the prompt."""
    random = np.random.default_rng(seed)
    total = int(lengths.sum())
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    weights = np.concatenate([np.where(np.arange(n) < max(1, n // 4), 0.0, 1.0) for n in lengths]).astype(np.float32)
    return MicroBatch(
        tokens=random.integers(0, vocabulary, total).astype(np.int32),
        positions=positions,
        boundaries=np.cumsum([0, *lengths]).astype(np.int32),
        loss_weights=weights,
        advantages=random.normal(0.0, 1.0, total).astype(np.float32),
        old_logprobs=np.full(total, -np.log(vocabulary), np.float32),
        reference_logprobs=None,
        lags=np.where(weights > 0, 1, -1).astype(np.int32),
        rollouts=(),
    )


def lognormal_lengths(tokens: int, longest: int, seed: int = 0) -> np.ndarray:
    """Lengths around an eighth of the longest that add up to `tokens`."""
    random = np.random.default_rng(seed)
    found: list[int] = []
    while sum(found) < tokens:
        length = int(np.clip(random.lognormal(np.log(longest / 8), 0.9), 2, longest))
        found.append(min(length, tokens - sum(found)))
    return np.array(found, np.int64)


def facts_of(batch: MicroBatch, step: int) -> StepFacts:
    trained = batch.loss_weights > 0
    return StepFacts(step, float(batch.loss_weights.sum()), int(trained.sum()), len(batch.boundaries) - 1, 1)


def cut(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Into runs of at most so many tokens."""
    runs: list[list[int]] = [[]]
    for length in lengths.tolist():
        if sum(runs[-1]) + length > tokens:
            runs.append([])
        runs[-1].append(length)
    return [np.array(run) for run in runs]


def whole_logits(model: Any, batch: Batch) -> Tensor:
    logits: Tensor = model(batch.tokens[None], batch.positions[None], None, packed_seq_params=batch.sequences)[0].float()
    return logits


def engine_of(shape: Shape, options: TrainOptions) -> Engine:
    config = shape.config
    chunks = build_model(config, options)
    load_weights(chunks, config, random_tensors(config))
    return build_engine(chunks, config, options)


def both_passes(engine: Engine, *batches: MicroBatch) -> None:
    """Of the model and its output layer, with a loss that costs nothing."""
    engine.chunks[0].zero_grad_buffer()
    for batch in batches:
        own = to_device(batch, 1)
        hidden = hidden_states(engine.chunks[0], own)
        logprobs, _ = token_logprobs(engine.chunks[0], hidden, own.targets, engine.config, engine.options)
        logprobs.sum().backward()
