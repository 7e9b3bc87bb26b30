"""Options of the metrics."""

from dataclasses import dataclass
from typing import Annotated

from prl.config.bounds import Above, AtLeast


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    tensorboard: Annotated[bool, "write TensorBoard scalars beside the JSONL files"] = True
    flush_s: Annotated[float, "seconds between two flushes of a process's JSONL file", AtLeast(0)] = 1.0
    engine: Annotated[
        bool,
        "have samplers write what vLLM counts of requests, KV cache and tokens. Where answers have only a few tokens, counting "
        "takes a tenth more of a sampler's processor time",
    ] = True
    report_s: Annotated[float, "seconds between two lines of what a sampler's engine or a verifier counts", Above(0)] = 10.0
