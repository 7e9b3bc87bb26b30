"""What a step cost: seconds by phase, tokens and padding, model FLOP utilisation, memory."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from prl.config.hf_config import ModelConfig
from prl.metrics import names
from prl.streams.records import MicroBatch
from prl.trainer import device
from prl.trainer.context import computed_tokens
from prl.trainer.flops import peak_flops, step_flops
from prl.trainer.options import TrainOptions


class Stopwatch:
    """Seconds by phase, with the accelerator's work for this thread done at both ends of each."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.current_stream().synchronize()  # not what sends weights meanwhile
        started = time.perf_counter()
        yield
        torch.cuda.current_stream().synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def efficiency(
    config: ModelConfig,
    options: TrainOptions,
    microbatches: Sequence[MicroBatch],
    computed: Sequence[MicroBatch],
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Metrics over all ranks of a step that took this rank `seconds` (by phase) for its `microbatches`; for want of any it
    `computed` an idle one. A collective of all ranks."""
    tensor, context = options.tensor_parallel, options.context_parallel
    slots = context * sum(computed_tokens(batch.boundaries, tensor, context) for batch in computed)
    lengths = np.concatenate([np.diff(batch.boundaries).astype(np.int64) for batch in microbatches] or [np.zeros(0, np.int64)])
    on_device = device.device()
    flops_here = step_flops(config, lengths, frozen=options.lora_rank > 0)
    sums = torch.tensor([lengths.sum(), slots, flops_here], dtype=torch.float64, device=on_device)
    memory = torch.tensor(device.take_peak_memory_bytes(), dtype=torch.float64, device=on_device)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    tokens, slots_of_all, flops = sums.tolist()
    found = {
        names.ALL_TOKENS: tokens,
        names.PADDING: 1 - tokens / slots_of_all,
        names.PEAK_MEMORY_BYTES: memory.item(),
    }
    peak = _peak_flops(options)
    if peak:
        busy_s = seconds[names.FORWARD_BACKWARD_S] + seconds[names.OPTIMIZER_S]
        found[names.MFU] = flops / (peak * dist.get_world_size() * busy_s)
    return found


def _peak_flops(options: TrainOptions) -> float | None:
    """Of one rank's accelerator, in `dtype`; None where it is not known."""
    if options.peak_tflops:
        return options.peak_tflops * 1e12
    return peak_flops(device.name()) if options.dtype == "bfloat16" else None
