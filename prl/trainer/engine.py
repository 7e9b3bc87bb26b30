"""The model with its data parallelism and optimizer, which a step changes and a checkpoint holds, and its reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config

from prl.config.hf_config import ModelConfig
from prl.trainer.model import DTYPES, unwrap
from prl.trainer.options import TrainOptions
from prl.trainer.reference import Reference


@dataclass(frozen=True)
class Engine:
    config: ModelConfig
    options: TrainOptions
    chunks: tuple[DistributedDataParallel, ...]  # one a virtual pipeline stage of this rank
    optimizer: MegatronOptimizer
    reference: Reference | None

    @property
    def gpts(self) -> list[GPTModel]:
        return [unwrap(chunk) for chunk in self.chunks]


def build_engine(
    modules: Sequence[torch.nn.Module], config: ModelConfig, options: TrainOptions, reference: Reference | None = None
) -> Engine:
    """Wrap the chunks of a model that has its weights already: the optimizer copies them where it keeps its own in float32."""
    megatron = get_model_config(modules[0])
    chunks = tuple(
        DistributedDataParallel(
            megatron,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                check_for_nan_in_grad=True,
                use_distributed_optimizer=options.distributed_optimizer,
            ),
            module,
        )
        for module in modules
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.learning_rate,
            min_lr=0.0,
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            adam_eps=options.epsilon,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            params_dtype=DTYPES[options.dtype],
            bf16=options.dtype == "bfloat16",
            use_distributed_optimizer=options.distributed_optimizer,
        ),
        list(chunks),
    )
    megatron.finalize_model_grads_func = finalize_model_grads
    megatron.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    return Engine(config, options, chunks, optimizer, reference)


def set_schedule(engine: Engine, step: int) -> None:
    """Learning rate and weight decay of step `step` (from 1): the rate rises linearly over the warm-up, then stays."""
    options = engine.options
    rate = options.learning_rate * min(1.0, step / max(1, options.warmup_steps))
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
        # Biases and norms do not decay: Megatron marks their group, and leaves it to the schedule to act on it.
        group["weight_decay"] = options.weight_decay * group["wd_mult"]
