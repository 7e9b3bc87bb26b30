"""Options of the actors: how answers are asked for."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    processes: Annotated[int, "actor processes in all, spread over the sampling nodes"] = 1
    max_groups: Annotated[int, "groups that one actor works on at once"] = 64
    lease_groups: Annotated[int, "most groups that one lease hands out"] = 32
    max_tokens: Annotated[int, "longest answer (of one turn), in tokens"] = 512
    temperature: Annotated[float, "sampling temperature; training assumes 1"] = 1.0
    top_p: Annotated[float, "nucleus sampling; training assumes 1"] = 1.0
    request_s: Annotated[float, "deadline of one request to a sampler, in seconds"] = 600.0
    rollout_s: Annotated[float, "deadline of one rollout with all its turns and its reward, in seconds"] = 1200.0
    rollout_tries: Annotated[int, "times that a rollout is tried when samplers or verifier fail it, before its group fails"] = 3
