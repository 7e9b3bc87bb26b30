"""Corrections of two faults of Megatron's distributed optimizer (0.19.2) that would spoil checkpoints."""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_set_states = DistributedOptimizer._set_main_param_and_optimizer_states
_world_state = DistributedOptimizer.get_parameter_state_dp_zero


def apply() -> None:
    """For this process, before an optimizer is built; a second call does nothing."""
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_without_count
    DistributedOptimizer.get_parameter_state_dp_zero = _world_state_with_padding


def _set_states_without_count(self: DistributedOptimizer, parameter: torch.Tensor, tensors: dict[str, Any]) -> None:
    """It looks for Adam's count among the tensors it has loaded, where its format does not hold it."""
    _set_states(self, parameter, {"step": None, **tensors})


def _world_state_with_padding(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
    """It joins buckets without the padding between them, and then looks for parameters where they lie with it. (An embedding
    that pipeline stages share has a bucket of its own.)"""
    state = _world_state(self, *args, **kwargs)
    for number, buffer in enumerate(self.buffers if state else ()):
        for tensors in state[number].values() if len(buffer.buckets) > 1 else ():
            for key, joined in tensors.items():
                if isinstance(joined, torch.Tensor):
                    tensors[key] = joined.new_zeros(buffer.numel)
                    parts = torch.split(joined, [bucket.numel_unpadded for bucket in buffer.buckets])
                    for bucket, part in zip(buffer.buckets, parts, strict=True):
                        tensors[key][bucket.offset : bucket.offset + len(part)] = part
    return state
