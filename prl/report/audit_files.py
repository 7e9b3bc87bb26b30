"""The files of both streams as an audit sees them: a few numbers a rollout, read one file at a time."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prl.config.schema import Config
from prl.report.audit_ids import Findings, Ids, Int64, gaps, numbered, pairs_of
from prl.report.audit_ledger import Problems
from prl.runfolder.paths import RunFolder
from prl.runfolder.reclaim import Reclaimed, kept_aside, read_aside
from prl.streams import rollouts, steps
from prl.streams.arrays import has_nulls
from prl.streams.files import FILE_NAME, Header, StreamError, StreamFile, open_arrow, read_checked
from prl.streams.folder import rollout_files

Bool = npt.NDArray[np.bool_]


@dataclass
class RolloutFiles:
    """All rollouts that lie in files, by key in rising order."""

    names: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # what is wrong with files that cannot be read
    key: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: Int64 = field(default_factory=lambda: np.empty(0, np.int64))  # sampled ones that can train
    steps_sum: Int64 = field(default_factory=lambda: np.empty(0, np.int64))  # of their versions' steps
    steps_min: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    steps_max: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    file: Int64 = field(default_factory=lambda: np.empty(0, np.int64))  # index into `names`
    # (group, issue), as single numbers, of files that were set aside, and of these and those deleted on purpose
    aside_pairs: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    gone_pairs: Int64 = field(default_factory=lambda: np.empty(0, np.int64))

    def where(self, key: int) -> str:
        """The files that hold an id."""
        return ", ".join(self.names[number] for number in self.file[self.key == key].tolist())


def read_rollout_files(
    run: RunFolder,
    run_name: str,
    reclaimed_by_now: Callable[[], Mapping[str, Reclaimed]],
    problems: Problems,
    findings: Findings,
) -> RolloutFiles:
    """Every rollout file of every writer, with the numbers of the files checked. A run that goes on deletes files meanwhile,
    and records it before: so the record is read after the listing, and again where a file has gone since. Or it sets one aside.
    """
    result = RolloutFiles()
    columns: list[list[Int64]] = []
    found = _rollout_files(run, findings)
    reclaimed = reclaimed_by_now()
    for writer, listed in found.items():
        _check_sequences(run.rollouts / writer, listed, reclaimed, run, findings)
        for file in listed:
            name = file.path.relative_to(run.path).as_posix()
            try:
                data = read_checked(file.path, file.bytes, file.checksum)
                opened = open_arrow(file.path, data, rollouts.KIND, rollouts.SCHEMA, run_name)
                if any(has_nulls(column) for batch in opened.batches for column in batch.columns):
                    raise StreamError(f"{file.path}: values are missing")
            except (StreamError, OSError) as error:
                gone = not os.path.lexists(file.path) and (
                    os.path.lexists(kept_aside(run, file.path)) or name in (reclaimed := reclaimed_by_now())
                )
                if not gone:
                    result.damaged.append(str(error))
                continue
            _check_header(name, opened.header, writer, file, findings)
            columns += [_rollout_columns(batch, len(result.names), problems, name, findings) for batch in opened.batches]
            result.names.append(name)
    if columns:
        key, tokens, total, low, high, number = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        order = np.argsort(key, kind="stable")
        result.key, result.tokens, result.steps_sum = key[order], tokens[order], total[order]
        result.steps_min, result.steps_max, result.file = low[order], high[order], number[order]
    try:
        result.aside_pairs = _pairs(list(read_aside(run)))
    except (OSError, ValueError) as error:
        findings.add("", str(error))
    deleted = _pairs([pair for file in reclaimed.values() for pair in file.groups])
    result.gone_pairs = np.union1d(deleted, result.aside_pairs)
    return result


def _pairs(pairs: Sequence[tuple[int, int]]) -> Int64:
    groups, issues = np.array(pairs, np.int64).reshape(-1, 2).T
    return np.unique(pairs_of(Ids.keys(groups, issues, np.zeros_like(groups))))


def _rollout_files(run: RunFolder, findings: Findings) -> dict[str, list[StreamFile]]:
    try:
        return rollout_files(run)
    except OSError as error:
        findings.add("", f"the rollout files cannot be listed: {error}")
        return {}


def _check_sequences(
    writer: Path, files: list[StreamFile], reclaimed: Mapping[str, Reclaimed], run: RunFolder, findings: Findings
) -> None:
    """A writer numbers its files 0, 1, 2, ... over all attempts."""
    numbers = np.array([file.sequence for file in files], np.int64)
    gone = [Path(name) for name in reclaimed if (run.path / name).parent == writer and not (run.path / name).exists()]
    aside = [path.name.removeprefix(f"{writer.name}_") for path in run.quarantine.glob(f"{writer.name}_{rollouts.KIND}_a*")]
    matches = [FILE_NAME.fullmatch(name) for name in (*(path.name for path in gone), *aside)]
    deleted = np.array([int(match["sequence"]) for match in matches if match], np.int64)
    held, counts = np.unique(numbers, return_counts=True)
    for sequence in held[counts > 1].tolist():
        findings.add(f"{writer.name} file {sequence}", "two files have this sequence number")
    for start, end in gaps(np.union1d(held, deleted)):
        findings.add(
            f"{writer.name} {numbered('file', start, end)}", "missing: neither there nor in quarantine nor deleted on purpose"
        )
    if (np.diff(numbers) < 0).any():
        findings.add(f"writer {writer.name}", "sequence numbers fell from one attempt to the next")


def _check_header(name: str, header: Header, writer: str, file: StreamFile, findings: Findings) -> None:
    for part, named in (("attempt", file.attempt), ("writer", writer), ("sequence", file.sequence)):
        if getattr(header, part) != named:
            findings.add(name, f"its header says {part} {getattr(header, part)}, its name {named}")


def _rollout_columns(batch: pa.RecordBatch, number: int, problems: Problems, name: str, findings: Findings) -> list[Int64]:
    """[key, tokens, steps_sum, steps_min, steps_max, file] of the rollouts of a batch; turns of one rollout are added up."""
    group, issue, rollout, epoch, turn = (
        batch.column(column).to_numpy().astype(np.int64) for column in ("group_id", "issue", "rollout", "epoch", "turn")
    )
    if not Ids.in_range(group, issue, rollout).all():
        findings.add(name, "holds an id beyond all bounds")
    keys = Ids.keys(group, issue, rollout)
    strange = problems.strangers(group, epoch, batch.column("problem_id"))
    findings.add_ids(np.unique(keys[strange]), f"is of another problem or epoch in {name} than in the ledger")

    # Spans of one version each; a first token that follows nothing cannot train.
    spans, offsets = batch.column("versions").values, batch.column("versions").offsets.to_numpy().astype(np.int64)
    step, start, end = (spans.field(column).to_numpy().astype(np.int64) for column in ("step", "start", "end"))
    turn_of = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
    no_prompt = np.diff(batch.column("prompt_ids").offsets.to_numpy()) == 0
    length = np.maximum(end - start - ((start == 0) & (end > 0) & no_prompt[turn_of]), 0)
    # A row whose turn is 0 begins a rollout, so that one that lies there twice is seen twice.
    begins = np.concatenate(([True], (np.diff(keys) != 0) | (turn[1:] == 0)))[: len(keys)]
    starts = np.flatnonzero(begins)
    rollout_of = (np.cumsum(begins) - 1)[turn_of]
    count = len(starts)
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
    some = length > 0
    np.minimum.at(low, rollout_of[some], step[some])
    np.maximum.at(high, rollout_of[some], step[some])
    tokens = np.bincount(rollout_of, length, count).astype(np.int64)
    total = np.bincount(rollout_of, length * step, count).astype(np.int64)
    return [keys[starts], tokens, total, low, high, np.full(count, number)]


@dataclass(frozen=True)
class StepRows:
    """The rollouts of a step file, by key in rising order."""

    key: Int64
    tokens: Int64  # trained ones
    lag_sum: Int64
    lag_min: Int64
    lag_max: Int64  # -1: nothing of it trains


def open_own_step(
    files: Sequence[StreamFile], run_name: str, step: int, newest_attempt: int
) -> tuple[steps.StepFile | None, list[str]]:
    """Of a step's files, the latest first, the one that a resume would train: the first that the run has written. And why those
    before it, or all of them, are of no use: a resume sets them aside."""
    useless: list[str] = []
    for file in files:
        try:
            return steps.read_own(file, run=run_name, step=step, newest_attempt=newest_attempt), useless
        except StreamError as error:
            useless.append(str(error))
    return None, useless


def step_rows(name: str, step: int, opened: steps.StepFile, problems: Problems, findings: Findings) -> StepRows:
    """What is in a step's file of this name; a finding where it contradicts its own facts."""
    facts, batches = opened.facts, opened.batches.values()
    parts = [_sequence_columns(batch, problems, name, findings) for batch in batches]
    keys, tokens, sums, lows, highs = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    weighted = sum(int((batch.column("loss_weights").values.to_numpy() > 0).sum()) for batch in batches)
    ids, inverse = np.unique(keys, return_inverse=True)
    if (facts.samples, facts.trained_tokens) != (len(ids), weighted):
        findings.add(
            f"step {step}",
            f"{name} holds {len(ids)} rollouts and {weighted} trained tokens; its facts say {facts.samples} rollouts, "
            f"{facts.trained_tokens} tokens",
        )
    low, high = np.full(len(ids), np.iinfo(np.int64).max), np.full(len(ids), -1)
    np.minimum.at(low, inverse, lows)
    np.maximum.at(high, inverse, highs)
    count = np.bincount(inverse, tokens, len(ids)).astype(np.int64)
    return StepRows(ids, count, np.bincount(inverse, sums, len(ids)).astype(np.int64), low, high)


