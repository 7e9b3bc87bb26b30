"""What a run folder says, as plain data. Reads only, at any time: before the first step, while the run goes on, after it."""

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from prl.config.load import in_words, read_yaml
from prl.config.plain_files import NotPlainError
from prl.metrics import names
from prl.metrics.events import YEAR_9999, Event, read_events
from prl.runfolder.logs import log_end
from prl.runfolder.outcome import OutcomeError, read_outcome
from prl.runfolder.paths import RunFolder, listed, run_of_attempt
from prl.runfolder.plan import PlanError, read_plan
from prl.runfolder.preflight import PreflightError, PreflightFacts, read_preflight
from prl.streams.files import StreamError
from prl.streams.ledger import read_ledger

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

BATCH_LINES = 5  # of what a batch script said
ODD_LINES = 10  # of the metrics, that are told one by one


class ReportError(Exception):
    """The folder holds no run, or nothing that can be read; each argument is one problem."""


@dataclass(frozen=True)
class Attempt:
    """One start of the job. Without an exit.json it still runs, or was killed before it could write one."""

    number: int
    outcome: str | None  # "done", "failed", "cancelled", ...; None: no exit.json
    cause: str
    role: str | None = None  # whose failure it was
    code: int | None = None
    steps: int | None = None
    started: float | None = None  # seconds since the epoch
    ended: float | None = None
    batch_end: str = ""  # without an exit.json: what the batch script of a Slurm job said last
    begun: bool = True  # whether its first process came so far as to make a plan


@dataclass(frozen=True)
class Table:
    """Events of one kind, one row a step, steps rising: where a step was done again after a resume, the later one counts."""

    step: Int64  # [n]
    time: Float64  # [n], seconds since the epoch
    attempt: Int64  # [n]
    columns: Mapping[str, Float64]  # [n] each, NaN where a row has no such value

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> Float64:
        return self.columns.get(name, np.full(len(self), np.nan))


@dataclass(frozen=True)
class Phase:
    name: str
    attempt: int
    time: float


@dataclass(frozen=True)
class SamplerChange:
    """Something happened to a sampler, and what they are like since."""

    attempt: int
    time: float
    words: str
    values: Mapping[str, float]  # samplers/*


@dataclass(frozen=True)
class UsageSeries:
    """Cumulative processor seconds and resident memory of one process of one attempt."""

    attempt: int
    role: str
    process: str  # "sampler 0"
    time: Float64  # [n]
    cpu_s: Float64  # [n]
    max_rss_bytes: Float64  # [n]


@dataclass(frozen=True)
class FolderSize:
    name: str  # relative to the run folder
    files: int
    size_bytes: int


@dataclass(frozen=True)
class RunRecord:
    path: Path
    config: Mapping[str, Any]  # config.yaml as it stands; empty where there is none
    attempts: Sequence[Attempt]
    steps: Table
    weights: Table  # commits of versions
    evaluations: Mapping[str, Table]  # by domain
    phases: Sequence[Phase]
    preflight: PreflightFacts | None  # of the last attempt that has one
    samplers: Sequence[SamplerChange]
    engines: Sequence[Event]  # what samplers' engines counted, as time goes on
    usage: Sequence[UsageSeries]
    discards: Mapping[str, int]  # rollouts by reason
    notes: Sequence[str]  # what could not be read
    sizes: Sequence[FolderSize]
    newest_event: float | None  # seconds since the epoch


def read_run(path: Path | str) -> RunRecord:
    """Read a run folder. Raises ReportError where it is none."""
    run = RunFolder(path)
    if not run.path.is_dir():
        raise ReportError(f"{path}: no such folder; give the run folder that prl-submit printed")
    refuse_attempt(run)
    attempts = run.attempts()
    ends: list[str] = []
    if not os.path.lexists(run.config) and not attempts:
        raise ReportError(
            f"{path}: this is no run folder: it has neither config.yaml nor attempt_001. Runs are usually in runs/"
        )
    events, odd = _events(run.metrics)
    discards, notes = _discards(run)
    preflights = list(_preflights(run, attempts, ends))
    return RunRecord(
        path=run.path.resolve(),
        config=_read_config(run.config),
        attempts=tuple(_read_attempt(run, number, ends) for number in attempts),
        steps=table_of(event for event in events if event.kind == names.STEP),
        weights=table_of(event for event in events if event.kind == names.WEIGHTS),
        evaluations=_evaluations(events),
        phases=_phases(events),
        preflight=preflights[-1] if preflights else None,
        samplers=_sampler_changes(events),
        engines=sorted((event for event in events if event.kind == names.ENGINE), key=lambda event: event.time),
        usage=_usage(events),
        discards=discards,
        notes=[*notes, *odd, *ends, *_refused(run, attempts), *_failed_saves(events), *_restarts(events), *_not_staged(events)],
        sizes=_sizes(run.path),
        newest_event=max((event.time for event in events), default=None),
    )


