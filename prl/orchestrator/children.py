"""A node's child processes: started in process groups of their own, ended by group, never by name."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ChildPlan:
    """One process of the run: what it is, where it runs, on which devices, with which environment."""

    role: str  # name of its package under prl
    index: int
    node: int
    devices: tuple[int, ...]
    environment: Mapping[str, str]
    serves: bool = False  # needs a port

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True)
class RunningChild:
    plan: ChildPlan
    process: asyncio.subprocess.Process
    log: Path
    start: int = 0  # how often it was started before


async def start_child(plan: ChildPlan, environment: Mapping[str, str], logs: Path, start: int = 0) -> RunningChild:
    """Start `python -m prl.<role>`; both its outputs go to logs/<role>-<index>.log."""
    log = logs / f"{plan.role}-{plan.index}.log"
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
        )
    return RunningChild(plan, process, log, start)


def kill_child(child: RunningChild) -> None:
    """SIGKILL to its process group."""
    _signal_group(child, signal.SIGKILL)


async def end_child(child: RunningChild, grace_s: float) -> None:
    """SIGTERM to its process group, SIGKILL after the grace."""
    _signal_group(child, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(child.process.wait(), grace_s)
    _signal_group(child, signal.SIGKILL)  # also what the child left behind in its group
    await child.process.wait()


def _signal_group(child: RunningChild, number: signal.Signals) -> None:
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return  # the whole group has ended


def how_it_ended(child: RunningChild) -> str:
    """In words."""
    code = child.process.returncode
    if code is not None and code < 0:
        return f"{child.plan.name} was ended by {signal.Signals(-code).name}"
    return f"{child.plan.name} ended with code {code}"
