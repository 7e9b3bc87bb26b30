"""TensorBoard as a sink: scalars made from the JSONL files, which stay the truth.

Importing this module costs about 0.4 s of processor time (tensorboard's own imports): only the orchestrator does it.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from prl.metrics import names
from prl.metrics.events import Event, EventFollower

_NO_SCALARS = (names.PHASE, names.USAGE)


class TensorBoardSink:
    """Copies what processes write to `metrics` into one TensorBoard file in `tensorboard`.

    With `attempt`, only that attempt's events: earlier attempts left files of their own. Events without a step are put at
    the newest step seen. The orchestrator's values keep their names; others' end in the process, as actor/rollouts/actor-1.

    The record writer is used directly, not tensorboard's EventFileWriter: that one imports TensorFlow where it is installed,
    and hides errors in a thread.
    """

    def __init__(self, metrics: Path | str, tensorboard: Path | str, attempt: int | None = None) -> None:
        folder = Path(tensorboard)
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        suffix = "" if attempt is None else f".attempt_{attempt:03d}"
        self.path = folder / f"events.out.tfevents.{now:.6f}{suffix}"
        self._attempt = attempt
        self._follower = EventFollower(metrics)
        self._newest_step = 0
        self._file = self.path.open("xb")
        self._records = RecordWriter(self._file)
        self._records.write(TensorBoardEvent(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def update(self) -> int:
        """Copy what is new; the number of events copied."""
        copied = 0
        for event in self._follower.read():
            if event.kind in _NO_SCALARS or not event.values or self._attempt not in (None, event.attempt):
                continue
            if event.step is not None:
                self._newest_step = max(self._newest_step, event.step)
            self._records.write(self._record(event))
            copied += 1
        self._file.flush()
        return copied

    def close(self) -> None:
        """Copy what is left and close the file. A second call does nothing."""
        if not self._file.closed:
            self.update()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _record(self, event: Event) -> bytes:
        suffix = "" if event.role == "orchestrator" else f"/{event.role}-{event.index}"
        values = [Summary.Value(tag=name + suffix, simple_value=value) for name, value in event.values.items()]
        step = self._newest_step if event.step is None else event.step
        record: bytes = TensorBoardEvent(wall_time=event.time, step=step, summary=Summary(value=values)).SerializeToString()
        return record
