"""Options of the verifier service."""

from dataclasses import dataclass
from typing import Annotated

from prl.config.bounds import Above, AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class VerifierOptions:
    processes: Annotated[
        int, "worker processes of the pool; 0: no verifier, for domains that judge by themselves", AtLeast(0), Below(10**4)
    ] = 2
    check_s: Annotated[
        float, "deadline of one check, in seconds; a worker that overruns it is killed and replaced", Above(0)
    ] = 5.0
    memory_mib: Annotated[int, "address space that a worker process may take, in MiB", AtLeast(1)] = 4096
