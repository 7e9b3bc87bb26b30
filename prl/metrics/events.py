"""Metrics as events: every process appends lines of JSON to a file of its own, anyone may follow those files.

A line is {"time", "role", "index", "attempt", "kind", "step", "values", "labels"}. `prl.metrics.names` lists the kinds and
the names of values that the report understands.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prl.config.plain_files import NotPlainError, open_plain
from prl.runfolder.paths import listed
from prl.runfolder.publish import storage

YEAR_9999 = 253370764800.0  # no time that is meant lies beyond
LARGEST = 2**62

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a metrics file. A value that was not finite comes back as NaN."""

    time: float  # seconds since the epoch, on the writer's clock
    role: str
    index: int
    attempt: int
    kind: str
    step: int | None
    values: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


class MetricsWriter:
    """Appends events to `<folder>/<role>-<index>.jsonl`; later attempts go on in the same file.

    Lines are collected and appended as one piece every `flush_s` seconds, at `flush` and at `close`, so that a reader sees
    whole lines (but for the last one, where the process died in the middle of it). The file is closed after every piece:
    that is when other clients of an NFS server see it. Values that are not finite are written as null.

    May be used from several threads. An error of the background flush (a full filesystem, say) is raised by the next call.
    """

    def __init__(
        self,
        folder: Path | str,
        role: str,
        index: int,
        attempt: int,
        *,
        flush_s: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(folder) / f"{role}-{index}.jsonl"
        self._fixed = {"role": role, "index": index, "attempt": attempt}
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._error: OSError | None = None
        self._closed = threading.Event()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if _ends_within_a_line(self.path):  # an earlier attempt died while writing
            self._lines.append(b"\n")
        self._flusher = threading.Thread(target=self._flush_regularly, args=(flush_s,), name="metrics", daemon=True)
        self._flusher.start()

    def write(
        self,
        values: Mapping[str, float],
        step: int | None = None,
        kind: str = "scalars",
        labels: Mapping[str, str] | None = None,
        time: float | None = None,
    ) -> None:
        """Adds one event. `step` is the optimizer step that it speaks of, if any; `labels` are words that belong to it;
        `time` is when it happened, if that was not now."""
        if self._closed.is_set():
            raise ValueError(f"{self.path}: write after close")
        finite = {name: _finite_or_none(value) for name, value in values.items()}
        happened = self._clock() if time is None else time
        event: dict[str, Any] = {"time": round(happened, 6), **self._fixed, "kind": kind, "step": step, "values": finite}
        if labels:
            event["labels"] = dict(labels)
        line = json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._raise_earlier_error()
            self._lines.append(line)

    def flush(self) -> None:
        """Appends what was collected. Raises OSError where that fails; nothing is lost, the next flush tries again."""
        with self._lock:
            self._raise_earlier_error()
            self._append()

    def close(self) -> None:
        """Flushes and ends the background flush. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._flusher.join()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _raise_earlier_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _flush_regularly(self, flush_s: float) -> None:
        while not self._closed.wait(flush_s):
            with self._lock:
                try:
                    self._append()
                except OSError as error:
                    self._error = error

    def _append(self) -> None:
        if not self._lines:
            return
        left = memoryview(b"".join(self._lines))
        with storage(self.path):
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                while left:
                    left = left[os.write(file, left) :]
            finally:
                self._lines = [bytes(left)] if left else []
                os.close(file)


def read_events(path: Path | str, offset: int = 0, odd: list[str] | None = None) -> tuple[list[Event], int]:
    """The events of whole lines from byte `offset` on, and the offset to go on from.

    Meant for following a file that is still written, also from another machine: it opens the file anew each time, leaves a
    torn last line for the next call, and takes a file that is not there (yet) for an empty one. Lines that are no events
    (the torn line of an attempt that died) are skipped, and logged or, where somebody wants to know of them, added to `odd`.
    Raises OSError, NotPlainError where it is no regular file.
    """
    try:
        with open_plain(path) as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    lines = data.split(b"\n")[:-1]
    while lines and b"\0" in lines[-1]:  # on NFS a file can be longer before its data are there: zeros stand for them
        lines.pop()
    events = []
    for line in lines:
        try:
            if line:
                events.append(_event(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            words = f"{path}: skipped a line that is no event: {line[:80]!r}"
            if odd is None:
                log.warning("%s", words)
            else:
                odd.append(words)
    return events, offset + sum(len(line) + 1 for line in lines)


class EventFollower:
    """Reads what is new in all metrics files of a folder."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Event]:
        """The events since the last call, in order within each file; files are found as they come."""
        new: list[Event] = []
        for path in listed(self._folder, "*.jsonl"):
            try:
                events, self._offsets[path] = read_events(path, self._offsets.get(path, 0))
            except NotPlainError:  # prl-report tells of it
                continue
            new += events
        return new


def _finite_or_none(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _ends_within_a_line(path: Path) -> bool:
    try:
        with open_plain(path) as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def _event(line: Mapping[str, Any]) -> Event:
    values = {str(name): math.nan if value is None else float(value) for name, value in line["values"].items()}
    step = None if line["step"] is None else int(line["step"])
    labels = {str(name): str(text) for name, text in line.get("labels", {}).items()}
    happened = float(line["time"])
    if not (0 <= happened < YEAR_9999 and (step is None or abs(step) < LARGEST)):
        raise ValueError(f"an event of step {step} at {happened}")
    return Event(
        time=happened,
        role=str(line["role"]),
        index=int(line["index"]),
        attempt=int(line["attempt"]),
        kind=str(line["kind"]),
        step=step,
        values=values,
        labels=labels,
    )
