"""What AdamW keeps of each parameter, and how many steps it counts, in whichever of Megatron's optimizers it is."""

from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

from prl.trainer.engine import Engine


def optimizer_states(engine: Engine) -> list[dict[str, Any]]:
    """What the optimizers of this rank keep of each parameter."""
    return [kept for optimizer in _torchs(engine) for kept in optimizer.state.values()]


def allocate(engine: Engine) -> None:
    """Make the state that torch's AdamW makes in its first step, for a load, without that step's zeros and work: a load fills
    all of it, or fails, and has Megatron set what pads the vocabulary to 0. (Of Transformer Engine's, Megatron makes it.)"""
    if engine.options.optimizer_offload:
        for optimizer in engine.optimizer.chained_optimizers:
            optimizer._init_optimizer_states_with_dummy_values()
    elif not HAVE_APEX_OR_TE:
        for optimizer in _torchs(engine):
            for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                moments = {key: torch.empty_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


def step_count(engine: Engine) -> int:
    """Steps that the optimizer has made: torch's count them for each parameter, Transformer Engine's for each group."""
    held = [*optimizer_states(engine), *engine.optimizer.param_groups]
    return max((int(one["step"]) for one in held if "step" in one), default=0)


def set_step_count(engine: Engine, state: dict[Any, Any], count: int) -> None:
    """Put that number into a state that is to be loaded."""
    for part in [state] if len(engine.optimizer.chained_optimizers) == 1 else state.values():
        inner = part.get("optimizer", part)  # within, where Megatron has parameters of its own beside
        if engine.options.distributed_optimizer or HAVE_APEX_OR_TE:
            for group in inner["param_groups"]:
                group["step"] = count
        else:
            inner["state"]["common_step"] = torch.tensor(float(count))


def _torchs(engine: Engine) -> list[torch.optim.Optimizer]:
    """The optimizers within Megatron's of this rank."""
    found = (optimizer.optimizer for optimizer in engine.optimizer.chained_optimizers)
    return [optimizer for optimizer in found if optimizer is not None]
