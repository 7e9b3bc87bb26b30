"""A worker's place in the transfer group of one epoch."""

import os
import queue
import threading
import traceback
from collections.abc import Callable

import torch

from prl.sampler.lanes_in import LaneEnd
from prl.weights.group import TransportError
from prl.weights.transport import SamplerEnd

End = SamplerEnd | LaneEnd
_NICE = 5  # a third of the processor time that an engine's thread gets which wants the same core


def yield_to_sampling(device: torch.device | str) -> None:
    """Have the calling thread, and those that it starts from now on (gloo's among them), stand behind the engine's. Linux knows
    niceness by threads. Receiving takes several threads as much processor time as sampling takes one, so that as equals they
    would leave the engine a small share; accelerators sample with none."""
    if torch.device(device).type == "cpu":
        os.nice(_NICE)


class Link:
    """A thread joins the group and then does one job after the other in it, until the link is left: nobody waits for what it
    is at then, for that may last as long as a deadline."""

    def __init__(self, epoch: int, connect: Callable[[threading.Event], End]) -> None:
        """`connect` is given the event that is set when the link is left."""
        self.epoch = epoch
        self.end: End | None = None
        self.no_group = TransportError(f"the group of epoch {epoch} was not built")  # why there is none, where there is none
        self._left = threading.Event()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(connect,), name=f"weights, epoch {epoch}", daemon=True)
        self._thread.start()

    @property
    def left(self) -> bool:
        return self._left.is_set()

    def do(self, job: Callable[[], None]) -> None:
        """In the thread, behind everything before it."""
        self._jobs.put(job)

    def leave(self, wait_s: float = 0.0) -> None:
        """From any thread; the link is of no use afterwards. Waits so long for its thread, which may need longer."""
        self._left.set()
        self._jobs.put(lambda: None)
        self._thread.join(wait_s)

    def close(self, why: str) -> None:
        """From its own thread: the group is broken."""
        end, self.end = self.end, None
        self.no_group = TransportError(why)
        if end is not None:
            end.close()

    def _work(self, connect: Callable[[threading.Event], End]) -> None:
        """What a job failed at shows with the next receive, whose report the orchestrator waits for."""
        job: Callable[[], None] = lambda: self._connect(connect)  # noqa: E731 (the first of the jobs)
        while not self.left:
            try:
                job()
            except Exception as error:  # whatever it was, this thread must live on to tell of it
                if not self.left:
                    traceback.print_exc()
                self.no_group = (
                    error if isinstance(error, TransportError) else TransportError(f"{type(error).__name__}: {error}")
                )
            job = self._jobs.get()
        try:
            self.close("this sampler has left the group")
        except Exception:
            traceback.print_exc()

    def _connect(self, connect: Callable[[threading.Event], End]) -> None:
        self.end = connect(self._left)
