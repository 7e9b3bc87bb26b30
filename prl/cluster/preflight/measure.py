"""What a node is like before anything of a run is loaded there: measured by its agent, judged by the orchestrator."""

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prl.cluster.preflight.devices import DEVICES_S, Devices, ask_devices
from prl.cluster.run import ProgramError
from prl.config.machine import free_memory_bytes
from prl.config.plain_files import read_plain
from prl.control.ports import count_free_ports

LIMIT_S = 20.0  # of one measurement: a filesystem that does not answer holds up whoever asks it
POLL_S = 0.2  # between two looks for a file that another node wrote
CLOCK_TRIES = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Room:
    """What a filesystem has left for this user."""

    folder: str
    free_bytes: int
    free_files: int | None  # None: it does not count them


@dataclass(frozen=True)
class Clock:
    offset_s: float  # this node's clock less the orchestrator's
    error_s: float  # by which the offset may be wrong: half the time that the answer took


@dataclass(frozen=True)
class NodeFacts:
    """What is None could not be measured, as `failed` says of it, or was not asked for."""

    canary: str | None
    clock: Clock | None
    memory_bytes: int | None
    room: Room | None  # in the folder for temporary files
    ports: int | None  # free ones of those that servers listen on
    devices: Devices | None
    failed: Mapping[str, str]  # what: why

    @staticmethod
    def of(facts: Mapping[str, Any]) -> "NodeFacts":
        """From what asdict makes of it. Raises KeyError, TypeError and ValueError."""
        clock, room, devices = facts["clock"], facts["room"], facts["devices"]
        return NodeFacts(
            canary=facts["canary"],
            clock=None if clock is None else Clock(**clock),
            memory_bytes=facts["memory_bytes"],
            room=None if room is None else Room(**room),
            ports=facts["ports"],
            devices=None if devices is None else Devices.of(devices),
            failed={str(what): str(why) for what, why in facts["failed"].items()},
        )


async def measure_node(
    canary: Path, visible_s: float, host: str, *, devices: bool, ask_time: Callable[[], Awaitable[float]]
) -> NodeFacts:
    """`canary` is waited for up to `visible_s`; `host` is the node's address; `ask_time` gives the orchestrator's clock."""
    clock = await compare_clocks(ask_time)
    failed: dict[str, str] = {}

    async def take(what: str, measure: Callable[[], T], limit_s: float = LIMIT_S) -> T | None:
        try:
            return await in_thread(measure, limit_s)
        except (OSError, ProgramError) as error:
            failed[what] = str(error)
            return None

    text, memory, room, ports, found = await asyncio.gather(
        take("the run folder", lambda: read_when_visible(canary, visible_s), visible_s + LIMIT_S),
        take("memory", free_memory_bytes),
        take("the folder for temporary files", lambda: room_in(Path(tempfile.gettempdir()))),
        take("ports", lambda: count_free_ports(host)),
        take("accelerators", lambda: ask_devices() if devices else None, DEVICES_S + LIMIT_S),
    )
    return NodeFacts(text, clock, memory, room, ports, found, failed)


async def compare_clocks(
    ask: Callable[[], Awaitable[float]], clock: Callable[[], float] = time.time, tries: int = CLOCK_TRIES
) -> Clock:
    """The offset of this node's clock: the other's time is taken for that of the middle between question and answer, which is
    wrong by half of the time between them at most. The quickest answer of some counts."""
    found = []
    for _ in range(tries):
        asked = clock()
        told = await ask()
        answered = clock()
        found.append(Clock((asked + answered) / 2 - told, abs(answered - asked) / 2))
    return min(found, key=lambda one: one.error_s)


def read_when_visible(path: Path, limit_s: float) -> str:
    """What is in a small file that another node wrote. Its folder is listed before the name is tried: a shared filesystem may
    remember for long that a name did not exist. Raises TimeoutError."""
    end = time.monotonic() + limit_s
    while True:
        try:
            if path.name in os.listdir(path.parent):
                return read_plain(path).decode(errors="replace")
            said = "its folder is there, and does not have it"
        except OSError as error:  # gone, or not as this node remembers it: it may come
            said = str(error)
        if time.monotonic() >= end:
            raise TimeoutError(f"{path}, which prl-submit wrote, could not be read for {limit_s:g} s: {said}")
        time.sleep(POLL_S)


def room_in(folder: Path) -> Room:
    """Raises OSError."""
    found = os.statvfs(folder)
    return Room(str(folder), found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


async def in_thread(work: Callable[[], T], limit_s: float) -> T:
    """What `work` gives, done in a thread of its own, which keeps nothing from ending: it may never come back from a filesystem
    that does not answer. Raises what `work` raises, and TimeoutError."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: object) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], object] = (done.set_result, work())
        except Exception as error:
            outcome = (done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="preflight", daemon=True).start()
    try:
        return await asyncio.wait_for(done, limit_s)
    except TimeoutError as error:
        if done.done() and not done.cancelled():
            raise  # of the work itself
        raise TimeoutError(f"no answer within {limit_s:g} s") from error
