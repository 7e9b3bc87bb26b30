"""Checks of the learning rate's schedule, of where the optimizer's state is, and of which checkpoints are kept."""

from collections.abc import Iterator

from prl.config.schema import Config


def optimizer_problems(config: Config) -> Iterator[str]:
    train = config.train
    last = train.schedule_steps or config.run.steps
    if train.schedule == "constant":
        for key in ("schedule_steps", "min_learning_rate"):
            value = getattr(train, key)
            if value:
                yield f"train.{key} = {value}: has no effect with train.schedule = constant; choose cosine or linear"
    elif last <= train.warmup_steps:
        key = "train.schedule_steps" if train.schedule_steps else "run.steps"
        yield f"{key} = {last}: the learning rate falls after train.warmup_steps = {train.warmup_steps}; set more than that"
    elif train.min_learning_rate > train.learning_rate:
        yield (
            f"train.min_learning_rate = {train.min_learning_rate}: is above train.learning_rate = {train.learning_rate}, from "
            f"which the rate falls; lower it"
        )
    elif last < config.run.steps and not train.min_learning_rate:
        yield (
            f"train.schedule_steps = {last}: from there on the learning rate is train.min_learning_rate = 0, and the steps to "
            f"run.steps = {config.run.steps} would change nothing; set null, or a min_learning_rate"
        )
    if train.optimizer_offload:
        key = "train.optimizer_offload = true"
        if not config.cluster.gpus_per_node:
            yield f"{key}: without accelerators the optimizer is in the host's memory already; leave it out"
        elif not train.distributed_optimizer or train.dtype != "bfloat16":
            yield (
                f"{key}: Megatron moves the state of its distributed optimizer alone, and that of bfloat16 parameters; set "
                f"train.distributed_optimizer: true and train.dtype: bfloat16"
            )
    if train.checkpoint_keep_every_steps and train.checkpoint_keep_last is None:
        yield (
            f"train.checkpoint_keep_every_steps = {train.checkpoint_keep_every_steps}: all checkpoints are kept; set "
            f"train.checkpoint_keep_last to the number of newest ones to keep besides"
        )
    elif train.checkpoint_every_steps and train.checkpoint_keep_every_steps % train.checkpoint_every_steps:
        yield (
            f"train.checkpoint_keep_every_steps = {train.checkpoint_keep_every_steps}: is no multiple of "
            f"train.checkpoint_every_steps = {train.checkpoint_every_steps}; most of those steps have no checkpoint"
        )


def optimizer_warnings(config: Config) -> Iterator[str]:
    train, steps = config.train, config.run.steps
    if train.schedule == "constant" and train.warmup_steps > steps:
        yield (
            f"train.warmup_steps = {train.warmup_steps}: is more than run.steps = {steps}, so that the learning rate never "
            f"reaches train.learning_rate = {train.learning_rate}"
        )
