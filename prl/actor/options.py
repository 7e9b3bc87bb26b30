"""Options of the actors: how answers are asked for."""

from dataclasses import dataclass
from typing import Annotated

from prl.config.bounds import Above, AtLeast, AtMost, Below


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    processes: Annotated[int, "actor processes in all, spread over the sampling nodes", AtLeast(1), Below(10**4)] = 1
    max_groups: Annotated[int, "groups that one actor works on at once", AtLeast(1), Below(10**6)] = 64
    lease_groups: Annotated[int, "most groups that one lease hands out", AtLeast(1), Below(10**6)] = 32
    max_tokens: Annotated[int, "longest answer (of one turn), in tokens", AtLeast(1), Below(10**8)] = 512
    temperature: Annotated[float, "sampling temperature; training assumes 1", Above(0), Below(10**6)] = 1.0
    top_p: Annotated[float, "nucleus sampling; training assumes 1", Above(0), AtMost(1)] = 1.0
    request_s: Annotated[float, "deadline of one request to a sampler, in seconds", Above(0)] = 600.0
    rollout_s: Annotated[
        float, "deadline of one rollout with all its turns and its reward, and of scoring a group, in seconds", Above(0)
    ] = 600.0
    rollout_tries: Annotated[
        int, "times that a rollout is tried when samplers or verifier fail it, before its group fails", AtLeast(1), Below(10**4)
    ] = 3
