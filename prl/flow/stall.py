"""Who is waited for in a run in which nothing goes on: a pure look at what waits where."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Queues:
    """What waits, in the order in which it goes through a run."""

    serving: int  # samplers that may be asked
    updating: bool  # a version is on its way to them
    held: Mapping[int, int]  # groups that are handed out, by actor
    received: int  # groups whose result has come, and that lie in no step file
    groups_per_step: int
    step_waits: bool  # the trainer may train a step file
    replays: bool = False  # another run's rollouts are trained on again: nobody samples


def waited_for(queues: Queues) -> tuple[str, str]:
    """The role that has to act before anything else can, and what for."""
    if queues.step_waits:
        return "trainer", "which has a step file to train on"
    if queues.replays:
        return "preprocess", "which makes the next step of the rollouts of another run"
    if queues.received >= queues.groups_per_step:
        return "preprocess", f"which has {queues.received} groups to build a step of {queues.groups_per_step} from"
    if not queues.serving:
        return "sampler", "none of which serves"
    if queues.held:
        whose = ", ".join(f"actor {actor}: {groups}" for actor, groups in sorted(queues.held.items()))
        return "actor", f"or the samplers and verifiers that they ask: groups are held ({whose})"
    if queues.updating:
        return "trainer", "which is sending a version, or the samplers that receive it"
    return "actor", "which ask for no groups"
