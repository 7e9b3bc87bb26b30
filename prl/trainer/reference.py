"""The reference of the KL term: a frozen copy of the run's initial policy, without gradients and optimizer."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.trainer.batch import Batch
from prl.trainer.head import hidden_states, token_logprobs
from prl.trainer.mapping import export_weights, load_weights
from prl.trainer.model import build_model
from prl.trainer.options import TrainOptions
from prl.trainer.table import Sliced
from prl.weights.digest import part, total


@dataclass
class Reference:
    config: ModelConfig
    options: TrainOptions
    chunks: list[torch.nn.Module]
    digest: int  # of its full tensors in the trainer's dtype: that of version 0:0
    spent_s: float = 0.0  # computing log-probs, so far

    def complete(self, batch: Batch) -> Batch:
        """The micro-batch with reference log-probs: its own where the step file carries them, else computed. A collective of
        the tensor-parallel ranks."""
        if batch.reference_logprobs is not None:
            return batch
        torch.cuda.synchronize()
        started = time.monotonic()
        completed = replace(batch, reference_logprobs=self.logprobs(batch))
        torch.cuda.synchronize()
        self.spent_s += time.monotonic() - started
        return completed

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """log p(targets) [T] of the initial policy."""
        model = self.chunks[0]
        return token_logprobs(model, hidden_states(model, batch), batch.targets, self.config, self.options)[0]


def build_reference(config: ModelConfig, options: TrainOptions, weights: Iterable[tuple[str, Sliced]]) -> Reference:
    """`weights`: the initial policy's full tensors, in the order of `table.tensor_shapes`. A collective of the
    tensor-parallel ranks."""
    chunks = build_model(config, options)
    load_weights(chunks, config, weights)
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    return Reference(config, options, chunks, total(part(name, tensor) for name, tensor in export_weights(chunks, config)))
