"""Why an attempt ended, and what is to be done then: one table.

    reason          goes on?
    done            no: all is trained
    stopped         no: somebody asked for the end with STOP
    cancelled       no: somebody ended it
    quota           no: a person has to make room first
    out of memory   no: it would run out of it again
    error           no: it would fail again
    bad node        no: it would be given the same nodes again; a person has to leave them out first
    time limit      yes
    preempted       yes
    requeued        yes: somebody had Slurm put it into the queue again
    node failure    yes
    killed          yes: its orchestrator, or a node agent, was ended from outside without a word

An attempt that is to go on is put into the queue again where Slurm may do that, otherwise the next job of its chain goes on.
Attempts that trained no step, one after another, end that: they would go on for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal[
    "done",
    "stopped",
    "cancelled",
    "quota",
    "out of memory",
    "error",
    "bad node",
    "time limit",
    "preempted",
    "requeued",
    "node failure",
    "killed",
]
Next = Literal["requeue", "chain", "stop"]
GOES_ON: frozenset[Reason] = frozenset({"time limit", "preempted", "requeued", "node failure", "killed"})


@dataclass(frozen=True)
class Means:
    """By what a run may go on."""

    requeue: bool  # Slurm may put the job into the queue again
    chain: int  # jobs of the chain that have not begun
    fruitless: int  # attempts in a row that may train no step; the last of them ends the run


NO_MEANS = Means(requeue=False, chain=0, fruitless=1)  # of a run without Slurm: nobody would start it again


@dataclass(frozen=True)
class Decision:
    next: Next
    words: str  # why


def decide(reason: Reason, attempts: Sequence[int], means: Means) -> Decision:
    """`attempts`: the last trained step of each attempt so far, in their order, the one that has ended last."""
    if reason not in GOES_ON:
        return Decision("stop", reason)
    if not (means.requeue or means.chain):
        return Decision("stop", f"{reason}; nothing is left that would go on (cluster.requeue, cluster.chain)")
    if (count := fruitless(attempts)) >= means.fruitless:
        return Decision("stop", f"{reason}; {count} attempts in a row trained no step")
    return Decision("requeue" if means.requeue else "chain", reason)


def fruitless(attempts: Sequence[int]) -> int:
    """How many of the last attempts did not get further than all before them."""
    count = 0
    for number in range(len(attempts) - 1, -1, -1):
        if attempts[number] > max(attempts[:number], default=0):
            break
        count += 1
    return count
