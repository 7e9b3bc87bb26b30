"""Step files: one a step, one record batch a micro-batch. A batch is a single row of lists, so that every per-token column of
a micro-batch lies in one piece and becomes a numpy view. The header deals micro-batches to data-parallel ranks by tokens, each
of which reads its own and nothing else (see `parts.py`)."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from prl.flow.ids import RolloutId
from prl.flow.packing import deal
from prl.streams.arrays import Array, has_nulls, one_list
from prl.streams.files import (
    Encoded,
    Header,
    ReadAt,
    StreamError,
    StreamFile,
    check_schema,
    check_tokens,
    list_published,
    publish_arrow,
    read_published,
)
from prl.streams.parts import Footer, encode_parts, read_batch, read_footer, read_part
from prl.streams.records import NO_METRICS, MicroBatch, StepFacts
from prl.streams.routings import ROUTINGS, SHAPE, from_values, shape_in, shape_of, to_column

KIND = "step"
_PER_TOKEN = {
    "tokens": np.int32,
    "positions": np.int32,
    "loss_weights": np.float32,
    "advantages": np.float32,
    "old_logprobs": np.float32,
    "lags": np.int32,
}
_IDS = {"epoch": pa.int32(), "problem": pa.string(), "group": pa.int64(), "rollout": pa.int32(), "issue": pa.int32()}
SCHEMA = pa.schema(
    [
        ("tokens", pa.list_(pa.int32())),
        ("positions", pa.list_(pa.int32())),
        ("boundaries", pa.list_(pa.int32())),
        ("loss_weights", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("old_logprobs", pa.list_(pa.float32())),
        ("reference_logprobs", pa.list_(pa.float32())),  # null: no reference
        ("lags", pa.list_(pa.int32())),
        *((name, pa.list_(kind)) for name, kind in _IDS.items()),  # of each sequence
    ]
)
_NOT_NEGATIVE = ("tokens", "positions", "epoch", "group", "rollout", "issue")
_STEM = re.compile(r"step_(\d+)")
_METRIC = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MOST_METRICS_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """A step's file before it lies on any disk."""

    step: int
    header: Header
    data: Encoded


def encode_step(
    microbatches: Sequence[MicroBatch],
    facts: StepFacts,
    *,
    run: str,
    attempt: int,
    sequence: int,
    metrics: Mapping[str, float] = NO_METRICS,
) -> EncodedStep:
    """`sequence` rises with every file of this writer (from `files.next_sequence(folder)` on): of two files of one step the
    later one holds. `metrics`: the step's figures (data/*, without the prefix), for whoever trains it, however often; those
    that are not finite are left out. Raises StreamError where the micro-batches contradict themselves or the facts."""
    if facts.microbatches != len(microbatches):
        raise StreamError(f"step {facts.step} with {len(microbatches)} micro-batches has the facts {facts}")
    for number, microbatch in enumerate(microbatches):
        _check(microbatch, f"step {facts.step}, micro-batch {number}")
    header = Header(KIND, run, attempt, "preprocess", sequence)
    tokens = [len(m.tokens) for m in microbatches]
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    more = {"prl.facts": json.dumps(asdict(facts)), "prl.tokens": json.dumps(tokens), "prl.metrics": json.dumps(finite)}
    schema = SCHEMA
    routed = shape_of([m.routings for m in microbatches])
    if routed:
        schema, more[SHAPE] = SCHEMA.append(ROUTINGS), json.dumps(routed)
    schema = schema.with_metadata(header.metadata(more))
    batches = [_to_batch(microbatch, schema) for microbatch in microbatches]
    return EncodedStep(facts.step, header, encode_parts(schema, batches))


def publish_step(folder: Path, encoded: EncodedStep) -> StreamFile:
    """Make a step's file durable. Raises OSError."""
    return publish_arrow(folder, f"step_{encoded.step:08d}", encoded.header, encoded.data)


