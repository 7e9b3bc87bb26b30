"""Steps that a worker's ranks take together."""

from dataclasses import replace

import numpy as np
from megatron.core import parallel_state
from trainer_data import facts, microbatches

from prl.trainer.engine import Engine
from prl.trainer.step import train_step


def steps(engine: Engine, *numbers: int, broken: bool = False) -> np.ndarray:
    """Loss, gradient norm and whether it was skipped, of each of these steps."""
    batches = microbatches()
    if broken:
        batches[1] = replace(batches[1], advantages=batches[1].advantages * np.float32("nan"))
    mine = batches[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    metrics = [train_step(engine, mine, facts(number)) for number in numbers]
    return np.array([[m["train/loss"], m["train/grad_norm"], m["train/skipped"]] for m in metrics])
