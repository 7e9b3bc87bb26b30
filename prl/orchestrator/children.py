"""A node's child processes: started in process groups of their own, ended by group, never by name or by a number alone."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prl.orchestrator.leftovers import remove, segments_of
from prl.orchestrator.process_groups import Group, group_of, signal_group


@dataclass(frozen=True)
class ChildPlan:
    """One process of the run: what it is, where it runs, on which devices, with which environment."""

    role: str  # name of its package under prl
    index: int
    node: int
    devices: tuple[int, ...]
    environment: Mapping[str, str]
    serves: bool = False  # needs a port
    near_devices: bool = False  # runs on the processors near its devices alone

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True)
class RunningChild:
    plan: ChildPlan
    process: asyncio.subprocess.Process
    group: Group
    log: Path
    start: int  # how often it was started before
    started: float  # seconds since the epoch
    segments: set[Path] = field(default_factory=set)  # of shared memory that its group was seen to have


async def start_child(
    plan: ChildPlan, environment: Mapping[str, str], logs: Path, start: int = 0, cpus: Set[int] | None = None
) -> RunningChild:
    """Start `python -m prl.<role>`; both its outputs go to logs/<role>-<index>.log. `cpus`: processors on which it and what it
    starts may run; None: those of this process."""
    log, started = logs / f"{plan.role}-{plan.index}.log", time.time()
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"prl.{plan.role}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment, **plan.environment},
            start_new_session=True,
            preexec_fn=partial(_prepare, cpus),
        )
    return RunningChild(plan, process, group_of(process.pid, log), log, start, started)


def _prepare(cpus: Set[int] | None) -> None:
    """In the child before its program. The batch system warns with these signals all processes of a job; one that does not
    expect them would die. Ignoring is inherited by all that the child starts, catching (as its parent may do) is not; so is the
    choice of processors, which may have been taken from the job since it was made: the child's log says so."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            os.write(2, f"prl: not bound to processors {sorted(cpus)}: {error}\n".encode())


def kill_child(child: RunningChild) -> None:
    """SIGKILL to its process group."""
    note_segments([child])
    signal_group(child.group, signal.SIGKILL)


def note_segments(children: Iterable[RunningChild]) -> None:
    """See what shared memory each child has, for the time when it has ended."""
    for child in children:
        child.segments.update(segments_of(child.group, child.started))


def dump_stacks(child: RunningChild) -> None:
    """Have its process, if it lives, write the stacks of its threads into its log (prl.control.child)."""
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.process.pid, signal.SIGUSR2)


async def end_child(child: RunningChild, grace_s: float) -> None:
    """SIGTERM to its process group, SIGKILL after the grace; at once to a trainer rank, which ignores SIGTERM."""
    note_segments([child])
    if child.plan.role != "trainer":
        signal_group(child.group, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.process.wait(), grace_s)
    kill_child(child)  # also what the child left behind in its group
    await child.process.wait()
    remove(child.segments)


def end_rest(child: RunningChild) -> None:
    """What a child that has ended left behind: processes of its group, with devices, memory and files in the making, and shared
    memory."""
    kill_child(child)
    remove(child.segments)


def how_it_ended(child: RunningChild) -> str:
    """In words."""
    code = child.process.returncode
    if code is not None and code < 0:
        return f"{child.plan.name} was ended by {signal.Signals(-code).name}"
    return f"{child.plan.name} ended with code {code}"
