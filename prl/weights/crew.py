"""Who takes part in an epoch of the lanes, and what they tell each other through its store: how far each is, and that one has
given up."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed does not export it to type checkers

from prl.weights.group import TransportError, connect_store, said, scope_of, told, within

T = TypeVar("T")
ASK_S = 2.0  # that the store has to say where the others are
TELL_S = 1.0  # that it has to take a few words
WATCH_S = 3600.0  # of one wait for an alarm; another follows


@dataclass(frozen=True)
class Crew:
    """All ranks of an epoch: the trainer's, then each sampler's workers."""

    epoch: int
    trainer_ranks: int
    samplers: tuple[int, ...]  # the numbers of the replicas
    lanes: int  # workers of each: their tensor parallelism

    def trainer(self, rank: int) -> int:
        return rank

    def worker(self, sampler: int, worker: int) -> int:
        return self.trainer_ranks + self.samplers.index(sampler) * self.lanes + worker

    @property
    def names(self) -> tuple[str, ...]:
        workers = (f"sampler {sampler} worker {worker}" for sampler in self.samplers for worker in range(self.lanes))
        return (*(f"trainer rank {rank}" for rank in range(self.trainer_ranks)), *workers)

    def sampler_of(self, rank: int) -> int | None:
        """The replica to which a rank belongs; None for the trainer's."""
        return None if rank < self.trainer_ranks else self.samplers[(rank - self.trainer_ranks) // self.lanes]

    def members(self, root: int, lane: int) -> tuple[int, ...]:
        """Of the group of a root and a lane, the root first."""
        return (self.trainer(root), *(self.worker(sampler, lane) for sampler in self.samplers))


@dataclass(frozen=True, order=True)
class Place:
    """How far a rank is: in its update (0: none has begun) before the transfer of this number in the order of all."""

    update: int
    transfer: int


class Board:
    """One rank's view of the epoch's store. The alarm, once any rank has raised it, ends what all the others wait in."""

    def __init__(self, crew: Crew, rank: int, address: str, port: int, timeout_s: float, left: threading.Event) -> None:
        """Two connections: one of them waits for the alarm. Raises TransportError where the store does not answer."""
        self._crew = crew
        self._rank = rank
        self._name = crew.names[rank]
        self._address, self._port = address, port
        self.store = self._connect(timeout_s)
        self._alarm = _Alarm()
        self._told = told(left)
        watch = self._connect(timeout_s), f"alarm/{rank}", self._alarm
        self._watching = threading.Thread(target=_watch, args=watch, name="watch for an alarm", daemon=True)
        self._watching.start()

    def reason(self) -> str:
        """Why this rank is to leave what it waits in; "" while it is not."""
        return self._told() or self._alarm.words

    def stand(self, place: Place) -> None:
        """Tell where this rank is. Costs one message; nothing waits for an answer."""
        with contextlib.suppress(dist.DistNetworkError):  # a store that is gone is an alarm by itself
            self.store.set(f"at/{self._rank}", f"{place.update} {place.transfer}")

    def raise_alarm(self, words: str) -> None:
        """Have all the others leave, unless one of them had this rank leave; whoever does not hear of it has its deadline."""
        if self._alarm.words:
            return
        self._tell([rank for rank in range(len(self._crew.names)) if rank != self._rank], f"{self._name} gave up: {words}")

    def close(self) -> None:
        self._alarm.closed = True
        self._tell([self._rank], "closed")
        self._watching.join(TELL_S)  # a process that ends while it comes back out of the store aborts, see prl/weights/group.py

    def behind(self, members: Sequence[int]) -> str:
        """Who holds up the others, as far as the store can say: transfers follow one order, so that those who stand at the
        first one that is not over are waited for by all. `members`: those of the transfer that this rank waits in, whom it
        names where the store knows nothing better."""
        others = [rank for rank in members if rank != self._rank]
        try:
            places = _soon(self._places, "where the others are", ASK_S)
        except (RuntimeError, TimeoutError, TransportError) as error:
            return f"{self._named(others)} (the store on {self._crew.names[0]} does not say where they are: {said(error)})"
        first = min(places)
        last = [rank for rank, place in enumerate(places) if place == first and rank != self._rank]
        if not last:
            return self._named(others)
        begun = "" if first.update == places[self._rank].update else ", who have not begun this update"
        return self._named(last) + begun

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._crew.names[rank] for rank in ranks)

    def _places(self) -> list[Place]:
        # In a connection of its own: one that waits for a store that stands still can be used for nothing else.
        texts = self._connect(ASK_S).multi_get([f"at/{rank}" for rank in range(len(self._crew.names))])
        return [Place(*map(int, text.decode().split())) for text in texts]

    def _connect(self, timeout_s: float) -> PrefixStore:
        who = f"weight lanes, epoch {self._crew.epoch}, {self._name}"
        return scope_of(connect_store(who, self._address, self._port, timeout_s), self._crew.epoch)

    def _tell(self, ranks: Sequence[int], words: str) -> None:
        def tell() -> None:
            for rank in ranks:
                self.store.set(f"alarm/{rank}", words)

        # A store that is gone is an alarm by itself; one that stands still lets all wait for their deadline.
        with contextlib.suppress(dist.DistNetworkError, TimeoutError):
            _soon(tell, "tell the others", TELL_S)


@dataclass
class _Alarm:
    words: str = ""
    closed: bool = False


def _soon(work: Callable[[], T], name: str, limit_s: float) -> T:
    return within(work, name, time.monotonic() + limit_s, lambda: "")


def _watch(store: PrefixStore, key: str, alarm: _Alarm) -> None:
    """Wait for the key, in a connection that nothing else needs."""
    while not alarm.closed:
        try:
            store.wait([key], timedelta(seconds=WATCH_S))
            if not alarm.closed:
                alarm.words = store.get(key).decode()
            return
        except dist.DistStoreError:  # waited long enough for once
            continue
        except RuntimeError as error:
            alarm.words = f"the store is gone: {said(error)}"
            return
