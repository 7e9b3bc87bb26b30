"""Process groups that torch's default group knows nothing of, so that neither side's own communicators know of them: over
gloo where tensors are on CPUs and over NCCL on GPUs (NCCL's path was never run). Their ranks meet in a store that a trainer's
process hosts. A group belongs to one epoch of the membership; one that failed is thrown away, the next epoch builds another.

A rank that is gone or stands still holds up the others in a collective until their deadline, and neither gloo nor a store can
end an operation before that. So whatever waits here asks again and again why this rank should leave, and whether its peers are
still connected: then, as at its deadline, the operation is left behind in a thread of its own.

Such a thread may still be there when the process ends. A thread that comes back out of torch while the interpreter is torn down
has the process abort (github.com/pytorch/pytorch/issues/38228), and so has one of gloo's own in which the last reference to a
tensor of Python's goes. So what is left behind waits in Python alone, holding what gloo works on.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed does not export them to type checkers

from prl.flow.halts import Halt

LOOK_S = 0.1  # between two looks of a wait at whether this rank is to leave
CLOSE_S = 1.0  # that groups without anything under way have to end: a process that exits meanwhile would abort
GRACE_S = 0.5  # after its deadline that a thread has to say what it waited for
LOST_S = 0.5  # after the end of a connection that the transfer's own end, or the reason why a peer left, has to come
LOST_TAG = 1  # of receives that only show whether a connection is open
FIRST_LOOK_S, LONGEST_LOOK_S = 0.001, 0.02  # between two looks at who is there

T = TypeVar("T")
Reason = Callable[[], str]  # why this rank is to leave what it waits in; "" while it is not


class TransportError(Exception):
    """A group could not be built, or a transfer did not end in time; says what was waited for. `missing`: the ranks that did
    not come to the building; `halt`: where this rank was in the transfer."""

    def __init__(self, words: str, missing: Sequence[int] = (), halt: Halt | None = None) -> None:
        super().__init__(words)
        self.missing = tuple(missing)
        self.halt = halt

    @property
    def overdue(self) -> bool:
        """Whether it is the deadline of a transfer that passed."""
        return self.halt is not None and self.halt.overdue


class Left(Exception):
    """This rank is to leave what it waits in; says why."""


class Lost(Exception):
    """Connections of a group are closed; says how. `ranks`: the group's ranks that they led to."""

    def __init__(self, words: str, ranks: Sequence[int]) -> None:
        super().__init__(words)
        self.ranks = tuple(ranks)


class StoreHost:
    """The store of a run's epochs. It listens on `address`, the one of this node that the samplers' nodes reach, and nowhere
    else."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port: int = listener.getsockname()[1]
        self.store = TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),  # the store owns the socket from here on
        )


def connect_store(who: str, address: str, port: int, timeout_s: float) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"{who}: the trainer's store at {address}:{port} did not answer within {timeout_s:.0f} s: {said(error)}"
        ) from error


def scope_of(store: TCPStore, epoch: int) -> PrefixStore:
    return PrefixStore(f"weights/{epoch}", store)


def told(left: threading.Event) -> Reason:
    """The reason of a rank that only another thread of its own has leave."""
    return lambda: "this rank was told to leave" if left.is_set() else ""


@dataclass(frozen=True)
class Meeting:
    """The ranks of an epoch, of which this is one."""

    title: str  # whose errors begin with it
    store: Any  # the epoch's own scope
    names: Sequence[str]  # of all ranks, for errors
    rank: int
    terms: str  # what all have to agree on
    reason: Reason

    def meet(self, end: float, limit_s: float) -> None:
        """Wait until every rank is known to be there, because a collective only ever says that it waited."""
        keys = [f"here/{other}" for other in range(len(self.names))]
        look_s = FIRST_LOOK_S
        try:
            self.store.set(keys[self.rank], self.terms)
            while not self.store.check(keys):
                if time.monotonic() > end:
                    missing = [other for other, key in enumerate(keys) if not self.store.check([key])]
                    who = ", ".join(self.names[other] for other in missing)
                    raise TransportError(f"{self.title}: waited {limit_s:.0f} s for {who or 'the store'}", missing)
                if why := self.reason():
                    raise Left(why)
                time.sleep(look_s)
                look_s = min(2 * look_s, LONGEST_LOOK_S)
            theirs = self.store.get(keys[0]).decode()
        except RuntimeError as error:
            raise TransportError(f"{self.title}: the trainer's store is gone: {said(error)}") from error
        if theirs != self.terms:
            raise TransportError(f"{self.title}: it comes with {self.terms}, {self.names[0]} with {theirs}")

    def build(self, members: Mapping[str, Sequence[int]], host: str, device: torch.device, end: float) -> dict[str, "Group"]:
        """After `meet`: the groups of these names of the ranks given, each of which builds its own in one order that all share.
        `host`: this node's address."""
        groups = {}
        gloo = None if device.type == "cuda" else dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        for name, ranks in members.items():
            limit = timedelta(seconds=max(end - time.monotonic(), 0.001))
            scope, place = PrefixStore(name, self.store), list(ranks).index(self.rank)
            try:
                group = _nccl(scope, place, len(ranks), limit) if gloo is None else _gloo(scope, gloo, place, len(ranks), limit)
            except RuntimeError as error:
                who = ", ".join(self.names[rank] for rank in ranks if rank != self.rank)
                raise TransportError(f"{self.title}: group {name} was not built with {who}: {said(error)}") from error
            groups[name] = Group(group, device)
        return groups


