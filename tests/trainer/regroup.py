"""From one layout to the next within one launch of the ranks."""

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _world


def leave_groups() -> None:
    """Megatron forgets most of its groups, which live on: each with threads of gloo's that wake up a hundred times a second."""
    left = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in left:
        if group in _world.pg_map:
            dist.destroy_process_group(group)
