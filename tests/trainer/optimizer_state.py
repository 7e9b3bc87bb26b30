"""An optimizer's state as full tensors, so that ranks of any split can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from prl.trainer.engine import Engine
from prl.trainer.mapping import export_weights, named_parameters
from prl.trainer.model import build_model
from prl.trainer.parallel import shares_weights

KINDS = ("param", "exp_avg", "exp_avg_sq")


def optimizer_state(engine: Engine) -> dict[str, np.ndarray]:
    """The weights as the optimizer has them in float32 and AdamW's two moments, by `kind:name` with Hugging Face's names; the
    weights as the model has them, by `model:name`. Without adapters and value head. A collective of all ranks, of which the
    first one has all of it."""
    held = _held(engine)
    # To be filled with each kind in turn.
    chunks = build_model(engine.config, replace(engine.options, dtype="float32", value_head=False, context_parallel=1))
    empty = named_parameters(chunks)
    found = _exported(engine.chunks, engine, "model")
    for kind in KINDS:
        for name, parameter in named_parameters(engine.chunks).items():
            empty[name].data.copy_(held[parameter][kind].view_as(parameter))
        found |= _exported(chunks, engine, kind)
    return found


def _exported(chunks: Sequence[torch.nn.Module], engine: Engine, kind: str) -> dict[str, np.ndarray]:
    if not shares_weights():
        return {}
    return {f"{kind}:{name}": tensor.float().numpy().copy() for name, tensor in export_weights(chunks, engine.config)}


def _held(engine: Engine) -> Mapping[Tensor, Mapping[str, Tensor]]:
    """What is kept of each parameter of this rank."""
    optimizers = [one for one in engine.optimizer.chained_optimizers if not one.is_stub_optimizer]
    if engine.options.distributed_optimizer:
        return {parameter: kept for one in optimizers for parameter, kept in _put_together(one).items()}
    states = {main: kept for one in optimizers for main, kept in one.optimizer.state.items()}
    parameters = named_parameters(engine.chunks).values()
    mains = {parameter: getattr(parameter, "main_param", parameter) for parameter in parameters}
    return {parameter: {"param": main, **states[main]} for parameter, main in mains.items()}


def _put_together(optimizer: DistributedOptimizer) -> dict[Tensor, dict[str, Tensor]]:
    """From the shares of all data-parallel ranks."""
    found = {}
    for parameter in (parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map):
        found[parameter] = {kind: torch.zeros(parameter.numel()) for kind in KINDS}
        if parameter in optimizer.model_param_group_index_map:
            own = optimizer._get_model_param_range_map(parameter)["param"]
            kept = optimizer._get_main_param_and_optimizer_states(parameter)
            for kind, tensor in found[parameter].items():
                tensor[own.start : own.end] = kept[kind]
        for tensor in found[parameter].values():
            dist.all_reduce(tensor, group=optimizer.data_parallel_group)
    return found
