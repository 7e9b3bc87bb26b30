"""What a node's children get of it: accelerators that it was given, and the processors near these."""

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from prl.cluster.numa import NotBound, ask_accelerators, in_ranges, near
from prl.cluster.preflight.devices import DEVICES_S, given_devices
from prl.cluster.preflight.measure import in_thread
from prl.cluster.run import ProgramError
from prl.control.child import say
from prl.orchestrator.children import ChildPlan

SYSFS = Path("/sys")
ASK_S = DEVICES_S + 5.0  # deadline of asking for all accelerators, which has one itself


def with_given_devices(plan: ChildPlan) -> ChildPlan:
    """With the accelerators that this node has given in the place of their numbers in the plan, which count from 0."""
    given, planned = given_devices(), plan.environment.get("CUDA_VISIBLE_DEVICES")
    if given is None or not planned:
        return plan
    numbers = [int(number) for number in planned.split(",")]
    if max(numbers) >= len(given):
        raise RuntimeError(
            f"{plan.name} is to have accelerator {max(numbers)}, counted from 0, and this node was given "
            f"{','.join(given) or 'none'} (CUDA_VISIBLE_DEVICES): see cluster.gpus_per_node"
        )
    own = ",".join(given[number] for number in numbers)
    return replace(plan, environment={**plan.environment, "CUDA_VISIBLE_DEVICES": own})


async def processors(plans: Iterable[ChildPlan]) -> dict[str, frozenset[int]]:
    """By its name, those on which each child that is to be bound may run; the others run where this process may. No run fails
    for what is not known of that: the log tells it, and who got which."""
    wanted = [plan for plan in plans if plan.near_devices]
    if not wanted:
        return {}
    try:
        accelerators = await in_thread(ask_accelerators, ASK_S)
    except (ProgramError, OSError) as error:
        say(f"prl: no process is bound to processors near its accelerators: {error}")
        return {}
    given, allowed = given_devices(), os.sched_getaffinity(0)
    found: dict[str, frozenset[int]] = {}
    told: dict[str, list[str]] = {}
    for plan in wanted:
        devices = [str(number) if given is None else given[number] for number in plan.devices]
        try:
            found[plan.name] = near(devices, accelerators, allowed, _threads(plan), SYSFS)
            words = in_ranges(found[plan.name])
        except NotBound as reason:
            words = f"not bound ({reason})"
        told.setdefault(words, []).append(plan.name)
    listed = "; ".join(f"{', '.join(children)}: {words}" for words, children in told.items())
    say(f"prl: processors near accelerators: {listed}")
    return found


def _threads(plan: ChildPlan) -> int:
    """Of OpenMP, which a child is to have; 1 where it may choose them. The variable may be a list, one number a level."""
    number = re.match(r"\s*([0-9]+)", {**os.environ, **plan.environment}.get("OMP_NUM_THREADS", ""))
    return int(number.group(1)) if number else 1
