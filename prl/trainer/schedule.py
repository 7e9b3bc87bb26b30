"""The learning rate over the steps of a run."""

import math

from prl.trainer.options import TrainOptions


def learning_rate(options: TrainOptions, step: int) -> float:
    """AdamW's rate in step `step` (from 1): a linear rise over the warm-up, then constant, or a fall to the floor, which is
    reached in step `schedule_steps`."""
    peak, floor, warmup = options.learning_rate, options.min_learning_rate, options.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if options.schedule == "constant":
        return peak
    if options.schedule_steps is None:
        raise ValueError(f"train.schedule = {options.schedule}: train.schedule_steps is not known")
    done = min((step - warmup) / max(options.schedule_steps - warmup, 1), 1.0)
    left = 1.0 - done if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (peak - floor) * left
