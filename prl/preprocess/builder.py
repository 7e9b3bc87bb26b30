"""Building and publishing of steps: in the preprocessor's own process, or in `preprocess.processes` workers.

A step is built in one piece of work and published in another, by the same worker: so several steps may be in the making while
their files still appear one by one. Orders name entries of the rollout stream, which a worker reads once more by itself; no
rollouts cross between processes.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from prl.control.garbage import leave_what_is_loaded
from prl.control.parent import end_with_parent
from prl.flow.ids import RolloutId
from prl.preprocess.assemble import Prepared, build_step, prepare
from prl.preprocess.options import PreprocessOptions
from prl.preprocess.steps import StepOrder
from prl.runfolder.paths import RunFolder
from prl.streams.contract import Published
from prl.streams.files import StreamError, StreamFile
from prl.streams.opening import open_reader
from prl.streams.options import StreamsOptions
from prl.streams.records import Group
from prl.streams.steps import EncodedStep, encode_step, publish_step


class UnreadableEntry(StreamError):
    """An entry of the rollout stream that could be read when it came, and no more."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class BuilderSettings:
    """What a worker is started with."""

    run_folder: str
    run: str
    attempt: int
    options: PreprocessOptions
    streams: StreamsOptions
    data_parallel_size: int
    vocabulary: int  # tokens that the model knows


@dataclass(frozen=True, slots=True)
class Built:
    """A step that is ready to be published, and how every rollout of its groups ends."""

    trained: list[RolloutId]
    discarded: list[tuple[RolloutId, str]]
    seconds: float


@dataclass(frozen=True, slots=True)
class PublishedStep:
    file: StreamFile
    seconds: float


class Builder:
    """Holds what is built until it is published."""

    def __init__(self, settings: BuilderSettings) -> None:
        self._settings = settings
        self._run = RunFolder(settings.run_folder)
        self._reader = open_reader(self._run, settings.run, settings.attempt, settings.streams, settings.vocabulary)
        self._encoded: dict[int, EncodedStep] = {}

    def build(self, order: StepOrder, sequence: int) -> Built:
        """Raises UnreadableEntry."""
        started = time.perf_counter()
        settings, step = self._settings, order.moment.step
        groups = read_members(order, self._read, settings.options)
        made = build_step(groups, order.moment, settings.options, settings.data_parallel_size)
        self._encoded[step] = encode_step(
            made.microbatches,
            made.facts,
            run=settings.run,
            attempt=settings.attempt,
            sequence=sequence,
            metrics=made.metrics,
        )
        return Built(made.trained, made.discarded, time.perf_counter() - started)

    def publish(self, step: int) -> PublishedStep:
        started = time.perf_counter()
        file = publish_step(self._run.steps, self._encoded.pop(step))
        return PublishedStep(file, time.perf_counter() - started)

    def _read(self, entry: Published) -> list[Group]:
        try:
            return self._reader.read(entry)
        except StreamError as error:
            raise UnreadableEntry(entry.name, str(error)) from error


def read_members(order: StepOrder, read: Callable[[Published], Sequence[Group]], options: PreprocessOptions) -> list[Prepared]:
    """The groups of an order, those that it does not hold from their entries, each of which is read once here."""
    missing = {member.entry.name: member.entry for member in order.members if member.prepared is None}
    wanted = {(member.group, member.issue) for member in order.members if member.prepared is None}
    found = {
        (group.group, group.issue): prepare(group, options)
        for entry in missing.values()
        for group in read(entry)
        if (group.group, group.issue) in wanted
    }
    return [found[m.group, m.issue] if m.prepared is None else m.prepared for m in order.members]


class Workshop:
    """The builders. Step s belongs to worker s modulo their number, which does one piece of work after another."""

    def __init__(self, settings: BuilderSettings, processes: int) -> None:
        self.processes = processes
        self._own = Builder(settings) if processes == 1 else None
        self._workers: list[Executor] = [
            ThreadPoolExecutor(1)
            if self._own
            else ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_worker, (settings,))
            for _ in range(processes)
        ]

    def build(self, order: StepOrder, sequence: int) -> "asyncio.Future[Built]":
        """The future raises UnreadableEntry, or RuntimeError where the worker died."""
        work = self._own.build if self._own else _build
        return self._do(order.moment.step, work, order, sequence)

    def publish(self, step: int) -> "asyncio.Future[PublishedStep]":
        return self._do(step, self._own.publish if self._own else _publish, step)

    def _do(self, step: int, work: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":
        worker = self._workers[step % self.processes]

        async def done() -> Any:
            try:
                return await asyncio.get_running_loop().run_in_executor(worker, work, *arguments)
            except BrokenProcessPool as error:
                raise RuntimeError(
                    f"worker {step % self.processes} of the preprocessor died at step {step}: killed from outside, or the "
                    f"node is out of memory (preprocess.processes = {self.processes}; fewer of them take less)"
                ) from error

        return asyncio.ensure_future(done())

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown(wait=False, cancel_futures=True)


_builder: Builder | None = None  # of a worker process


def _start_worker(settings: BuilderSettings) -> None:
    global _builder
    end_with_parent()
    leave_what_is_loaded()
    _builder = Builder(settings)


def _build(order: StepOrder, sequence: int) -> Built:
    assert _builder is not None
    return _builder.build(order, sequence)


def _publish(step: int) -> PublishedStep:
    assert _builder is not None
    return _builder.publish(step)
