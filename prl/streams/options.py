"""Options of the rollout and step streams."""

from dataclasses import dataclass
from typing import Annotated, Literal

from prl.config.bounds import AtLeast


@dataclass(frozen=True, kw_only=True)
class StreamsOptions:
    roll_groups: Annotated[int, "rollouts are published when there are so many groups,", AtLeast(1)] = 32
    roll_mib: Annotated[int, "or so many MiB,", AtLeast(1)] = 64
    roll_s: Annotated[float, "or when its first group is so many seconds old", AtLeast(0)] = 0.2
    queue_mib: Annotated[
        int, "an actor waits while more than so many MiB of its finished groups are not durable", AtLeast(1)
    ] = 256
    keep: Annotated[
        Literal["needed", "all"],
        "needed: rollout and step files that the newest checkpoint makes superfluous are deleted; all: every file is kept, for "
        "replay and for people to read",
    ] = "needed"