def assemble(
    meeting: Meeting, members: Mapping[str, Sequence[int]], host: str, device: torch.device, limit_s: float
) -> dict[str, "Group"]:
    """Meet, then build these groups, all of it within `limit_s`. Raises TransportError."""
    end = time.monotonic() + limit_s

    def work() -> dict[str, Group]:
        meeting.meet(end, limit_s)
        return meeting.build(members, host, device, end)

    try:
        return within(work, "weight group", end, meeting.reason)
    except Left as error:
        raise TransportError(f"{meeting.title}: it was left while it was built: {error}") from error
    except TimeoutError as error:
        words = f"{meeting.title}: not built within {limit_s:.0f} s: the store or a peer does not answer"
        raise TransportError(words) from error


class Group:
    """Broadcasts from rank 0 of a process group. One that failed must not be used again."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._open: list[tuple[Any, torch.Tensor]] = []  # what was begun and has not ended well

    def begin(self, buffer: torch.Tensor, end: float) -> Any:
        """A broadcast of the buffer, which ends by the monotonic time `end`; goes on while this returns."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(end - time.monotonic(), 0.001))
        work = self._group.broadcast([buffer], options)
        self._open.append((work, buffer))
        return work

    def finish(self, work: Any, end: float, reason: Reason) -> None:
        """Wait for what was begun. Raises Left, Lost, or RuntimeError with torch's words."""
        if self._device.type == "cuda":
            _finish_on_gpu(work, end, reason)
        else:
            _finish_on_cpu(work, end, reason, self._lost)
        self._open = [(other, buffer) for other, buffer in self._open if other is not work]

    def _lost(self) -> dict[int, str]:
        """The neighbours whose connection is closed, and how it was, over gloo.

        gloo tells the end of a connection to what waits for a message to begin, and not to who is in the midst of one: that
        waits on for its deadline. What is begun on a closed connection fails at once, so a receive is begun, with a tag that
        nobody sends to, and dropped; on an open one it costs the peer a few bytes."""
        lost = {}
        for rank in _neighbours(self._group.rank(), self._group.size()):
            try:
                self._group.recv([torch.empty(1, dtype=torch.uint8)], rank, LOST_TAG)
            except RuntimeError as error:
                lost[rank] = said(error)
        return lost

    def abort(self) -> None:
        """Over NCCL this ends what is under way, over gloo it waits for that to end. gloo's destructor would, too, but within
        torch; so the last reference goes here, and only then."""
        group, self._group = self._group, None
        if self._device.type == "cuda":
            group.abort()
            return
        while not all(work.is_completed() for work, _ in self._open):
            time.sleep(LOOK_S)


def close(groups: Sequence[Group]) -> None:
    """Leave the groups. What is still under way in one holds up a thread of its own until its deadline, and nobody else."""
    closing = [threading.Thread(target=group.abort, name="leave weight group", daemon=True) for group in groups]
    for thread in closing:
        thread.start()
    end = time.monotonic() + CLOSE_S
    for thread in closing:
        thread.join(max(end - time.monotonic(), 0.0))


def within(work: Callable[[], T], name: str, end: float, reason: Reason) -> T:
    """The result of the work, which is done in a thread that nobody waits for at the end of the process. Raises Left, and
    TimeoutError a little after `end`, so that the work's own words come first."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    while True:
        left_s = end + GRACE_S - time.monotonic()
        try:
            return result.result(max(min(LOOK_S, left_s), 0.0))
        except TimeoutError:
            if result.done():
                return result.result()
            if why := reason():
                raise Left(why) from None
            if left_s <= 0:
                raise


def own_address(address: str, port: int) -> str:
    """The address of this node on the interface that leads to the one given."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def halt(reached: int, began: float, end: float) -> Halt:
    """Of a rank that leaves what it waits in now. An operation that ends by its own deadline may do so a little early."""
    now = time.monotonic()
    return Halt(reached, now - began, overdue=now > end - LOOK_S)


def said(error: Exception) -> str:
    """What torch said, without its stack of C++ frames."""
    return str(error).split("\n", maxsplit=1)[0]


def _finish_on_cpu(work: Any, end: float, reason: Reason, lost: Callable[[], Mapping[int, str]]) -> None:
    lost_at = None
    while True:
        try:
            work.wait(timedelta(seconds=LOOK_S))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # its own error, or none: it ended just now
                return
            if why := reason():
                raise Left(why) from None
            now = time.monotonic()
            if now > end + LOOK_S:  # its own deadline holds for each of the peers that it waits for
                raise RuntimeError("deadline passed") from None
            if gone := lost():
                lost_at = lost_at or now
                if now > lost_at + LOST_S:
                    raise Lost("; ".join(gone.values()), tuple(gone)) from None


def _neighbours(rank: int, size: int) -> list[int]:
    """With whom gloo has this rank exchange in a broadcast from rank 0 (gloo/broadcast.cc): a binomial tree, in which a rank
    without its highest bit is its parent."""
    parent = [rank - (1 << rank.bit_length() - 1)] if rank else []
    return parent + [rank + bit for bit in (1 << n for n in range(rank.bit_length(), size.bit_length())) if rank + bit < size]


def _finish_on_gpu(work: Any, end: float, reason: Reason) -> None:
    """NCCL's own wait only orders streams."""
    pause_s = 1e-4
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError("deadline passed")
        if why := reason():
            raise Left(why)
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.01)
    work.wait()


def _gloo(scope: Any, gloo: Any, rank: int, ranks: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo]  # this interface and no other
    options._threads = 1  # nothing is broadcast beside another in one group
    options._timeout = limit
    return dist.ProcessGroupGloo(scope, rank, ranks, options)


def _nccl(scope: Any, rank: int, ranks: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(scope, rank, ranks, options)
