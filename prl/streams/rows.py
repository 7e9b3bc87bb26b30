"""What a rollout file holds: rows, flat and as they lie there, and the groups that they make up."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prl.flow.versions import Version
from prl.streams.arrays import Array, all_finite, flat, has_nulls, pieces, strings
from prl.streams.files import StreamError
from prl.streams.records import NO_METRICS, Float32, Group, Int16, Int32, Rollout, Turn, VersionSpan
from prl.streams.rollouts import SCHEMA
from prl.streams.routings import ROUTINGS, from_values, shape_in

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """The checked rows of a batch: one a turn, those of a rollout together, whole groups. Arrays of tokens are read-only views:
    row i has the prompt prompt_ids[prompt_offsets[i] : prompt_offsets[i + 1]], and likewise its output and log-probs."""

    column: Mapping[str, Any]  # of the schema, in Arrow
    group_starts: Int64  # [groups], the first row of each
    rollout_starts: Int64  # [rollouts], the first row of each
    rewards: Float32  # [rollouts]
    prompt_offsets: Int32  # [rows + 1]
    prompt_ids: Int32  # [prompt tokens]
    output_offsets: Int32  # [rows + 1]
    output_ids: Int32  # [output tokens]
    logprobs: Float32  # [output tokens]
    routings: list[Int16 | None] | None  # [rows], as of `Turn`; None: of no row

    def of_groups(self, name: str) -> list[Any]:
        """A column's values, one a group."""
        column = self.column[name]
        if pa.types.is_dictionary(column.type):
            return strings(column, self.group_starts)
        values: list[Any] = column.to_numpy()[self.group_starts].tolist()
        return values

    def issues(self) -> list[tuple[int, int]]:
        """The groups, each with its issue."""
        return list(zip(self.of_groups("group_id"), self.of_groups("issue"), strict=True))


def rows_of(batch: pa.RecordBatch, where: object) -> Rows:
    """The rows of a batch that has some. Raises StreamError where they do not make up whole groups."""
    column = {name: batch.column(name) for name in SCHEMA.names}
    if any(map(has_nulls, column.values())):
        raise StreamError(f"{where}: values are missing")
    group, issue, rollout, turn = (column[n].to_numpy() for n in ("group_id", "issue", "rollout", "turn"))
    new_group = np.concatenate(([True], (np.diff(group) != 0) | (np.diff(issue) != 0)))
    new_rollout = np.concatenate(([True], np.diff(rollout) != 0)) | new_group
    _check_numbers(new_group, new_rollout, rollout, turn, where)
    prompt_ids, prompt_offsets = flat(column["prompt_ids"])
    output_ids, output_offsets = flat(column["output_ids"])
    logprobs, logprob_offsets = flat(column["logprobs"])
    if not np.array_equal(logprob_offsets, output_offsets):
        raise StreamError(f"{where}: there are not as many log-probs as output tokens")
    _check_versions(column["versions"], np.diff(output_offsets), where)
    _check_values(column, (prompt_ids, output_ids), logprobs, where)
    routings = _routings(batch, np.diff(prompt_offsets) + np.diff(output_offsets) - 1, where)
    rollout_starts = np.flatnonzero(new_rollout)
    return Rows(
        column=column,
        group_starts=np.flatnonzero(new_group),
        rollout_starts=rollout_starts,
        rewards=column["reward"].to_numpy()[rollout_starts],
        prompt_offsets=prompt_offsets,
        prompt_ids=prompt_ids,
        output_offsets=output_offsets,
        output_ids=output_ids,
        logprobs=logprobs,
        routings=routings,
    )


def _check_numbers(new_group: Array, new_rollout: Array, rollout: Array, turn: Array, where: object) -> None:
    falls = (np.diff(rollout, prepend=rollout[0]) < 0) & ~new_group
    again = (np.diff(turn, prepend=-1) != 1) & ~new_rollout
    if falls.any() or (rollout < 0).any():
        raise StreamError(f"{where}: the numbers of rollouts do not rise in their group")
    if again.any() or turn[new_rollout].any():
        raise StreamError(f"{where}: turns are not numbered 0, 1, 2, ... in their rollout")


