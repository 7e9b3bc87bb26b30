"""Ranks of the lanes, each a process of its own that does what the test tells it, also to fail in a certain way."""

import hashlib
import multiprocessing
import os
import queue
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from prl.flow.halts import Halt
from prl.weights.crew import Crew
from prl.weights.group import StoreHost, TransportError
from prl.weights.lanes import LaneReceiver, LaneSender
from prl.weights.legs import LaneReport
from prl.weights.plan import TensorSpec, Tile
from prl.weights.shipments import Route, Staging, View

HOST = "127.0.0.1"
ANSWER_S = 120.0  # more than any scenario takes on a busy machine


@cache
def full(spec: TensorSpec, seed: int) -> torch.Tensor:
    """A whole tensor of the version of this seed as the trainer has it: float32."""
    key = int.from_bytes(hashlib.blake2b(f"{seed} {spec.name}".encode(), digest_size=7).digest())
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(key))


def matrix(spec: TensorSpec, seed: int) -> torch.Tensor:
    return full(spec, seed).reshape(spec.shape[0], -1)


@dataclass(frozen=True)
class Fault:
    """At the `tile`-th tile (from 0) that this rank packs, or that has arrived and is about to be digested."""

    kind: str  # kill, stop, cut, late; flip, swap: staged elements change before they are digested
    tile: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """What came of joining or of an update."""

    error: str = ""
    missing: tuple[int, ...] = ()
    seconds: float = 0.0
    halt: Halt | None = None  # where it left an update
    report: LaneReport | None = None
    exact: bool = False  # what a worker staged equals, bit by bit, its part of the whole tensors in the plan's dtype


class Rank:
    """The test's side of a process."""

    def __init__(self, name: str) -> None:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # a store that is gone is reported with pages of C++ frames
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lane_ranks"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(theirs,), name=name, daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, command: str, *arguments: Any) -> None:
        self._pipe.send((command, arguments))

    def answer(self, limit_s: float = ANSWER_S) -> Any:
        assert self._pipe.poll(limit_s), f"{self.process.name} does not answer within {limit_s} s"
        return self._pipe.recv()

    def go_on(self) -> None:
        """Once it stands still: the others may be through before."""
        end = time.monotonic() + ANSWER_S
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end, f"{self.process.name} does not stand still within {ANSWER_S} s"
            time.sleep(0.01)
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _live(pipe: Connection) -> None:
    torch.set_num_threads(1)
    rank = _Rank()
    jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    threading.Thread(target=lambda: [job() for job in iter(jobs.get, None)], daemon=True).start()
    while True:
        command, arguments = pipe.recv()
        if command == "leave":
            rank.left.set()
        else:
            work = getattr(rank, command)
            jobs.put(lambda work=work, arguments=arguments: pipe.send(work(*arguments)))


class _Rank:
    """What a process does, all in one thread but for being told to leave."""

    def __init__(self) -> None:
        self.left = threading.Event()
        self._host: StoreHost | None = None
        self._end: LaneSender | LaneReceiver | None = None
        self._route: Route | None = None
        self._lane = self._port = -1

    def host(self) -> int:
        self._host = StoreHost(HOST, 60.0)
        return self._host.port

    def join(self, route: Route, crew: Crew, number: int, port: int, group_s: float) -> Result:
        if self._end is not None:
            self._end.close()
        self.left = threading.Event()
        self._end, self._route, self._port = None, route, port
        began = time.monotonic()
        try:
            if number < crew.trainer_ranks:
                self._end = LaneSender(route, crew, number, HOST, port, group_s=group_s, left=self.left)
            else:
                place, self._lane = divmod(number - crew.trainer_ranks, crew.lanes)
                worker = crew.samplers[place], self._lane
                self._end = LaneReceiver(route, crew, *worker, HOST, port, group_s=group_s, left=self.left)
        except TransportError as error:
            return Result(str(error), error.missing, time.monotonic() - began)
        return Result(seconds=time.monotonic() - began)

    def update(self, seed: int, update_s: float, fault: Fault | None) -> Result:
        assert self._route is not None
        plan = self._route.plan
        began = time.monotonic()
        try:
            if isinstance(self._end, LaneSender):
                wholes = [matrix(spec, seed) for spec in plan.tensors]
                began = time.monotonic()

                def source(tile: Tile) -> torch.Tensor:
                    return wholes[tile.tensor][tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns]

                report = self._end.send(_faulty(source, fault, self._port, 1), update_s)
                return Result(seconds=time.monotonic() - began, report=report)
            assert isinstance(self._end, LaneReceiver)
            shards = self._route.shards[self._lane]
            staging = Staging(plan, shards)
            report = self._end.receive(_faulty(staging, fault, self._port, 2), update_s)
            seconds = time.monotonic() - began
            exact = all(
                torch.equal(
                    staging.tensors[shard.tile.tensor],
                    matrix(plan.tensors[shard.tile.tensor], seed)[
                        shard.tile.row : shard.tile.row + shard.tile.rows,
                        shard.tile.column : shard.tile.column + shard.tile.columns,
                    ].to(getattr(torch, plan.tensors[shard.tile.tensor].dtype)),
                )
                for shard in shards
            )
            return Result(seconds=seconds, report=report, exact=exact)
        except Exception as error:  # the test looks at it
            seconds = time.monotonic() - began
            if isinstance(error, TransportError):
                return Result(str(error), seconds=seconds, halt=error.halt)
            return Result(repr(error), seconds=seconds)


def _faulty(view: View, fault: Fault | None, store_port: int, asked: int) -> View:
    """`asked`: how often for a tile when the fault comes: a worker asks where it goes, and what to digest."""
    if fault is None:
        return view
    seen: dict[Tile, int] = {}

    def act(tile: Tile) -> torch.Tensor:
        place = view(tile)
        seen[tile] = seen.get(tile, 0) + 1
        if seen[tile] != asked or list(seen).index(tile) != fault.tile:
            return place
        if fault.kind in ("flip", "swap"):
            other = place if fault.kind == "flip" else view(list(seen)[fault.tile - 1])
            _change(place, other)
        else:
            _fail(fault, store_port)
        return place

    return act


def _change(place: torch.Tensor, other: torch.Tensor) -> None:
    if other is place:
        place[0, :1].view(torch.uint8)[0] ^= 1
    else:
        kept = place.clone()
        place.copy_(other)
        other.copy_(kept)


def _fail(fault: Fault, store_port: int) -> None:
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "late":
            time.sleep(fault.seconds)
        case "cut":
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                _cut(descriptor, store_port)


def _cut(descriptor: int, store_port: int) -> None:
    """A connection to a peer, unless it leads to the store."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_INET and store_port not in (
                connection.getsockname()[1],
                connection.getpeername()[1],
            ):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has no peer, or is gone