def _sequence_columns(batch: pa.RecordBatch, problems: Problems, name: str, findings: Findings) -> list[Int64]:
    """[key, tokens, lag_sum, lag_min, lag_max] of the sequences of a micro-batch."""
    column = {key: batch.column(key).values for key in ("group", "issue", "rollout", "epoch", "boundaries", "lags")}
    group, issue, rollout, epoch, bounds, lags = (values.to_numpy().astype(np.int64) for values in column.values())
    keys = Ids.keys(group, issue, rollout)
    strange = problems.strangers(group, epoch, batch.column("problem").values)
    findings.add_ids(np.unique(keys[strange]), f"is of another problem or epoch in {name} than in the ledger")
    trained = lags >= 0

    def sums(values: Int64) -> Int64:
        return np.diff(np.concatenate(([0], np.cumsum(values)))[bounds])

    low = np.minimum.reduceat(np.where(trained, lags, np.iinfo(np.int64).max), bounds[:-1])
    high = np.maximum.reduceat(lags, bounds[:-1])
    return [keys, sums(trained.astype(np.int64)), sums(np.where(trained, lags, 0)), low, high]


def check_age(config: Config, step: int, rows: StepRows, files: RolloutFiles, findings: Findings) -> None:
    """Lags are within the limit of `config`, that of the attempt which made the step, and what the rollouts' versions say."""
    limit = config.run.lag_limit
    if config.preprocess.too_old != "train":
        findings.add_ids(rows.key[rows.lag_max > limit], f"trained in step {step} with a lag above {limit}")
    if not len(files.key):
        return
    at = np.minimum(np.searchsorted(files.key, rows.key), len(files.key) - 1)
    both = files.key[at] == rows.key
    at, key = at[both], rows.key[both]
    tokens, lags, sampled = rows.tokens[both], rows.lag_sum[both], files.tokens[at]
    fewer = (tokens < sampled) & (config.preprocess.too_old != "mask")
    for wrong in np.flatnonzero(fewer | (tokens > sampled)).tolist():
        words = f"step {step} trains {tokens[wrong]} tokens of it, its rollout has {sampled[wrong]} to train on"
        findings.add_ids(key[wrong : wrong + 1], words)
    newest = step - 1
    off = (tokens == sampled) & (lags != tokens * newest - files.steps_sum[at])
    some = tokens > 0
    off |= some & (rows.lag_min[both] < newest - files.steps_max[at])
    off |= some & (rows.lag_max[both] > newest - files.steps_min[at])
    findings.add_ids(key[off], f"its lags in step {step} are not those of the versions that sampled it")
