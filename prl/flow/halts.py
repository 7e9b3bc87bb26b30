"""Where the workers of a transfer were when its deadline passed, and whose fault that was."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Halt:
    """Where a rank was in a transfer that it left."""

    reached: int  # parts that it had behind it, in an order that all ranks share
    waited_s: float  # in the next one
    overdue: bool = False  # it left as its deadline had passed


COMPLETE = Halt(2**62, 0.0)  # of a worker that has it all


def laggards(groups: Iterable[Sequence[tuple[int, Halt]]], least_s: float) -> dict[int, float]:
    """Replicas that held up others: one of their workers had fewer parts than others of its group (`groups`: replica and halt
    of each worker), which had waited in vain for `least_s` or had all. With how long the others had waited, in seconds.

    What lies behind the slow one in a broadcast's tree is as far as that, and waits, too: of several that are equally far only
    those are named that did something else than wait, if there are any. Nobody is where that would be all replicas, for then
    they waited for the trainer."""
    found: dict[int, float] = {}
    replicas: set[int] = set()
    for group in groups:
        replicas.update(replica for replica, _ in group)
        reached = min(halt.reached for _, halt in group)
        last = [(replica, halt) for replica, halt in group if halt.reached == reached]
        ahead = [halt for _, halt in group if halt.reached > reached]
        waited_s = max((halt.waited_s for halt in ahead), default=0.0)
        if waited_s >= least_s or COMPLETE in ahead:
            busy = [replica for replica, halt in last if halt.waited_s < least_s]
            for replica in busy or [replica for replica, _ in last]:
                found[replica] = max(found.get(replica, 0.0), waited_s)
    return {} if len(found) == len(replicas) else found
