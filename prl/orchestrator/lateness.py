"""Who was late where a transfer broke off at its deadline: every worker has one, too, and says at the latest then how far it
came."""

import time

from prl.flow.halts import COMPLETE, Halt, laggards
from prl.orchestrator.replicas import ReplicaDesk
from prl.orchestrator.update import Update

ANSWER_S = 5.0  # after its deadline that a worker has to say how far it came
HELD_UP = 0.25  # of the deadline: so long others have to have waited for somebody who is blamed


async def blame(update: Update, desk: ReplicaDesk, update_s: float) -> None:
    """Fence the replicas that do not say what became of the version. Where all do, those that held up the others are known to
    have done so, and fenced where it is not the first time (Membership.held_up)."""
    end = max(time.monotonic(), update.sending_s + update_s) + ANSWER_S
    await desk.changed.until(lambda: not any(map(update.missing, update.alive)), end - time.monotonic())
    silent = {replica: workers for replica in update.alive if (workers := update.missing(replica))}
    for replica, workers in silent.items():
        who = ", ".join(f"worker {worker}" for worker in workers)
        words = f"{replica.name} did not say within {update_s:g} s what became of version {update.version}: waited for {who}"
        desk.fence(replica.index, "late", words)
    if silent:
        return
    held_up = laggards(_groups(update), HELD_UP * update_s)
    for replica in update.alive:
        if replica.index in held_up:
            waited = f"others had waited {held_up[replica.index]:.1f} s for it" if held_up[replica.index] else "others had it"
            words = f"{replica.name} held up version {update.version}: {waited} when the deadline of {update_s:g} s passed"
            desk.held_up(replica, words)


def _groups(update: Update) -> list[list[tuple[int, Halt]]]:
    """Replica and place of the workers of each transfer group: by lanes each worker of a replica is in others."""
    groups: dict[int, list[tuple[int, Halt]]] = {}
    for replica in update.alive:
        for worker in range(replica.workers):
            place = replica.index, worker
            halt = COMPLETE if place in update.staged else update.left[place]
            if halt is not None:
                groups.setdefault(worker if update.transport == "lanes" else 0, []).append((replica.index, halt))
    return list(groups.values())
