"""When a run's versions are sent to the samplers and waited for.

With weights.overlap each is offered and sent in a second thread of every rank, while the next step's passes are computed; that
ends before the optimizer changes weights. The thread uses no group that the passes use. So where lanes cannot be had, and
tensors have to be gathered for files, it leaves the version to the rank's first thread, which sends it at that point, and
later ones at once, until lanes can be had again.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from prl.control.threaded import ThreadedClient
from prl.trainer import device
from prl.trainer.weights_out import WeightsOut

CLOSE_S = 2.0  # that a transfer has to end which is given up with the process


@dataclass(frozen=True)
class _Beside:
    """What the second thread is at."""

    step: int
    later: Future[bool]  # whether the first one is to send the version instead


class Publisher:
    """At most one version is on its way while training goes on. All methods but `spent_s`, `under_way` and `close` are
    collectives of all ranks."""

    def __init__(self, out: WeightsOut, client: ThreadedClient, *, overlap: bool) -> None:
        self._out = out
        self._client = client
        self._overlap = overlap
        self._beside: _Beside | None = None
        self._spent_s = 0.0

    def publish(self, step: int) -> None:
        """Bring version `step`, the first, to the samplers; return when it is sent, or training is to go on without. That is
        no step's time."""
        self._out.publish(step)

    def begin(self, step: int) -> None:
        """The same for a later one. With weights.overlap it goes on when this returns; until `join` no weight may change."""
        with self._timed():
            self._settle()
            if self._overlap and not self._out.gathers:
                work = partial(self._out.publish, step, beside=True)
                self._beside = _Beside(step, device.in_thread(work, f"send version {step}"))
            else:
                self._out.publish(step)

    def join(self) -> None:
        """Return when what was begun has ended, well or not. Raises what ended it otherwise."""
        with self._timed():
            step = self._settle()
            if step is not None:
                self._out.publish(step)

    def under_way(self) -> bool:
        """Whether this rank is still at a version that was begun. Raises what ended that."""
        later = None if self._beside is None else self._beside.later
        if later is None or not later.done():
            return later is not None
        later.result()
        return False

    def spent_s(self) -> float:
        """What versions have taken of the trainer's time since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def close(self) -> None:
        """Give up what is on its way, and leave the groups."""
        if self._beside is not None and not self._beside.later.done():
            self._out.leave()
            wait([self._beside.later], CLOSE_S)  # its own error would hide the one that ends this rank
        self._out.close()

    def _settle(self) -> int | None:
        """Wait for the second thread, each of whose own waits has a deadline; the version that it has left to this one."""
        if self._beside is None:
            return None
        if not self._beside.later.done():
            self._client.progress(f"waiting until version {self._beside.step} is sent")
        later = self._beside.later.result()
        beside, self._beside = self._beside, None
        return beside.step if later else None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._spent_s += time.monotonic() - started
