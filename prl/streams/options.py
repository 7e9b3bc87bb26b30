"""Options of the rollout and step streams."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from prl.config.bounds import Above, AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class RedisOptions:
    start: Annotated[
        bool,
        "the orchestrator starts a server of the run's own, with its data in the run folder and the run's token as password",
    ] = False
    url: Annotated[str, "or the server that is there already, such as redis://host:6379/0"] = ""
    password_file: Annotated[str, "file with that server's password; none: it has none"] = ""
    max_mib: Annotated[
        int,
        "an actor waits while more than so many MiB of its rollouts are in the server and not yet done with, unless the next "
        "step lacks some",
        AtLeast(1),
    ] = 1024
    full_s: Annotated[
        float,
        "and gives up after so many seconds; at least control.start_s + control.wait_s, in which trainers may begin again",
        Above(0),
    ] = 1200.0
    reconnect_s: Annotated[float, "seconds for which a server that does not answer is tried again", Above(0)] = 60.0


@dataclass(frozen=True, kw_only=True)
class StreamsOptions:
    backend: Annotated[
        Literal["folder", "redis"], "folder: rollouts cross as files on the shared filesystem; redis: through a Redis server"
    ] = "folder"
    redis: Annotated[RedisOptions, "the server, with backend: redis"] = field(default_factory=RedisOptions)
    roll_groups: Annotated[
        int,
        "an actor publishes its finished groups when the next step waits for them, when there are so many,",
        AtLeast(1),
        Below(10**6),
    ] = 32
    roll_mib: Annotated[int, "or so many MiB,", AtLeast(1), Below(2**17)] = 64
    # Only what no step waits for gets so old: a long time costs no step anything. A file every few seconds is little even for
    # the metadata server behind a thousand actors (200 files/s), and what a dead actor held is soon sampled again.
    roll_s: Annotated[float, "or when the first of them is so many seconds old", AtLeast(0)] = 5.0
    queue_mib: Annotated[
        int,
        "an actor publishes at once, and waits, while so many MiB of its finished groups are not durable",
        AtLeast(1),
        Below(2**17),
    ] = 256
    keep: Annotated[
        Literal["needed", "all"],
        "needed: rollout and step files that the last checkpoint but one makes superfluous are deleted; all: every file is "
        "kept, for replay and for people to read",
    ] = "needed"