def write_step(
    folder: Path,
    microbatches: Sequence[MicroBatch],
    facts: StepFacts,
    *,
    run: str,
    attempt: int,
    sequence: int,
    metrics: Mapping[str, float] = NO_METRICS,
) -> StreamFile:
    """Encode and publish."""
    encoded = encode_step(microbatches, facts, run=run, attempt=attempt, sequence=sequence, metrics=metrics)
    return publish_step(folder, encoded)


def find_steps(folder: Path) -> dict[int, StreamFile]:
    """Step to its durable file (the latest one where a step was written twice), from one listing."""
    return {step: files[0] for step, files in all_steps(folder).items()}


def all_steps(folder: Path) -> dict[int, list[StreamFile]]:
    """Step to all files of that name, the latest first, from one listing. Who needs the one that a run has written takes the
    first that can be read as that: beside it may lie a foreign one."""
    found: dict[int, list[StreamFile]] = {}
    for stem, file in reversed(list_published(folder)):
        match = _STEM.fullmatch(stem)
        if match:
            found.setdefault(int(match[1]), []).append(file)
    return dict(sorted(found.items()))


def read_step(
    path: Path,
    size_bytes: int,
    checksum: str,
    *,
    run: str | None = None,
    step: int | None = None,
    vocabulary: int | None = None,
    share: tuple[int, int] | None = None,
    wait_s: float = 0.0,
) -> "StepFile":
    """A step's file, checked as `read_rollouts` does. `step`, where given, is the one that it has to be of, whatever its name
    says; `vocabulary` how many tokens the model knows. Raises StreamError for anything but the whole file that was announced.

    `share` is a data-parallel rank and how many there are: of the file its end is read, and the micro-batches that are dealt to
    this rank. Nothing is known of the others then, but that all ranks deal alike."""

    def make(read: ReadAt) -> StepFile:
        return _open_step(path, read, size_bytes, checksum, run, share)

    found = read_published(path, size_bytes, make, wait_s=wait_s)
    if step is not None and found.facts.step != step:
        raise StreamError(f"{path}: holds step {found.facts.step}, wanted step {step}")
    for batch in found.batches.values():
        check_tokens(path, batch.column("tokens").values.to_numpy(), vocabulary)
    return found


def read_own(file: StreamFile, *, run: str, step: int, newest_attempt: int, vocabulary: int | None = None) -> "StepFile":
    """A step's whole file, as the run of this name wrote it in an attempt that it had. Raises StreamError for any other: it is
    foreign, or damaged."""
    if file.attempt > newest_attempt:
        raise StreamError(f"{file.path}: of attempt {file.attempt}, the run's newest is attempt {newest_attempt}")
    found = read_step(file.path, file.bytes, file.checksum, run=run, step=step, vocabulary=vocabulary)
    told = (found.header.attempt, found.header.sequence)
    if told != (file.attempt, file.sequence):
        raise StreamError(f"{file.path}: its header says attempt {told[0]}, sequence {told[1]}")
    return found


def _open_step(
    path: Path,
    read: ReadAt,
    size_bytes: int,
    checksum: str,
    run: str | None,
    share: tuple[int, int] | None,
) -> "StepFile":
    """See `read_step`; `read` gives bytes of the file. Raises StreamError."""
    footer = read_footer(path, read, size_bytes, checksum)
    found = _read_header(path, footer, run)
    if share is None:
        read_part(f"{path}, its head", read, footer.head)
        numbers = list(range(len(footer.batches)))
    else:
        rank, ranks = share
        numbers = found.deal(ranks)[rank]
    batches = {}
    for number in numbers:
        place = f"{path}, micro-batch {number}"
        batch = read_batch(place, read, footer.batches[number], footer.schema)
        _check_lists(batch, place)
        if len(batch.column("tokens").values) != found.tokens[number]:
            raise StreamError(f"{place}: of other tokens than its header deals")
        batches[number] = batch
    return replace(found, batches=batches)


