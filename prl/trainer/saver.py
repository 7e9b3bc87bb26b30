"""When a run's checkpoints are begun, made to count and waited for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from prl.control.child import Child
from prl.control.threaded import ThreadedClient
from prl.metrics import names
from prl.trainer.checkpoint import Save, SaveError, begin_save, finish_save
from prl.trainer.engine import Engine
from prl.trainer.parallel import Channel


class Saver:
    """At most one checkpoint is on its way while training goes on. All methods are collectives of all ranks."""

    def __init__(self, child: Child, client: ThreadedClient, channel: Channel, engine: Engine, saved: int | None) -> None:
        """`saved` is the newest step of which there is a checkpoint."""
        self._child = child
        self._client = client
        self._channel = channel
        self._engine = engine
        self._saved = saved
        self._under_way: Save | None = None
        self._spent_s = 0.0

    def begin(self, step: int) -> None:
        """Save version `step`, after what is still under way. A save that fails is an alarm, and nothing more."""
        with self._timed():
            self._end()
            self._client.progress(f"copying version {step}")
            try:
                self._under_way = begin_save(self._engine, self._channel, self._child.run.checkpoint(step), step)
            except SaveError as error:
                self._alarm(step, error)

    def look(self) -> None:
        """Make the checkpoint count whose files all ranks have written."""
        if self._under_way is not None:
            with self._timed():
                if all(self._channel.gather(self._under_way.written.done())):
                    self._end()

    def finish(self, step: int) -> None:
        """The run ends with version `step`: return when there is a checkpoint of it. Raises SaveError."""
        self._end()
        if self._saved != step:
            self._client.progress(f"saving version {step}")
            save = begin_save(self._engine, self._channel, self._child.run.checkpoint(step), step)
            self._make_count(save, last=True)

    def spent(self) -> dict[str, float]:
        """Metrics of what saving has taken of the trainer's time since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return {names.SAVE_S: spent_s} if spent_s else {}

    def _end(self) -> None:
        if self._under_way is not None:
            save, self._under_way = self._under_way, None
            self._client.progress(f"writing the checkpoint of version {save.step}")
            try:
                self._make_count(save, last=False)
            except SaveError as error:
                self._alarm(save.step, error)

    def _make_count(self, save: Save, *, last: bool) -> None:
        wait_s = self._child.config.control.wait_s
        parts = finish_save(save, self._channel, wait_s)
        answer = None
        if dist.get_rank() == 0:
            body = {
                "step": save.step,
                "parts": [vars(part) for part in parts],
                "last": last,
                "metrics": {names.CHECKPOINT_WRITE_S: time.monotonic() - save.began},
            }
            answer = self._client.call("checkpoint", body, deadline_s=wait_s, reason=f"checkpoint of version {save.step}")
        if self._channel.broadcast(answer)["saved"]:
            self._saved = save.step

    def _alarm(self, step: int, error: SaveError) -> None:
        if dist.get_rank() == 0:
            wait_s = self._child.config.control.wait_s
            body = {"step": step, "error": str(error)}
            self._client.call("checkpoint_failed", body, deadline_s=wait_s, reason=f"a failed checkpoint of version {step}")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._spent_s += time.monotonic() - began
