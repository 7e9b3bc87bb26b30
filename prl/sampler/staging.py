"""What a worker has staged. Threads bring it, and one may be late: the version of the newest order alone is staged, or written
over the live one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from prl.flow.versions import Version
from prl.sampler.placement import Part
from prl.weights.group import TransportError
from prl.weights.lane_deltas import LegDigests
from prl.weights.transport import Whole


@dataclass(frozen=True)
class Staged:
    version: Version
    shards: list[torch.Tensor]  # one for each part; with weights.staging: chunked where they are live already
    parts: list[Part]
    digest: int
    share: bool  # the digest is of what this worker counts; those of all workers add up to the version's
    told: int  # the digest that the orchestrator compares
    whole: Whole | None = None  # with weights.delta: all of it, where it came over the group
    legs: LegDigests = field(default_factory=dict)  # by lanes


class StagingArea:
    def __init__(self) -> None:
        self.staged: Staged | None = None  # last; None while nothing is complete
        # With weights.delta: what the group brought last; the next version may be a delta to it.
        self.held: Whole | None = None
        self.live_legs: LegDigests = {}  # by lanes: of the live version, while it is whole
        self._order = 0  # number of the newest; whatever else still arrives is nobody's
        self._lock = threading.Lock()  # of that number, for who does what the newest alone may do

    def begin(self) -> int:
        """The number of a new order: whatever was staged, or is on its way, is given up."""
        with self._lock:  # who writes over the live version ends with the tensor that it is at
            self._order += 1
            self.staged, self.live_legs = None, {}
        return self._order

    def is_newest(self, order: int) -> bool:
        return order == self._order

    @contextmanager
    def writing(self, order: int) -> Iterator[None]:
        """Over the live version. Raises TransportError where a newer one is ordered: nothing older is written any more."""
        with self._lock:
            if order != self._order:
                raise TransportError("another version is written over the live one by now")
            yield

    def put(self, order: int, staged: Staged) -> bool:
        """Whether somebody still wants it: else another one comes, perhaps this one again."""
        with self._lock:
            if order != self._order:
                return False
            self.staged = staged
            if staged.whole is not None:  # a seed goes past the group: what that holds stays
                self.held = staged.whole
            return True
