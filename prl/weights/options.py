"""Options of the path from the trainer's weights to the samplers."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    bucket_mib: Annotated[int, "size of one packed transfer, in MiB"] = 256
    group_s: Annotated[float, "deadline of building the transfer group, in seconds"] = 120.0
    update_s: Annotated[float, "deadline of one update from the first byte to the last replica's commit, in seconds"] = 120.0
    clear_cache: Annotated[bool, "recompute the KV cache of requests in flight at each new version instead of keeping it"] = (
        False
    )