def refuse_attempt(folder: RunFolder) -> None:
    """Raises ReportError where the folder is that of one attempt, of which the report would speak as of a run."""
    run = run_of_attempt(folder.path)
    if run is not None:
        raise ReportError(f"{folder}: is one attempt of a run, and a run folder is wanted: prl-report {shlex.quote(str(run))}")


def _refused(run: RunFolder, attempts: Sequence[int]) -> Iterator[str]:
    """The checkpoints and step files that attempts passed over."""
    for attempt in attempts:
        if os.path.lexists(run.plan(attempt)):
            try:
                yield from (f"attempt {attempt}: {words}" for words in read_plan(run.plan(attempt)).refused)
            except PlanError as error:
                yield str(error)


def _preflights(run: RunFolder, attempts: Sequence[int], notes: list[str]) -> Iterator[PreflightFacts]:
    """What the nodes of each attempt were like; what was found amiss is a note."""
    for attempt in attempts:
        if os.path.lexists(run.preflight(attempt)):
            try:
                found = read_preflight(run.preflight(attempt))
            except PreflightError as error:
                notes.append(str(error))
            else:
                notes += [f"attempt {attempt}, preflight: {words}" for words in found.findings]
                yield found


def _failed_saves(events: Iterable[Event]) -> Iterator[str]:
    for event in events:
        if event.kind == names.SAVE_FAILED:
            yield f"attempt {event.attempt}: the checkpoint of step {event.step} failed: {event.labels.get('error', '')}"


def _not_staged(events: Iterable[Event]) -> Iterator[str]:
    """Of nodes that read the model that all share, though it was to be copied, by attempt and reason."""
    why = Counter((event.attempt, event.labels.get("obstacle", "")) for event in events if event.kind == names.MODEL)
    for (attempt, words), count in sorted(why.items()):
        if words:
            yield f"attempt {attempt}: {count} node{'s' * (count != 1)} did not copy the model to an own disk: {words}"


def _restarts(events: Iterable[Event]) -> Iterator[str]:
    """Of actors, verifiers, preprocessors and the trainer, by attempt."""
    last = {event.attempt: event for event in events if event.kind == names.PROCESSES}
    for attempt, event in last.items():
        count, words = int(event.values.get(names.PROCESS_RESTARTS, 0)), event.labels.get("event", "")
        who = "actors, verifiers, preprocessors and the trainer"
        yield f"attempt {attempt}: {count} restarts of {who}; the last that happened: {words}"


def _events(folder: Path) -> tuple[list[Event], Sequence[str]]:
    """All events, and words for lines that are none and for what is no file (a pipe would be waited for)."""
    events: list[Event] = []
    odd: list[str] = []
    for path in listed(folder, "*.jsonl"):
        try:
            events += read_events(path, odd=odd)[0]
        except NotPlainError as error:
            odd.append(f"{error}, and was left out")
    return events, odd if len(odd) <= ODD_LINES else [*odd[:ODD_LINES], f"and {len(odd) - ODD_LINES} lines more like these"]


def table_of(events: Iterable[Event]) -> Table:
    """Events with a step as a table, one row a step."""
    rows: dict[int, Event] = {}
    for event in sorted(events, key=lambda event: event.attempt):  # stable: the order of the file within an attempt
        if event.step is not None:
            rows[event.step] = event
    ordered = [rows[step] for step in sorted(rows)]
    return Table(
        step=np.array([row.step for row in ordered], np.int64),
        time=np.array([row.time for row in ordered], np.float64),
        attempt=np.array([row.attempt for row in ordered], np.int64),
        columns={
            name: np.array([row.values.get(name, np.nan) for row in ordered], np.float64)
            for name in sorted({name for row in ordered for name in row.values})
        },
    )


def _evaluations(events: Iterable[Event]) -> Mapping[str, Table]:
    domains: dict[str, list[Event]] = {}
    for event in events:
        if event.kind == names.EVALUATION:
            domains.setdefault(event.labels.get("domain", ""), []).append(event)
    return {domain: table_of(found) for domain, found in sorted(domains.items())}


