"""Copies of the model without gradients and optimizer: the reference of the KL term, which is the run's initial policy, and the
proximal policy of decoupled PPO, which is that of the step before."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.streams.records import MicroBatch
from prl.trainer.batch import Batch
from prl.trainer.context import joined
from prl.trainer.head import hidden_states, token_logprobs
from prl.trainer.lora import is_adapter, merged
from prl.trainer.mapping import export_weights, load_weights
from prl.trainer.model import build_model, unwrap
from prl.trainer.options import TrainOptions
from prl.trainer.pipeline import LossOf, run_schedule
from prl.trainer.table import Sliced
from prl.trainer.value_head import is_value_head
from prl.weights.digest import part, total


@dataclass(kw_only=True)
class FrozenPolicy:
    config: ModelConfig
    options: TrainOptions
    chunks: list[torch.nn.Module]

    @property
    def gpts(self) -> list[GPTModel]:
        return [unwrap(chunk) for chunk in self.chunks]

    @torch.no_grad()
    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """log p(targets) [T] of this policy for each micro-batch, on the last pipeline stage; nothing on the others. A
        collective of all ranks that share the model."""
        return run_schedule(self.chunks, batches, self._forward_step, forward_only=True)

    def _forward_step(self, batches: Iterator[tuple[int, Batch]], model: torch.nn.Module) -> tuple[Tensor, LossOf]:
        _, batch = next(batches)

        def logprobs_of(output: Tensor, **unused: bool) -> Tensor:
            return joined(token_logprobs(model, output, batch.targets, self.config, self.options)[0], batch.cut)

        return hidden_states(model, batch), logprobs_of


@dataclass(kw_only=True)
class Reference(FrozenPolicy):
    digest: int  # of its full tensors in the trainer's dtype: that of version 0:0


@dataclass(kw_only=True)
class ProximalPolicy(FrozenPolicy):
    known: bool = False  # not before a run's first step

    @torch.no_grad()
    def take(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Become the policy of these chunks of the trained model, as it is now."""
        for mine, theirs in zip(self.chunks, chunks, strict=True):
            policy = (p for name, p in theirs.named_parameters() if not (is_adapter(name) or is_value_head(name)))
            for own, trained in zip(mine.parameters(), policy, strict=True):
                own.copy_(merged(trained))
        self.known = True


def build_reference(config: ModelConfig, options: TrainOptions, weights: Iterable[tuple[str, Sliced]]) -> Reference:
    """`weights`: the initial policy's full tensors, in the order of `prl.config.tensors`. A collective of the
    ranks that share the model."""
    chunks = _frozen_model(config, options)
    load_weights(chunks, config, weights)
    digest = total(part(name, tensor) for name, tensor in export_weights(chunks, config))
    return Reference(config=config, options=options, chunks=chunks, digest=digest)


def build_proximal(config: ModelConfig, options: TrainOptions) -> ProximalPolicy:
    return ProximalPolicy(config=config, options=options, chunks=_frozen_model(config, options))


def _frozen_model(config: ModelConfig, options: TrainOptions) -> list[torch.nn.Module]:
    chunks = build_model(config, replace(options, lora_rank=0, value_head=False))
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    return chunks
