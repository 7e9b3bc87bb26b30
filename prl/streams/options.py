"""Options of the rollout and step streams."""

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True, kw_only=True)
class StreamsOptions:
    backend: Annotated[Literal["arrow"], "arrow: files on the shared filesystem"] = "arrow"
    roll_groups: Annotated[int, "a rollout file is published when it holds so many groups,"] = 32
    roll_mib: Annotated[int, "or so many MiB,"] = 64
    roll_s: Annotated[float, "or when its first group is so many seconds old"] = 0.2
