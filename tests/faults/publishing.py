"""Everything of prl that publishes files without an engine, each as a small scene: what lies there before, what is published,
and what a reader must find, whichever of its operations was the last that was done."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from prl.flow.events import LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.metrics.events import MetricsWriter, read_events
from prl.runfolder.outcome import Outcome, reserve
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish_json
from prl.runfolder.reclaim import Reclaimed, read_reclaimed, record_reclaimed
from prl.streams.files import next_sequence
from prl.streams.folder import FolderAppender, FolderSource
from prl.streams.ledger import LedgerWriter, ledger_events, read_ledger
from prl.streams.options import StreamsOptions
from prl.streams.reader import RolloutReader
from prl.streams.records import Group, MicroBatch, Rollout, StepFacts, Turn, VersionSpan
from prl.streams.steps import find_steps, read_step, write_step
from prl.streams.writer import RolloutWriter

RUN = "r"


def open_writer(run: RunFolder, attempt: int = 1) -> RolloutWriter:
    return RolloutWriter(FolderAppender(run, "actor-000"), "actor-000", RUN, attempt, StreamsOptions())


def open_reader(run: RunFolder) -> RolloutReader:
    return RolloutReader(FolderSource(run), RUN)


def make_group(number: int) -> Group:
    ids = np.arange(5, dtype=np.int32) + number
    turn = Turn(ids, ids, -np.ones(5, np.float32), (VersionSpan(Version(0, 1), 0, 5),), "stop", 0, 1.0, 2.0)
    return Group(0, "digits", "digits", f"digits/{number}", number, 0, (Rollout((turn,), 1.0), Rollout((turn,), 0.0)), (0, 1))


def make_step(step: int) -> tuple[list[MicroBatch], StepFacts]:
    flat = np.ones(6, np.float32)
    whole = np.arange(6, dtype=np.int32)
    ids = (RolloutId(0, f"digits/{step}", step, 0, 0),)
    batch = MicroBatch(whole, whole, np.array([0, 6], np.int32), flat, flat, -flat, None, whole, ids)
    return [batch], StepFacts(step, 6.0, 6, 1, 1)


def make_events(first: int, count: int = 3) -> list[LedgerEvent]:
    return [LedgerEvent(RolloutId(0, "digits/1", first, k, 0), "issued", Version(0, 0), -1, "") for k in range(count)]


def groups_there(run: RunFolder) -> list[int]:
    """Numbers of all groups that can be read, by listing."""
    reader = open_reader(run)
    return [group.group for entry in reader.entries() for group in reader.read(entry)]


@dataclasses.dataclass(frozen=True)
class Scene:
    """`before` and `publish` run in one process, `publish` being the one that meets faults. `found` is what there is then, one
    of `whole`; `again` publishes anew, as the next attempt would, after which `found` must be the last of `whole_again`."""

    name: str
    before: Callable[[RunFolder], object]
    publish: Callable[[RunFolder, object], None]
    found: Callable[[RunFolder], object]
    whole: tuple[object, ...]
    again: Callable[[RunFolder], None]
    whole_again: tuple[object, ...]


def _rollouts() -> Scene:
    def before(run: RunFolder):
        writer = open_writer(run)
        writer.append(make_group(0))
        writer.flush()
        return writer

    def publish(run: RunFolder, writer) -> None:
        writer.append(make_group(1))
        writer.append(make_group(2))
        writer.flush()

    def again(run: RunFolder) -> None:
        writer = open_writer(run, attempt=2)
        writer.append(make_group(3))
        writer.flush()

    return Scene("rollout writer", before, publish, groups_there, ([0], [0, 1, 2]), again, ([0, 3], [0, 1, 2, 3]))


def _steps() -> Scene:
    def write(run: RunFolder, step: int, attempt: int) -> None:
        write_step(run.steps, *make_step(step), run=RUN, attempt=attempt, sequence=next_sequence(run.steps))

    def found(run: RunFolder):
        files = find_steps(run.steps)
        return {step: read_step(f.path, f.bytes, f.checksum, run=RUN).header.attempt for step, f in files.items()}

    def before(run: RunFolder) -> None:
        write(run, 1, 1)

    def publish(run: RunFolder, _) -> None:
        write(run, 2, 1)

    def again(run: RunFolder) -> None:
        write(run, 2, 2)

    return Scene("step writer", before, publish, found, ({1: 1}, {1: 1, 2: 1}), again, ({1: 1, 2: 2},))


def _ledger() -> Scene:
    def before(run: RunFolder):
        writer = LedgerWriter(run.ledger(1))
        writer.append(make_events(0))
        return writer

    def publish(run: RunFolder, writer) -> None:
        writer.append(make_events(1))
        writer.append(make_events(2))

    def found(run: RunFolder):
        return [event.rollout.group for event in ledger_events(read_ledger(run.ledgers))]

    def again(run: RunFolder) -> None:
        with LedgerWriter(run.ledger(2)) as writer:
            writer.append(make_events(3))

    zero, one, two, three = ([k] * 3 for k in range(4))
    whole = (zero, zero + one, zero + one + two)
    return Scene("ledger", before, publish, found, whole, again, tuple(w + three for w in whole))


def _manifest() -> Scene:
    def write(run: RunFolder, value: int) -> None:
        publish_json(run.checkpoint(2) / "manifest.json", {"step": value})

    def before(run: RunFolder) -> None:
        run.checkpoint(2).mkdir(parents=True)
        write(run, 1)

    def publish(run: RunFolder, _) -> None:
        write(run, 2)

    def found(run: RunFolder):
        return [json.loads(path.read_text())["step"] for _, path in run.manifests()]

    return Scene("manifest", before, publish, found, ([1], [2]), lambda run: write(run, 3), ([3],))


def _outcome() -> Scene:
    outcome = Outcome("done", "all trained", code=0, steps=2, started=1.0, ended=2.0)

    def before(run: RunFolder) -> None:
        run.attempt(1).mkdir()
        reserve(run.exit(1))

    def publish(run: RunFolder, _) -> None:
        outcome.write(run.exit(1))

    def found(run: RunFolder):
        return json.loads(run.exit(1).read_text())["steps"] if run.exit(1).exists() else None

    return Scene("outcome", before, publish, found, (None, 2), lambda run: outcome.write(run.exit(1)), (2,))


def _metrics() -> Scene:
    def writer(run: RunFolder, attempt: int) -> MetricsWriter:
        return MetricsWriter(run.metrics, "actor", 0, attempt, flush_s=3600)

    def before(run: RunFolder):
        made = writer(run, 1)
        made.write({"a": 1.0}, step=1)
        made.flush()
        return made

    def publish(run: RunFolder, made) -> None:
        made.write({"a": 1.0}, step=2)
        made.flush()

    def again(run: RunFolder) -> None:
        with writer(run, 2) as made:
            made.write({"a": 1.0}, step=3)

    def found(run: RunFolder):
        return [event.step for event in read_events(run.metrics / "actor-0.jsonl")[0]]

    return Scene("metrics", before, publish, found, ([1], [1, 2]), again, ([1, 3], [1, 2, 3]))


def _reclaimed() -> Scene:
    def record(run: RunFolder, *names: str) -> None:
        record_reclaimed(run, [Reclaimed("step", name, 1, "0" * 8, step=1) for name in names])

    def found(run: RunFolder):
        return [file.path for file in read_reclaimed(run)]

    return Scene(
        "record of deleted files",
        lambda run: record(run, "a"),
        lambda run, _: record(run, "b", "c"),
        found,
        (["a"], ["a", "b"], ["a", "b", "c"]),  # in the middle of the record no file was deleted yet
        lambda run: record(run, "d"),
        (["a", "d"], ["a", "b", "d"], ["a", "b", "c", "d"]),
    )


SCENES = {scene.name: scene for scene in (_rollouts(), _steps(), _ledger(), _manifest(), _outcome(), _metrics(), _reclaimed())}


def make_run(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.create()
    return run
