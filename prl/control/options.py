"""Options of the control plane: how often processes report and how long anyone waits."""

from dataclasses import dataclass
from typing import Annotated

from prl.config.bounds import Above, AtLeast


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    heartbeat_s: Annotated[float, "seconds between two heartbeats of a process", AtLeast(0.01)] = 1.0
    lost_after_s: Annotated[float, "a process that was silent for so many seconds counts as lost", Above(0)] = 30.0
    restarts: Annotated[
        int,
        "how often an actor, verifier or preprocessor that died or fell silent is started again in one attempt; so is the "
        "trainer, all its ranks together, from the newest checkpoint",
        AtLeast(0),
    ] = 3
    restart_pause_s: Annotated[
        float, "seconds before the first restart of such a process; doubled with each further one, up to 64-fold", Above(0)
    ] = 1.0
    start_s: Annotated[float, "seconds that every process has to start and join", Above(0)] = 300.0
    wait_s: Annotated[
        float,
        "deadline of a wait for work (a batch, a version, a lease), in seconds; start_s more where trainers may begin again "
        "meanwhile",
        Above(0),
    ] = 900.0
    no_progress_s: Annotated[
        float,
        "where for so many seconds no step is trained and no group of rollouts comes back, all processes write their stacks "
        "into their logs; a trainer that is waited for is started again, else the run ends; less than wait_s, whose deadlines "
        "do not know who is waited for",
        Above(0),
    ] = 600.0
    log_mib: Annotated[int, "a process's log that is larger is cut down to its last quarter of that, in MiB", AtLeast(1)] = 256
    stop_s: Annotated[float, "seconds that processes have to end by themselves at the end of a run", Above(0)] = 60.0

    @property
    def trainers_s(self) -> float:
        """Seconds that trainers which are started again have to be there: their checkpoint is checked, and loaded, before they
        join. So long everyone waits whose calls depend on where they begin; whom to blame if they do not is known by then."""
        return self.start_s + self.wait_s
