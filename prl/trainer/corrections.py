"""Corrections of Megatron's distributed optimizer (0.19.2): of two faults that would spoil checkpoints, and of a third that has
a resume read, and hold in the host's memory, what other ranks need."""

from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_set_states = DistributedOptimizer._set_main_param_and_optimizer_states
_world_state = DistributedOptimizer.get_parameter_state_dp_zero
_param_state = DistributedOptimizer.sharded_param_state_fully_reshardable


def apply() -> None:
    """For this process, before an optimizer is built; a second call does nothing."""
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_without_count
    DistributedOptimizer.get_parameter_state_dp_zero = _world_state_with_padding
    DistributedOptimizer.sharded_param_state_fully_reshardable = _param_state_of_this_rank


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


def _param_state_of_this_rank(
    self: DistributedOptimizer, model_state: ShardedStateDict, is_loading: bool = False, metadata: dict[str, Any] | None = None
) -> Any:
    """It has each data-parallel rank load the state of all of them into new memory, and copy its share from there. Here a
    parameter's state goes where it is to be, if all of it is this rank's; where a part is, into new memory; else nowhere."""
    if not is_loading:
        return _param_state(self, model_state, is_loading, metadata)
    sharded = {one.data: one for one in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    wanted: dict[int, dict[str, ShardedBase]] = {}
    # By the numbers that Megatron, which passes over those that are missing, looks for.
    for number, parameter in enumerate(chain.from_iterable(buffer.param_index_map for buffer in self.buffers)):
        if parameter not in self.model_param_group_index_map:
            continue
        own, model = self._get_model_param_range_map(parameter)["param"], sharded[parameter]
        kept = self._get_main_param_and_optimizer_states(parameter)
        # Each value is asked for by one rank in the first place: by who has the first of the parameter's.
        replica = (*model.replica_id[:2], 0 if own.start == 0 else self.data_parallel_group.rank() + 1)
        wanted[number] = {}
        for key in ("param", *self.optimizer_state_keys):
            values = kept[key].detach()
            if own.size < parameter.numel():
                values = torch.empty(parameter.numel(), dtype=values.dtype, device="cpu")
            changed = {"key": f"optimizer.state.{key}.{model.key}", "data": values.view(parameter.shape), "replica_id": replica}
            if isinstance(model, ShardedTensor):
                changed["dtype"] = values.dtype
            wanted[number][key] = replace(model, **changed)
    return wanted
