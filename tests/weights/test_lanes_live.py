"""A version that is received over memory in use: nothing is written there but within the context that allows it."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch

from prl.weights.crew import Crew
from prl.weights.group import StoreHost, TransportError
from prl.weights.lanes import LaneReceiver, LaneSender
from prl.weights.plan import LanePlan, Leg, TensorSpec, Tile
from prl.weights.shards import Shard
from prl.weights.shipments import Route, Staging

HOST = "127.0.0.1"
ROWS, COLUMNS = 8, 6
TILE = Tile(0, 0, ROWS, 0, COLUMNS)
PLAN = LanePlan((TensorSpec("w", "float32", (ROWS, COLUMNS)),), 1, 1, (Leg(0, 0, (TILE,)),))
ROUTE = Route(PLAN, [[Shard(TILE, True)]], 2**10)
NEW = torch.arange(1.0, ROWS * COLUMNS + 1).reshape(ROWS, COLUMNS)
LONG_S = 60.0  # a deadline that nothing may wait for


class Ends:
    """A root and a worker of one epoch. All of the worker's shard is one run of memory: it could be received there."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._host = StoreHost(HOST, LONG_S)
        crew, self.left = Crew(1, 1, (0,), 1), threading.Event()
        place = HOST, self._host.port
        sender = pool.submit(LaneSender, ROUTE, crew, 0, *place, group_s=LONG_S)
        receiver = pool.submit(LaneReceiver, ROUTE, crew, 0, 0, *place, group_s=LONG_S, left=self.left)
        self.sender, self.receiver = sender.result(LONG_S), receiver.result(LONG_S)
        self.live = Staging(PLAN, ROUTE.shards[0])
        self.live.tensors[0].zero_()

    def send(self) -> None:
        self.sender.send(lambda tile: NEW, LONG_S)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def ends(pool: ThreadPoolExecutor) -> Iterator[Ends]:
    ends = Ends(pool)
    yield ends
    ends.receiver.close()
    ends.sender.close()


def test_what_is_sent_after_a_worker_has_left_does_not_reach_its_live_memory(ends, pool):
    receiving = pool.submit(ends.receiver.receive, ends.live, LONG_S, nullcontext)
    time.sleep(0.3)  # it waits for the root
    ends.left.set()
    with pytest.raises(TransportError, match="left in bucket 1 of 1"):
        receiving.result(LONG_S)
    with suppress(TransportError):  # it may have heard of that, but has begun to send
        ends.send()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert not ends.live.tensors[0].any()
        time.sleep(0.05)


def test_each_bucket_is_written_within_the_context(ends, pool):
    within = []

    @contextmanager
    def writing() -> Iterator[None]:
        within.append(bool(ends.live.tensors[0].any()))
        yield
        within.append(torch.equal(ends.live.tensors[0], NEW))

    receiving = pool.submit(ends.receiver.receive, ends.live, LONG_S, writing)
    ends.send()
    report = receiving.result(LONG_S)
    assert within == [False, True]
    assert report.bytes == NEW.nbytes


def test_where_the_context_refuses_nothing_is_written(ends, pool):
    def refusing() -> nullcontext[None]:
        raise TransportError("another version is on its way")

    receiving = pool.submit(ends.receiver.receive, ends.live, LONG_S, refusing)
    ends.send()
    with pytest.raises(TransportError, match="another version is on its way"):
        receiving.result(LONG_S)
    assert not ends.live.tensors[0].any()
