"""The reference of the KL term: a frozen copy of the run's initial policy, without gradients and optimizer."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.streams.records import MicroBatch
from prl.trainer.batch import Batch
from prl.trainer.head import hidden_states, token_logprobs
from prl.trainer.mapping import export_weights, load_weights
from prl.trainer.model import build_model
from prl.trainer.options import TrainOptions
from prl.trainer.pipeline import LossOf, run_schedule
from prl.trainer.table import Sliced
from prl.weights.digest import part, total


@dataclass
class Reference:
    config: ModelConfig
    options: TrainOptions
    chunks: list[torch.nn.Module]
    digest: int  # of its full tensors in the trainer's dtype: that of version 0:0
    spent_s: float = 0.0  # computing log-probs, so far

    @torch.no_grad()
    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """log p(targets) [T] of the initial policy for each micro-batch, on the last pipeline stage; nothing on the others. A
        collective of all ranks that share the model."""
        torch.cuda.synchronize()
        started = time.monotonic()
        found = run_schedule(self.chunks, batches, self._forward_step, forward_only=True)
        torch.cuda.synchronize()
        self.spent_s += time.monotonic() - started
        return found

    def _forward_step(self, batches: Iterator[tuple[int, Batch]], model: torch.nn.Module) -> tuple[Tensor, LossOf]:
        _, batch = next(batches)

        def logprobs_of(output: Tensor, **unused: bool) -> Tensor:
            return token_logprobs(model, output, batch.targets, self.config, self.options)[0]

        return hidden_states(model, batch), logprobs_of


def build_reference(config: ModelConfig, options: TrainOptions, weights: Iterable[tuple[str, Sliced]]) -> Reference:
    """`weights`: the initial policy's full tensors, in the order of `table.tensor_shapes`. A collective of the
    ranks that share the model."""
    chunks = build_model(config, options)
    load_weights(chunks, config, weights)
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    return Reference(config, options, chunks, total(part(name, tensor) for name, tensor in export_weights(chunks, config)))
