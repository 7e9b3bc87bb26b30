"""Step files: one a step, one record batch a micro-batch. A batch is a single row of lists, so that every per-token column of
a micro-batch lies in one piece and becomes a numpy view. The header deals micro-batches to data-parallel ranks by tokens."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from prl.flow.ids import RolloutId
from prl.flow.packing import deal
from prl.streams.arrays import Array, one_list
from prl.streams.files import Header, Published, StreamError, list_published, open_arrow, publish_arrow, read_checked
from prl.streams.records import MicroBatch, StepFacts

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
_STEM = re.compile(r"step_(\d+)")


def write_step(
    folder: Path, step: int, microbatches: Sequence[MicroBatch], facts: StepFacts, *, run: str, attempt: int, sequence: int
) -> Published:
    """Publish a step's file. `sequence` rises with every file of this writer (from `files.next_sequence(folder)` on): of two
    files of one step the later one holds. Raises StreamError where the micro-batches contradict themselves or the facts."""
    if facts.step != step or facts.microbatches != len(microbatches):
        raise StreamError(f"step {step} with {len(microbatches)} micro-batches has the facts {facts}")
    for number, microbatch in enumerate(microbatches):
        _check(microbatch, f"step {step}, micro-batch {number}")
    header = Header(KIND, run, attempt, "preprocess", sequence)
    tokens = [len(m.tokens) for m in microbatches]
    metadata = header.metadata({"prl.facts": json.dumps(asdict(facts)), "prl.tokens": json.dumps(tokens)})
    schema = SCHEMA.with_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for microbatch in microbatches:
            writer.write_batch(_to_batch(microbatch, schema))
    return publish_arrow(folder, f"step_{step:08d}", header, sink.getvalue())


def find_steps(folder: Path) -> dict[int, Published]:
    """Step to its durable file (the latest one where a step was written twice), from one listing."""
    found = {}
    for stem, file in list_published(folder):
        match = _STEM.fullmatch(stem)
        if match:
            found[int(match[1])] = file
    return dict(sorted(found.items()))


def read_step(path: Path, size_bytes: int, checksum: str, *, run: str | None = None, wait_s: float = 0.0) -> "StepFile":
    """A step's file, checked as `read_rollouts` does. Raises StreamError for anything but the whole file that was announced."""
    data = read_checked(path, size_bytes, checksum, wait_s=wait_s)
    batches, header = open_arrow(path, data, KIND, SCHEMA, run)
    try:
        metadata = pa.ipc.open_file(data).schema.metadata
        facts = StepFacts(**json.loads(metadata[b"prl.facts"]))
        tokens = [int(n) for n in json.loads(metadata[b"prl.tokens"])]
    except (KeyError, TypeError, ValueError) as error:
        raise StreamError(f"{path}: no step facts in its header ({error})") from error
    if not facts.microbatches == len(batches) == len(tokens):
        raise StreamError(f"{path}: {len(batches)} micro-batches, its header speaks of {facts.microbatches}")
    return StepFile(path, header, facts, tokens, batches)


class StepFile:
    """A step file in memory."""

    def __init__(self, path: Path, header: Header, facts: StepFacts, tokens: list[int], batches: list[pa.RecordBatch]) -> None:
        self.path = path
        self.header = header
        self.facts = facts
        self.tokens = tokens  # of each micro-batch
        self._batches = batches

    def deal(self, data_parallel_size: int) -> list[list[int]]:
        """Numbers of the micro-batches of each rank: every one once, as many and (nearly) as long on each rank as can be. Where
        the count is no multiple of the ranks, some have one fewer."""
        return deal(self.tokens, data_parallel_size)

    def microbatch(self, number: int) -> MicroBatch:
        """One micro-batch; its arrays are read-only views. Raises StreamError where they do not fit together."""
        batch = self._batches[number]
        if batch.num_rows != 1:
            raise StreamError(f"{self.path}, micro-batch {number}: {batch.num_rows} rows")

        def values(name: str) -> Array:
            array: Array = batch.column(name).values.to_numpy(zero_copy_only=True)
            return array

        reference = None if batch.column("reference_logprobs").null_count else values("reference_logprobs")
        ids = zip(*(batch.column(name).values.to_pylist() for name in _IDS), strict=True)
        microbatch = MicroBatch(
            **{name: values(name) for name in _PER_TOKEN},
            boundaries=values("boundaries"),
            reference_logprobs=reference,
            rollouts=tuple(RolloutId(*i) for i in ids),
        )
        _check(microbatch, f"{self.path}, micro-batch {number}")
        return microbatch

    def rollout_ids(self) -> list[RolloutId]:
        """Every rollout of the step, once, in rising order."""
        found: set[RolloutId] = set()
        for batch in self._batches:
            found.update(RolloutId(*i) for i in zip(*(batch.column(name).values.to_pylist() for name in _IDS), strict=True))
        return sorted(found)


def _check(microbatch: MicroBatch, where: str) -> None:
    tokens = len(microbatch.tokens)
    arrays: dict[str, Any] = {name: getattr(microbatch, name) for name in _PER_TOKEN}
    if microbatch.reference_logprobs is not None:
        arrays["reference_logprobs"] = microbatch.reference_logprobs
    wrong = {name: len(array) for name, array in arrays.items() if len(array) != tokens}
    if wrong:
        raise StreamError(f"{where}: {tokens} tokens, but {wrong}")
    boundaries = microbatch.boundaries
    if len(boundaries) != len(microbatch.rollouts) + 1 or boundaries[0] != 0 or boundaries[-1] != tokens:
        raise StreamError(f"{where}: boundaries {boundaries.tolist()} of {len(microbatch.rollouts)} sequences, {tokens} tokens")
    if (np.diff(boundaries) <= 0).any():
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
    return pa.record_batch([columns[name] for name in SCHEMA.names], schema=schema)
