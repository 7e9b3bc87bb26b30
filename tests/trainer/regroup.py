"""From one layout to the next within one launch of the ranks."""

import gc

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _world

from prl.trainer.parallel import Channel


def leave_groups(kept: Channel | None = None) -> None:
    """End all groups but that of all ranks and that of the channel `kept`. Megatron forgets most of its own, which live on:
    each with threads of gloo's that wake up a hundred times a second, for as long as anything refers to it. To be called where
    nothing holds the layout's engine any more."""
    parallel_state.destroy_model_parallel()
    stay = [dist.group.WORLD, *([kept._group] if kept is not None else [])]
    for group in [group for group in _world.pg_map if group not in stay]:
        dist.destroy_process_group(group)
        del group
    gc.collect()
