"""The model with its data parallelism and optimizer, which a step changes and a checkpoint holds, and its reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.utils import get_model_config

from prl.config.hf_config import ModelConfig
from prl.trainer import corrections, device
from prl.trainer.model import DTYPES, unwrap
from prl.trainer.options import TrainOptions
from prl.trainer.reference import ProximalPolicy, Reference, build_proximal
from prl.trainer.schedule import learning_rate

_VALUE_HEAD = 1.0  # marks its group of parameters, in a field that only Megatron's own schedule would read; elsewhere 0


@dataclass(frozen=True)
class Engine:
    config: ModelConfig
    options: TrainOptions
    chunks: tuple[DistributedDataParallel, ...]  # one a virtual pipeline stage of this rank
    optimizer: MegatronOptimizer
    reference: Reference | None
    proximal: ProximalPolicy | None

    @property
    def gpts(self) -> list[GPTModel]:
        return [unwrap(chunk) for chunk in self.chunks]


def build_engine(
    modules: Sequence[torch.nn.Module], config: ModelConfig, options: TrainOptions, reference: Reference | None = None
) -> Engine:
    """Wrap the chunks of a model that has its weights already: the optimizer copies them where it keeps its own in float32."""
    corrections.apply()
    megatron = get_model_config(modules[0])
    chunks = tuple(
        DistributedDataParallel(
            megatron,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=options.distributed_optimizer,
            ),
            module,
        )
        for module in modules
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.0,  # groups of parameters are known by it in checkpoints; see _set_schedule
            min_lr=0.0,
            params_dtype=DTYPES[options.dtype],
            bf16=options.dtype == "bfloat16",
            use_distributed_optimizer=options.distributed_optimizer,
            **_offload(options),
        ),
        list(chunks),
        _groups(options),
    )
    megatron.finalize_model_grads_func = finalize_model_grads
    megatron.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    proximal = build_proximal(config, options) if options.proximal == "previous" else None
    return Engine(config, options, chunks, optimizer, reference, proximal)


def optimizer_step(engine: Engine, step: int) -> tuple[float, bool]:
    """Let the gradients that the passes of step `step` (from 1) have left change the weights. Returns their norm before
    clipping, and whether the weights have changed: where the norm is not finite, on whichever rank, they and the optimizer's
    state stay as they were on all of them. A collective of all ranks."""
    optimizer, options = engine.optimizer, engine.options
    _set_schedule(engine, step)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    not_finite = torch.tensor([0.0 if math.isfinite(norm) else 1.0], device=device.device())
    dist.all_reduce(not_finite, op=dist.ReduceOp.MAX)
    if not_finite.item():
        return norm, False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if options.clip_grad and parameters:
        clip_grad_by_total_norm_fp32(
            parameters, max_norm=options.clip_grad, total_norm=norm, use_decoupled_grad=options.optimizer_offload
        )
    optimizer.step_with_ready_grads()
    return norm, True


def _offload(options: TrainOptions) -> dict[str, Any]:
    """Megatron's optimizer that has its state in the host's memory and is computed there. It keeps the float32 copies of the
    parameters itself, which Megatron leaves to "precision-aware" optimizers alone. (All or nothing: of a share, what stays on
    the accelerator would be moved, or miscounted, when a checkpoint is loaded.)"""
    if not options.optimizer_offload:
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,
    }


def _groups(options: TrainOptions) -> dict[ParamKey, dict[str, Any]]:
    """What parameters are told apart by, for `_set_schedule`: biases and norms do not decay, a value head has its own rate.
    Megatron loads groups by these marks: no two may have the same ones, and an option that a resume may change is none."""
    groups: dict[ParamKey, dict[str, Any]] = get_standard_config_overrides(OptimizerConfig())
    if options.value_head:
        groups[ParamKey(attr="value_head")] = {"max_lr": _VALUE_HEAD}
    return groups


def _set_schedule(engine: Engine, step: int) -> None:
    """All that the optimizer goes by is set anew in every step: a checkpoint brings what an earlier attempt went by."""
    options = engine.options
    rate = learning_rate(options, step)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate * options.value_rate_factor if group["max_lr"] == _VALUE_HEAD else rate
        group["betas"] = (options.beta1, options.beta2)
        group["eps"] = options.epsilon
        group["foreach"] = False  # torch's AdamW over all parameters at once would need the memory of one more copy of them
        # Biases and norms do not decay: Megatron marks their group, and leaves it to the schedule to act on it.
        group["weight_decay"] = options.weight_decay * group["wd_mult"]