def _read_header(path: Path, footer: Footer, run: str | None) -> "StepFile":
    """What holds for the whole step; no micro-batch is in it yet."""
    metadata = footer.schema.metadata or {}
    try:
        header = check_schema(path, footer.schema, KIND, SCHEMA, run)
        facts = StepFacts(**json.loads(metadata[b"prl.facts"]))
        tokens = json.loads(metadata[b"prl.tokens"])
        routed = shape_in(metadata, footer.schema.names)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise StreamError(f"{path}: no step facts in its header ({type(error).__name__}: {error})") from error
    counts = (facts.step, facts.trained_tokens, facts.samples, facts.microbatches)
    if any(type(n) is not int or n < 0 for n in counts) or not _is_positive(facts.denominator) or not facts.microbatches:
        raise StreamError(f"{path}: its header speaks of {facts}")
    metrics = _metrics(path, metadata.get(b"prl.metrics", b"{}"))
    if facts.microbatches != len(footer.batches):
        raise StreamError(f"{path}: {len(footer.batches)} micro-batches, its header speaks of {facts.microbatches}")
    if type(tokens) is not list or len(tokens) != facts.microbatches or any(type(n) is not int or n < 0 for n in tokens):
        raise StreamError(f"{path}: its header deals other micro-batches than it holds")
    return StepFile(path, header, facts, metrics, tokens, routed, batches={})


def _is_positive(number: object) -> bool:
    return type(number) in (int, float) and 0 < number < math.inf  # type: ignore[operator]


def _metrics(where: object, text: bytes) -> Mapping[str, float]:
    """The figures in a header, which go into the run's metrics as they are."""
    try:
        found = json.loads(text) if len(text) <= _MOST_METRICS_BYTES else None
    except (ValueError, RecursionError) as error:
        raise StreamError(f"{where}: its header's metrics are no JSON ({error})") from error
    if not isinstance(found, dict) or not all(
        _METRIC.fullmatch(name) and type(value) is float and math.isfinite(value) for name, value in found.items()
    ):
        raise StreamError(
            f"{where}: its header's metrics are no finite numbers with names (at most {_MOST_METRICS_BYTES} bytes)"
        )
    return found


def _check_lists(batch: pa.RecordBatch, where: str) -> None:
    """One row, each list of which is all of its column, and which fit together."""
    if batch.num_rows != 1:
        raise StreamError(f"{where}: {batch.num_rows} rows")
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "reference_logprobs" and column.null_count and len(column.values) == 0:
            continue
        if has_nulls(column):
            raise StreamError(f"{where}: values are missing in {name}")
        if column.offsets.to_pylist() != [0, len(column.values)]:
            raise StreamError(f"{where}: {name} is not in one piece")
    lengths = {name: len(batch.column(name).values) for name in batch.schema.names}
    if len({lengths[name] for name in _IDS}) != 1:
        raise StreamError(f"{where}: the parts of its rollout ids differ in number")
    if batch.column("reference_logprobs").null_count:
        del lengths["reference_logprobs"]
    of_tokens = {name: length for name, length in lengths.items() if name in (*_PER_TOKEN, "reference_logprobs")}
    _check_frame(of_tokens, batch.column("boundaries").values.to_numpy(), lengths["group"], where)
    for name in _NOT_NEGATIVE:
        if batch.column(name).values.to_numpy().min(initial=0) < 0:
            raise StreamError(f"{where}: {name} below 0")