def _read_config(path: Path) -> Mapping[str, Any]:
    # Not prl.config.load: a run of another version of prl, with other keys, has a report too.
    try:
        plain = OmegaConf.to_container(read_yaml(path))
    except FileNotFoundError:
        return {}
    except NotPlainError as error:
        raise ReportError(str(error)) from error
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not a configuration: {in_words(error)}") from error
    if not isinstance(plain, dict) or not isinstance(plain.get("run") or {}, dict):
        raise ReportError(f"{path}: expected sections such as run: and model:, each with keys and values")
    return {str(key): value for key, value in plain.items()}


def _read_attempt(run: RunFolder, number: int, notes: list[str]) -> Attempt:
    """What the attempt says of its end; where that cannot be read, a note."""
    path = run.exit(number)
    try:
        ended = read_outcome(path)
    except OutcomeError as error:
        notes.append(str(error))
        return Attempt(number, "unknown", f"attempt {number} has ended, and {path.name} is damaged")
    if ended is None:
        return Attempt(number, None, "", batch_end=log_end(run.batch_log(number), BATCH_LINES), begun=run.plan(number).exists())
    return Attempt(
        number,
        ended.outcome,
        ended.cause,
        role=ended.role,
        code=ended.code,
        steps=ended.steps,
        started=_seconds(f"{path}: started", ended.started, notes),
        ended=_seconds(f"{path}: ended", ended.ended, notes),
    )


def _seconds(what: str, value: float | None, notes: list[str]) -> float | None:
    if value is None or 0 <= value < YEAR_9999:
        return value
    notes.append(f"{what} = {str(value)[:40]} is no time")
    return None


def _phases(events: Iterable[Event]) -> Sequence[Phase]:
    phases = [Phase(event.labels.get("name", "?"), event.attempt, event.time) for event in events if event.kind == names.PHASE]
    return tuple(sorted(phases, key=lambda phase: (phase.attempt, phase.time)))


def _sampler_changes(events: Iterable[Event]) -> Sequence[SamplerChange]:
    found = [event for event in events if event.kind == names.SAMPLERS]
    changes = (SamplerChange(e.attempt, e.time, e.labels.get("event", ""), e.values) for e in found)
    return tuple(sorted(changes, key=lambda change: (change.attempt, change.time)))


def _usage(events: Iterable[Event]) -> Sequence[UsageSeries]:
    rows: dict[tuple[int, str, str], list[Event]] = {}
    for event in events:
        if event.kind == names.USAGE:
            role = event.labels.get("role", event.role)
            process = event.labels.get("process", f"{role} {event.index}")
            rows.setdefault((event.attempt, role, process), []).append(event)
    return tuple(
        UsageSeries(
            *key,
            time=np.array([event.time for event in found], np.float64),
            cpu_s=np.array([event.values.get(names.CPU_S, np.nan) for event in found], np.float64),
            max_rss_bytes=np.array([event.values.get(names.MAX_RSS_BYTES, np.nan) for event in found], np.float64),
        )
        for key, found in sorted(rows.items())
    )


def _discards(run: RunFolder) -> tuple[Mapping[str, int], Sequence[str]]:
    """Discarded rollouts by reason, most frequent first; and what is wrong with the ledger, if anything."""
    try:
        ledger = read_ledger(run.ledgers)
    except StreamError as error:  # a damaged ledger is a reason to look at the report, not to have none
        return {}, [f"the ledger cannot be read: {error}"]
    reasons = ledger.filter(pc.field("event") == "discarded").column("reason")
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(reasons).to_pylist()}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))), []


def _sizes(run: Path) -> Sequence[FolderSize]:
    """Files and bytes of each folder at the top, with streams/ split into its own."""
    folders = [folder for folder in sorted(run.iterdir()) if folder.is_dir() and not folder.is_symlink()]
    split = [part for part in folders if part.name == "streams"]
    parts = [folder for folder in folders if folder not in split]
    parts += [inner for folder in split for inner in sorted(folder.iterdir()) if inner.is_dir()]
    return tuple(_size(run, part) for part in parts)


def _size(run: Path, folder: Path) -> FolderSize:
    files = size_bytes = 0
    for parent, _, found in os.walk(folder):
        for name in found:
            try:
                size_bytes += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # a temporary file of the running job
                continue
            files += 1
    return FolderSize(str(folder.relative_to(run)), files, size_bytes)
