"""Options of the verifier service."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class VerifierOptions:
    processes: Annotated[int, "worker processes of the pool; 0: no verifier, for domains that judge by themselves"] = 2
    check_s: Annotated[float, "deadline of one check, in seconds; a worker that overruns it is killed and replaced"] = 5.0
    memory_mib: Annotated[int, "address space that a worker process may take, in MiB"] = 4096