@dataclass(frozen=True, eq=False)
class StepFile:
    """A step file in memory, or the micro-batches of it that were read."""

    path: Path
    header: Header
    facts: StepFacts
    metrics: Mapping[str, float]  # data/*, without the prefix; empty where the writer knew none
    tokens: list[int]  # of each micro-batch, also of those that were not read
    routed: tuple[int, int] | None  # layers, experts a token; None: nothing is known of experts
    batches: Mapping[int, pa.RecordBatch]  # by the micro-batch's number; a rank's in the order in which they are dealt to it

    def deal(self, data_parallel_size: int) -> list[list[int]]:
        """Numbers of the micro-batches of each rank: every one once, as many and (nearly) as long on each rank as can be. Where
        the count is no multiple of the ranks, some have one fewer."""
        return deal(self.tokens, data_parallel_size)

    def microbatch(self, number: int) -> MicroBatch:
        """One micro-batch of those read; its arrays are read-only views. Raises StreamError where its routings do not fit its
        tokens."""
        batch = self.batches[number]

        def values(name: str) -> Array:
            array: Array = batch.column(name).values.to_numpy(zero_copy_only=True)
            return array

        reference = None if batch.column("reference_logprobs").null_count else values("reference_logprobs")
        ids = zip(*(batch.column(name).values.to_pylist() for name in _IDS), strict=True)
        routings = None
        if self.routed:
            try:
                routings = from_values(values(ROUTINGS.name), self.routed, self.tokens[number])
            except ValueError as error:
                raise StreamError(f"{self.path}, micro-batch {number}: {error}") from error
        return MicroBatch(
            **{name: values(name) for name in _PER_TOKEN},
            boundaries=values("boundaries"),
            reference_logprobs=reference,
            rollouts=tuple(RolloutId(*i) for i in ids),
            routings=routings,
        )

    def microbatches(self) -> list[MicroBatch]:
        """All that were read."""
        return [self.microbatch(number) for number in self.batches]

    def rollout_ids(self) -> list[RolloutId]:
        """Every rollout of what was read, once, in rising order."""
        found: set[RolloutId] = set()
        for batch in self.batches.values():
            found.update(RolloutId(*i) for i in zip(*(batch.column(name).values.to_pylist() for name in _IDS), strict=True))
        return sorted(found)


def _check(microbatch: MicroBatch, where: str) -> None:
    names = (*_PER_TOKEN, "reference_logprobs", "routings")
    arrays = {name: getattr(microbatch, name) for name in names}
    lengths = {name: len(array) for name, array in arrays.items() if array is not None}
    _check_frame(lengths, microbatch.boundaries, len(microbatch.rollouts), where)


def _check_frame(lengths: Mapping[str, int], boundaries: Array, sequences: int, where: str) -> None:
    """`lengths`: of the columns that have a value for each token."""
    tokens = lengths["tokens"]
    wrong = {name: length for name, length in lengths.items() if length != tokens}
    if wrong:
        raise StreamError(f"{where}: {tokens} tokens, but {wrong}")
    if len(boundaries) != sequences + 1 or boundaries[0] != 0 or boundaries[-1] != tokens:
        raise StreamError(f"{where}: boundaries {boundaries.tolist()} of {sequences} sequences, {tokens} tokens")
    if (np.diff(boundaries.astype(np.int64)) <= 0).any():
        raise StreamError(f"{where}: an empty sequence in boundaries {boundaries.tolist()}")


def _to_batch(microbatch: MicroBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = {name: one_list(getattr(microbatch, name).astype(dtype, copy=False)) for name, dtype in _PER_TOKEN.items()}
    columns["boundaries"] = one_list(microbatch.boundaries.astype(np.int32, copy=False))
    reference = microbatch.reference_logprobs
    if reference is None:
        columns["reference_logprobs"] = pa.nulls(1, pa.list_(pa.float32()))
    else:
        columns["reference_logprobs"] = one_list(reference.astype(np.float32, copy=False))
    for name, kind in _IDS.items():
        values = pa.array([getattr(i, name) for i in microbatch.rollouts], kind)
        columns[name] = pa.ListArray.from_arrays(pa.array(np.array([0, len(values)], np.int32)), values)
    if ROUTINGS.name in schema.names:
        columns[ROUTINGS.name] = to_column([microbatch.routings])
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)
