"""Options of the samplers: vLLM's server and what it is started with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from prl.config.bounds import Above, AtLeast, AtMost, Below


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    tensor_parallel: Annotated[int, "tensor-parallel workers of a sampler", AtLeast(1), Below(10**4)] = 1
    dtype: Annotated[Literal["float32", "bfloat16"], "dtype of the sampler's weights and cache"] = "bfloat16"
    quantization: Annotated[
        Literal["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"],
        "keep the samplers' linear layers and experts in fp8, as vLLM quantises them at each new version, inside the pause. "
        "Log-probs are those of the quantised weights: the trainer differs more from them. Needs sample.dtype: bfloat16",
    ] = "none"
    max_model_len: Annotated[int, "longest prompt and answer together, in tokens", AtLeast(2), Below(10**8)] = 4096
    max_num_seqs: Annotated[int, "sequences sampled at once in one sampler", AtLeast(1), Below(10**6)] = 128
    kv_cache_mib: Annotated[int | None, "size of the KV cache in MiB; null: vLLM's choice (GPU only)", AtLeast(1)] = None
    gpu_memory_utilization: Annotated[float, "share of a GPU's memory that vLLM may take", Above(0), AtMost(1)] = 0.9
    enforce_eager: Annotated[bool, "no graph capture (always so on CPUs)"] = False
    record_routing: Annotated[
        bool,
        "record which experts each token goes to, so that it goes to the same in the trainer (models with experts, GPU only)",
    ] = False
    threads: Annotated[int, "CPU threads of a sampler without a GPU", AtLeast(1), Below(10**4)] = 1
    restarts: Annotated[
        int, "how often a sampler that died or was given up is started again in one attempt", AtLeast(0), Below(10**4)
    ] = 3
    restart_pause_s: Annotated[
        float, "seconds before a sampler's first restart; doubled with each further one, up to 64-fold", Above(0)
    ] = 1.0
    no_token_s: Annotated[
        float,
        "a sampler that has requests and has sampled no token for so many seconds, without standing still for a new version, "
        "ends; which counts as its death",
        Above(0),
    ] = 120.0
    engine_args: Annotated[
        Mapping[str, str | int | float | bool], "further arguments of vLLM's server by their long names, e.g. {block-size: 32}"
    ] = field(default_factory=dict)
