"""Whether the samplers' accelerators hold a version of the weights that arrives beside the one that they serve.

What vLLM takes of an accelerator is sample.gpu_memory_utilization of it. The rest holds what arrives (prl/config/memory.py),
the buckets in which it does, and what CUDA and NCCL take for a group of their own, an estimate that was never measured.
"""

from dataclasses import dataclass
from fractions import Fraction

from prl.config.accelerators import accelerator_gib
from prl.config.hf_config import ModelConfig
from prl.config.load import replace
from prl.config.memory import arriving_bytes, bucket_bytes, size_in_words
from prl.config.schema import Config

_GIB = 1024**3
_OTHERS_BYTES = 1 * _GIB  # CUDA's and NCCL's


@dataclass(frozen=True)
class Room:
    """On an accelerator that samples, in bytes."""

    free: int  # beside vLLM's part
    needed: int  # for a version on its way

    @property
    def enough(self) -> bool:
        return self.needed <= self.free


def room_for_staging(config: Config, model: ModelConfig) -> Room | None:
    """None where it is not known: without accelerators or their size, or with a KV cache of a given size, beside which vLLM
    takes what it needs."""
    room_gib, _ = accelerator_gib(config.cluster)
    if not config.cluster.gpus_per_node or room_gib is None or config.sample.kv_cache_mib is not None:
        return None
    left = 1 - Fraction(str(config.sample.gpu_memory_utilization))
    needed = arriving_bytes(config, model) + bucket_bytes(config, model) + _OTHERS_BYTES
    return Room(int(left * Fraction(str(room_gib)) * _GIB), needed)


def settle_staging(config: Config, model: ModelConfig | None) -> Config:
    """The configuration with weights.staging full or chunked where it was auto."""
    if config.weights.staging != "auto":
        return config
    room = None if model is None else room_for_staging(config, model)
    chunked = model is not None and room is not None and not room.enough and not needs_whole_versions(config, model)
    return replace(config, weights={"staging": "chunked" if chunked else "full"})


def needs_whole_versions(config: Config, model: ModelConfig | None) -> str:
    """Why no version can be written over the last one bucket by bucket; empty where it can, for all that is known here."""
    weights, sample = config.weights, config.sample
    why = ""
    if weights.delta and weights.transport == "gather":
        why = "weights.delta = true"
    elif sample.quantization != "none":
        why = f"sample.quantization = {sample.quantization}"
    elif model is not None and model.experts and "triton" not in map(sample.engine_args.get, ("moe-backend", "moe_backend")):
        why = "an expert outside of vLLM's Triton kernels (sample.engine_args: {moe-backend: triton})"
    return why and f"{why} keeps or needs a whole version beside the live one"


def describe_staging(config: Config, model: ModelConfig) -> str:
    """What was chosen and why, in a line or two; the configuration is a settled one."""
    chosen, room = config.weights.staging, room_for_staging(config, model)
    if room is None:
        return f"  weights.staging = {chosen}; whether samplers have the memory for full is not known here"
    share = f"sample.gpu_memory_utilization = {config.sample.gpu_memory_utilization:g}"
    words = (
        f"  weights.staging = {chosen}: beside vLLM ({share}) an accelerator has {size_in_words(room.free)}, and what\n    "
        f"arrives takes {size_in_words(room.needed)} with its buckets, CUDA's and NCCL's memory"
    )
    if room.enough or chosen == "chunked":
        return words
    why = needs_whole_versions(config, model)
    return f"{words},\n    which is more: lower that share{f'; {why}' if why else ', or set chunked'}"
