"""Options of the rollout and step streams."""

from dataclasses import dataclass
from typing import Annotated

from prl.config.bounds import AtLeast


@dataclass(frozen=True, kw_only=True)
class StreamsOptions:
    roll_groups: Annotated[int, "a rollout file is published when it holds so many groups,", AtLeast(1)] = 32
    roll_mib: Annotated[int, "or so many MiB,", AtLeast(1)] = 64
    roll_s: Annotated[float, "or when its first group is so many seconds old", AtLeast(0)] = 0.2