def _check_versions(column: pa.ListArray, outputs: Array, where: object) -> None:
    spans, offsets = column.values, column.offsets.to_numpy()
    start, end = spans.field("start").to_numpy(), spans.field("end").to_numpy()
    covered = np.concatenate(([0], np.cumsum(end.astype(np.int64) - start)))
    firsts = np.concatenate(([0], end))[:-1].copy()  # each span begins where the one before ended,
    firsts[offsets[:-1][np.diff(offsets) > 0]] = 0  # the first of a turn at 0
    if not np.array_equal(start, firsts) or (end < start).any() or not np.array_equal(np.diff(covered[offsets]), outputs):
        raise StreamError(f"{where}: the versions do not cover the output tokens")


def _check_values(column: Mapping[str, Any], tokens: Sequence[Array], logprobs: Array, where: object) -> None:
    versions = column["versions"].values
    numbers = [column[name].to_numpy() for name in ("epoch", "group_id", "issue")]
    numbers += [versions.field(name).to_numpy() for name in ("lineage", "step")]
    if any(values.min(initial=0) < 0 for values in (*numbers, *tokens)):
        raise StreamError(f"{where}: an id, a token or a version is below 0")
    if not (all_finite(column["reward"].to_numpy()) and all_finite(logprobs)):
        raise StreamError(f"{where}: a reward or a log-prob is not finite")


def _routings(batch: pa.RecordBatch, tokens: Array, where: object) -> list[Int16 | None] | None:
    """`tokens`: of each row, that went to experts."""
    try:
        shape = shape_in(batch.schema.metadata, batch.schema.names)
        if shape is None:
            return None
        column = batch.column(ROUTINGS.name)
        if has_nulls(column):
            raise ValueError("routings are missing")
        found = pieces(*flat(column))
        return [from_values(values, shape, count) for values, count in zip(found, tokens.tolist(), strict=True)]
    except (ValueError, RecursionError) as error:
        raise StreamError(f"{where}: {error}") from error


def to_groups(rows: Rows) -> list[Group]:
    """The groups of the rows; their token arrays are views."""
    turns, metrics = _turns(rows), _metrics(rows.column["metrics"])
    starts = rows.rollout_starts.tolist()
    rollouts = [
        Rollout(tuple(turns[start:end]), reward, metrics[start])
        for start, end, reward in zip(starts, [*starts[1:], len(turns)], rows.rewards.tolist(), strict=True)
    ]
    first_rollouts = np.searchsorted(rows.rollout_starts, rows.group_starts).tolist()
    numbers = rows.column["rollout"].to_numpy()[rows.rollout_starts].tolist()
    names = ("epoch", "domain", "dataset", "problem_id", "group_id", "issue")
    epochs, domains, datasets, problems, ids, issues = map(rows.of_groups, names)
    return [
        Group(
            epoch=epochs[i],
            domain=domains[i],
            dataset=datasets[i],
            problem=problems[i],
            group=ids[i],
            issue=issues[i],
            rollouts=tuple(rollouts[a:b]),
            numbers=tuple(numbers[a:b]) if numbers[b - 1] != b - a - 1 else (),
        )
        for i, (a, b) in enumerate(itertools.pairwise([*first_rollouts, len(rollouts)]))
    ]


def _turns(rows: Rows) -> list[Turn]:
    columns = (
        pieces(rows.prompt_ids, rows.prompt_offsets),
        pieces(rows.output_ids, rows.output_offsets),
        pieces(rows.logprobs, rows.output_offsets),
        _versions(rows.column["versions"]),
        strings(rows.column["finish_reason"]),
        *(rows.column[name].to_numpy().tolist() for name in ("replica", "started", "ended")),
        [None] * len(rows.output_offsets[1:]) if rows.routings is None else rows.routings,
    )
    return list(map(Turn._make, zip(*columns, strict=True)))


def _versions(column: pa.ListArray) -> list[tuple[VersionSpan, ...]]:
    lineages, steps, starts, ends = (
        column.values.field(name).to_numpy().tolist() for name in ("lineage", "step", "start", "end")
    )
    pairs = list(zip(lineages, steps, strict=True))
    made = {pair: Version(*pair) for pair in set(pairs)}  # few in a file
    spans = list(map(VersionSpan._make, zip(map(made.__getitem__, pairs), starts, ends, strict=True)))
    return [tuple(spans[start:end]) for start, end in itertools.pairwise(column.offsets.to_numpy().tolist())]


def _metrics(column: pa.MapArray) -> list[Mapping[str, float]]:
    keys, items = strings(column.keys.dictionary_encode()), column.items.to_numpy().tolist()
    return [
        dict(zip(keys[start:end], items[start:end], strict=True)) if end > start else NO_METRICS
        for start, end in itertools.pairwise(column.offsets.to_numpy().tolist())
    ]
