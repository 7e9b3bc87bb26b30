"""From one layout to the next within one launch of the ranks."""

import gc

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _world


def leave_groups() -> None:
    """Megatron forgets most of its groups, which live on: each with threads of gloo's that wake up a hundred times a second,
    for as long as anything refers to it. To be called where nothing holds the layout's engine any more."""
    left = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    while left:
        if left[-1] in _world.pg_map:
            dist.destroy_process_group(left[-1])
        left.pop()
    gc.collect()
