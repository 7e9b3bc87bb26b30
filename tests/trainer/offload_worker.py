"""One rank of two of the tests of an optimizer in the host's memory: `offload_worker.py FOLDER`. Rank 0 writes what came out to
FOLDER/ranks_2/<name>.npz for the tests to judge.

There is no accelerator to move anything from. Megatron asks for one in a single place, where it splits the parameters: there
they say that they are on one, and their copies that they are not. All else is as it is.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_layouts import DENSE, PLAIN
from trained import steps

# An epsilon beside which gradients are small: without it Adam would not see whether they were clipped.
BESIDE = replace(PLAIN, dtype="bfloat16", distributed_optimizer=True, clip_grad=0.05, epsilon=1e-2, learning_rate=1e-2)
ADAPTERS = replace(BESIDE, lora_rank=4)
OPTIONS = {
    "beside": BESIDE,
    "host": replace(BESIDE, optimizer_offload=True),
    "adapters_beside": ADAPTERS,
    "adapters_host": replace(ADAPTERS, optimizer_offload=True),
}


def main(folder: Path) -> None:
    from prl.trainer import device

    device.install(1)
    import torch
    from megatron.core import parallel_state
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from torch.overrides import TorchFunctionMode

    from prl.trainer.checkpoint import begin_save, finish_save, load_checkpoint
    from prl.trainer.engine import Engine, build_engine
    from prl.trainer.mapping import export_weights, load_weights
    from prl.trainer.model import build_model
    from prl.trainer.options import TrainOptions
    from prl.trainer.parallel import Channel, start_groups, stop_groups
    from prl.trainer.table import random_weights

    class Accelerator(TorchFunctionMode):
        """All tensors are on one, but those that came of `cpu`."""

        def __init__(self) -> None:
            super().__init__()
            self.copies: list[torch.Tensor] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            of_a_copy = any(args[0] is copy for copy in self.copies) if args else False
            if func == torch.Tensor.is_cuda.__get__:
                return not of_a_copy
            result = args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and (of_a_copy or func is torch.Tensor.cpu):
                self.copies.append(result)
            return result

    split = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def split_on_accelerator(self: HybridDeviceOptimizer, fraction: float) -> Any:
        with Accelerator():
            return split(self, fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = split_on_accelerator

    rank = int(os.environ["RANK"])
    results = folder / "ranks_2"
    start_groups(BESIDE, timeout_s=60.0)
    channel = Channel(60.0)

    def engine_of(options: TrainOptions) -> Engine:
        chunks = build_model(DENSE, options)
        load_weights(chunks, DENSE, random_weights(DENSE, 11))
        return build_engine(chunks, DENSE, options)

    def save(engine: Engine, name: str, step: int) -> None:
        finish_save(begin_save(engine, channel, results / name, step), channel, 120.0)

    def resumed(options: TrainOptions, name: str) -> Engine:
        engine = engine_of(options)
        load_checkpoint(engine, results / name)
        return engine

    def weights(engine: Engine) -> np.ndarray:
        return np.concatenate([x.float().numpy().ravel() for _, x in export_weights(engine.chunks, engine.config)])

    def report(name: str, values: dict[str, np.ndarray]) -> None:
        if rank == 0:
            np.savez(results / f"{name}.npz", **values)

    # As two data-parallel ranks, which share the optimizer's state, and at last as tensor-parallel ones.
    for name, options in OPTIONS.items():
        engine = engine_of(options)
        found = {"start": weights(engine), "first": steps(engine, 1, 2), "weights": weights(engine)}
        save(engine, name, 2)
        found["went_on"] = steps(engine, 3, 4)
        found["last"] = weights(engine)
        fresh = resumed(options, name)
        found |= {"resumed": steps(fresh, 3, 4), "resumed_last": weights(fresh)}
        if options.optimizer_offload:
            (optimizer,) = (part.optimizer for part in engine.optimizer.chained_optimizers)
            held = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
            moved = [copy.numel() for copy in optimizer.gpu_params_map_cpu_copy.values()]
            found["held"], found["moved"] = np.array(sum(held)), np.array(sum(moved))
            assert optimizer.gpu_optimizer is None
        if name == "host":
            bare = engine_of(options)
            found["only"] = steps(bare, 1, broken=True)
            save(bare, "only", 1)
            found["only_then"] = steps(bare, 2, 3)
            found["only_resumed"] = steps(resumed(options, "only"), 2, 3)
        report(name, found)
    pairs = (("host", "beside"), ("beside", "host"), ("adapters_host", "adapters_beside"), ("adapters_beside", "adapters_host"))
    crossed = {f"{name}_from_{saved}": steps(resumed(OPTIONS[name], saved), 3, 4) for name, saved in pairs}
    parallel_state.destroy_model_parallel()
    for name in ("host", "adapters_host", "adapters_beside"):
        tensor = replace(OPTIONS[name], tensor_parallel=2)
        if not parallel_state.model_parallel_is_initialized():
            start_groups(tensor, timeout_s=60.0)
        crossed[f"{name}_in_another_split"] = steps(resumed(tensor, name), 3, 4)
    report("crossed", crossed)
    torch.distributed.barrier()
    stop_groups()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
