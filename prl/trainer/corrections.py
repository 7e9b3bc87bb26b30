"""Corrections of Megatron's distributed optimizer (0.19.2), whose state is in a checkpoint as if ranks did not share it: of a
fault that would spoil it, and of who saves and loads what. Megatron gathers all of it in the memory of the first data-parallel
rank for a save, and has each of them read all of it at a load. Of the forms in which it gathers nothing, dp_reshardable fits no
other number of tensor- or pipeline-parallel ranks, and fully_sharded_model_space has flattened ranges, which its checkpoints
refuse."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def apply() -> None:
    """For this process, before an optimizer is built; a second call does nothing."""
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_without_count
    DistributedOptimizer.sharded_param_state_fully_reshardable = _param_state_of_this_rank


def _set_states_without_count(self: DistributedOptimizer, parameter: Tensor, tensors: dict[str, Any]) -> None:
    """It looks for Adam's count among the tensors it has loaded, where its format does not hold it."""
    _set_states(self, parameter, {"step": None, **tensors})


def _param_state_of_this_rank(
    self: DistributedOptimizer, model_state: ShardedStateDict, is_loading: bool = False, metadata: dict[str, Any] | None = None
) -> dict[int, dict[str, ShardedBase]]:
    """By the numbers that Megatron looks for, which passes over those that are missing: of the parameters of which this rank
    has a part, what is to be saved or where it is to be put."""
    sharded = {one.data: one for one in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    found: dict[int, dict[str, ShardedBase]] = {}
    for number, parameter, replica, state in _to_load(self) if is_loading else _to_save(self):
        model = sharded[parameter]
        found[number] = {}
        for key, values in state.items():
            changed: dict[str, Any] = {
                "key": f"optimizer.state.{key}.{model.key}",
                "data": values.view(parameter.shape),
                "replica_id": (*model.replica_id[:2], replica),
            }
            if isinstance(model, ShardedTensor):
                changed["dtype"] = values.dtype
            found[number][key] = replace(model, **changed)
    return found


Whole = Iterator[tuple[int, Tensor, int, dict[str, Tensor]]]  # number, parameter, which copy it is, and its whole state by keys


def _to_load(self: DistributedOptimizer) -> Whole:
    """A parameter's state goes where it is to be, if all of it is this rank's; where a part is, into new memory."""
    for number, parameter, own, state in _own(self):
        # Each value is asked for by one rank in the first place: by who has the first of the parameter's.
        replica = 0 if own.start == 0 else self.data_parallel_group.rank() + 1
        yield number, parameter, replica, state if own.size == parameter.numel() else _new(parameter, state)


def _to_save(self: DistributedOptimizer) -> Whole:
    """A parameter's state is saved by the rank that has all of it. Where ranks have parts, which are the neighbours in whose
    midst it lies, those send theirs to the one that has the first."""
    group = self.data_parallel_group_gloo
    parts = {number: (own.start, own.end) for number, parameter, own, _ in _own(self) if own.size < parameter.numel()}
    of_ranks: list[dict[int, tuple[int, int]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(of_ranks, parts, group)
    for number, parameter, own, state in _own(self):  # in the same order on all ranks, so that none waits for another in vain
        if own.size == parameter.numel():
            yield number, parameter, 0, state
        elif own.start:
            first = next(rank for rank, held in enumerate(of_ranks) if held.get(number, (1, 1))[0] == 0)
            for values in state.values():
                dist.send(values.cpu(), group=group, group_dst=first)
        else:
            whole = _new(parameter, state)
            for rank, held in enumerate(of_ranks):
                if number in held:
                    for key, values in state.items():
                        part = whole[key][slice(*held[number])]
                        if rank == group.rank():
                            part.copy_(values)
                        else:
                            dist.recv(part, group=group, group_src=rank)
            yield number, parameter, 0, whole


def _own(self: DistributedOptimizer) -> Iterator[tuple[int, Tensor, Any, dict[str, Tensor]]]:
    """Number, parameter, the range of it that this rank has, and the state of that, of each of which it has any."""
    for number, parameter in enumerate(chain.from_iterable(buffer.param_index_map for buffer in self.buffers)):
        if parameter in self.model_param_group_index_map:
            kept = self._get_main_param_and_optimizer_states(parameter)
            own = self._get_model_param_range_map(parameter)["param"]
            yield number, parameter, own, {key: kept[key].detach() for key in ("param", *self.optimizer_state_keys)}


def _new(parameter: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Memory for the state of a whole parameter, in that of the host."""
    return {key: torch.empty(parameter.numel(), dtype=values.dtype, device="cpu") for key, values in state.items()}
