"""Options of the path from the trainer's weights to the samplers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from prl.config.bounds import Above, AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    transport: Annotated[
        Literal["gather", "lanes", "filesystem"],
        "gather: one trainer rank gathers each version and sends it over a collective group; lanes: every trainer rank sends "
        "its own part, and each worker of a sampler gets only what it holds (experimental over NCCL); filesystem: one rank "
        "writes files into weights/ of the run folder, which the samplers read. Where a group breaks again and again, files "
        "are used anyway",
    ] = "gather"
    bucket_mib: Annotated[int, "size of one packed transfer, in MiB", AtLeast(1), Below(2**17)] = 256
    group_s: Annotated[float, "deadline of building the transfer group, in seconds", Above(0)] = 120.0
    update_s: Annotated[
        float, "deadline of each part of an update (offer, staging at all replicas, commit), in seconds", Above(0)
    ] = 120.0
    delta: Annotated[
        bool,
        "with gather: send only the values that changed since the version before. Costs the size of the whole model in "
        "sample.dtype, on the accelerator where there is one: on the first trainer rank, which keeps a copy of what it sent, "
        "and on every worker of the samplers, which keeps what it received at all times instead of during transfers alone",
    ] = False
    anchor_every_steps: Annotated[
        int,
        "with weights.delta: send all values again so many steps after they were last sent",
        AtLeast(1),
    ] = 100
    clear_cache: Annotated[bool, "recompute the KV cache of requests in flight at each new version instead of keeping it"] = (
        False
    )
