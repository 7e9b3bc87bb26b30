"""The table of rollouts: one row a turn, one record batch a file."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from prl.flow.versions import Version
from prl.streams.arrays import DICTIONARY, Array, dictionary_array, has_nulls, list_array, list_views, offsets_of, strings
from prl.streams.files import Header, StreamError, encode_file
from prl.streams.records import NO_METRICS, Group, Rollout, Turn, VersionSpan

KIND = "rollouts"
_SPAN = pa.struct([("lineage", pa.int32()), ("step", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
SCHEMA = pa.schema(
    [
        ("run_id", DICTIONARY),
        ("attempt", pa.int32()),
        ("epoch", pa.int32()),
        ("problem_id", DICTIONARY),
        ("group_id", pa.int64()),
        ("rollout", pa.int32()),
        ("issue", pa.int32()),
        ("turn", pa.int32()),
        ("domain", DICTIONARY),
        ("dataset", DICTIONARY),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(_SPAN)),
        ("reward", pa.float32()),
        ("metrics", pa.map_(pa.string(), pa.float32())),  # of the rollout, in the row of its first turn
        ("finish_reason", DICTIONARY),
        ("replica", pa.int32()),
        ("started", pa.float64()),
        ("ended", pa.float64()),
    ]
)


def check_group(group: Group) -> None:
    """Raises StreamError where a group holds what no reader would take: a fault of who made it."""
    if not group.rollouts:
        raise StreamError(f"group {group.group} ({group.problem}) has no rollouts")
    numbers = group.rollout_numbers()
    if len(numbers) != len(group.rollouts) or numbers[0] < 0 or any(a >= b for a, b in itertools.pairwise(numbers)):
        raise StreamError(f"group {group.group} ({group.problem}): {len(group.rollouts)} rollouts with numbers {numbers}")
    for number, rollout in zip(numbers, group.rollouts, strict=True):
        if not rollout.turns:
            raise StreamError(f"group {group.group} ({group.problem}), rollout {number} has no turns")
        for turn in rollout.turns:
            end = 0
            for span in turn.versions:
                if span.start != end or span.end < span.start:
                    break
                end = span.end
            if end != len(turn.output_ids) or len(turn.logprobs) != end:
                raise StreamError(
                    f"group {group.group} ({group.problem}), rollout {number}: {len(turn.output_ids)} output tokens, "
                    f"{len(turn.logprobs)} log-probs, versions {[(s.start, s.end) for s in turn.versions]}"
                )


def to_arrow(groups: Sequence[Group], header: Header) -> pa.Buffer:
    """A whole Arrow file of these groups."""
    rollouts = [(g, k, r) for g in groups for k, r in zip(g.rollout_numbers(), g.rollouts, strict=True)]
    turns = [t for _, _, r in rollouts for t in r.turns]
    prompts, outputs, logprobs, versions, reasons, replicas, started, ended = zip(*turns, strict=True)
    per_rollout = np.fromiter((len(r.turns) for _, _, r in rollouts), np.int64, len(rollouts))
    per_group = np.fromiter((sum(len(r.turns) for r in g.rollouts) for g in groups), np.int64, len(groups))
    starts = np.repeat(np.cumsum(per_rollout) - per_rollout, per_rollout)
    turn_numbers = np.arange(len(turns)) - starts

    def of_groups(values: Sequence[int], dtype: type[np.generic]) -> pa.Array:
        return pa.array(np.repeat(np.array(values, dtype), per_group))

    def names_of_groups(values: Sequence[str]) -> pa.DictionaryArray:
        encoded = dictionary_array(values)
        indices = np.repeat(encoded.indices.to_numpy(), per_group)
        return pa.DictionaryArray.from_arrays(pa.array(indices), encoded.dictionary)

    columns = {
        "run_id": pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(turns), np.int32)), pa.array([header.run])),
        "attempt": pa.array(np.full(len(turns), header.attempt, np.int32)),
        "epoch": of_groups([g.epoch for g in groups], np.int32),
        "problem_id": names_of_groups([g.problem for g in groups]),
        "group_id": of_groups([g.group for g in groups], np.int64),
        "rollout": pa.array(np.repeat(np.fromiter((k for _, k, _ in rollouts), np.int32, len(rollouts)), per_rollout)),
        "issue": of_groups([g.issue for g in groups], np.int32),
        "turn": pa.array(turn_numbers.astype(np.int32)),
        "domain": names_of_groups([g.domain for g in groups]),
        "dataset": names_of_groups([g.dataset for g in groups]),
        "prompt_ids": list_array(prompts, np.int32),
        "output_ids": list_array(outputs, np.int32),
        "logprobs": list_array(logprobs, np.float32),
        "versions": _spans(versions),
        "reward": pa.array(np.repeat(np.fromiter((r.reward for _, _, r in rollouts), np.float32, len(rollouts)), per_rollout)),
        "metrics": _metrics([r for _, _, r in rollouts], turn_numbers),
        "finish_reason": dictionary_array(reasons),
        "replica": pa.array(np.array(replicas, np.int32)),
        "started": pa.array(np.array(started, np.float64)),
        "ended": pa.array(np.array(ended, np.float64)),
    }
    schema = SCHEMA.with_metadata(header.metadata())
    return encode_file(schema, [pa.record_batch([columns[name] for name in SCHEMA.names], schema=schema)])


def _spans(versions: Sequence[tuple[VersionSpan, ...]]) -> pa.ListArray:
    spans = list(itertools.chain.from_iterable(versions))
    fields = [
        pa.array(np.fromiter((s.version.lineage for s in spans), np.int32, len(spans))),
        pa.array(np.fromiter((s.version.step for s in spans), np.int64, len(spans))),
        pa.array(np.fromiter((s.start for s in spans), np.int32, len(spans))),
        pa.array(np.fromiter((s.end for s in spans), np.int32, len(spans))),
    ]
    values = pa.StructArray.from_arrays(fields, fields=list(_SPAN))
    return pa.ListArray.from_arrays(pa.array(offsets_of(map(len, versions), len(versions))), values)


def _metrics(rollouts: Sequence[Rollout], turn_numbers: Array) -> pa.MapArray:
    lengths = np.zeros(len(turn_numbers), np.int64)
    lengths[turn_numbers == 0] = [len(r.metrics) for r in rollouts]
    keys = pa.array([k for r in rollouts for k in r.metrics], pa.string())
    items = np.fromiter((v for r in rollouts for v in r.metrics.values()), np.float32, len(keys))
    return pa.MapArray.from_arrays(pa.array(offsets_of(lengths, len(lengths))), keys, pa.array(items))


def from_arrow(batch: pa.RecordBatch, where: object) -> list[Group]:
    """The groups of a batch; token arrays are views. Raises StreamError where the rows do not make up whole groups."""
    column = {name: batch.column(name) for name in SCHEMA.names}
    rows = batch.num_rows
    if rows == 0:
        return []
    if any(has_nulls(column[name]) for name in SCHEMA.names):
        raise StreamError(f"{where}: values are missing")
    group, issue, rollout, turn = (column[n].to_numpy() for n in ("group_id", "issue", "rollout", "turn"))
    new_group = np.concatenate(([True], (np.diff(group) != 0) | (np.diff(issue) != 0)))
    new_rollout = np.concatenate(([True], np.diff(rollout) != 0)) | new_group
    _check_rows(column, new_group, new_rollout, rollout, turn, where)

    turns, metrics = _turns(column), _metrics_of_rows(column["metrics"])
    rollout_starts = np.flatnonzero(new_rollout)
    starts, rewards = rollout_starts.tolist(), column["reward"].to_numpy()[rollout_starts].tolist()
    rollouts = [
        Rollout(tuple(turns[start:end]), reward, metrics[start])
        for start, end, reward in zip(starts, [*starts[1:], rows], rewards, strict=True)
    ]
    group_starts = np.flatnonzero(new_group)
    first_rollouts = (np.cumsum(new_rollout)[group_starts] - 1).tolist()
    numbers = rollout[new_rollout].tolist()
    epochs, ids, issues = (column[name].to_numpy()[group_starts].tolist() for name in ("epoch", "group_id", "issue"))
    domains, datasets, problems = (strings(column[name], group_starts) for name in ("domain", "dataset", "problem_id"))
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


def _check_rows(
    column: dict[str, Any], new_group: Array, new_rollout: Array, rollout: Array, turn: Array, where: object
) -> None:
    falls = (np.diff(rollout, prepend=rollout[0]) < 0) & ~new_group
    again = (np.diff(turn, prepend=-1) != 1) & ~new_rollout
    if falls.any() or (rollout < 0).any():
        raise StreamError(f"{where}: the numbers of rollouts do not rise in their group")
    if again.any() or turn[new_rollout].any():
        raise StreamError(f"{where}: turns are not numbered 0, 1, 2, ... in their rollout")
    outputs = np.diff(column["output_ids"].offsets.to_numpy())
    if not np.array_equal(np.diff(column["logprobs"].offsets.to_numpy()), outputs):
        raise StreamError(f"{where}: there are not as many log-probs as output tokens")
    spans, offsets = column["versions"].values, column["versions"].offsets.to_numpy()
    start, end = spans.field("start").to_numpy(), spans.field("end").to_numpy()
    covered = np.concatenate(([0], np.cumsum(end.astype(np.int64) - start)))
    firsts = np.concatenate(([0], end))[:-1].copy()  # each span begins where the one before ended,
    firsts[offsets[:-1][np.diff(offsets) > 0]] = 0  # the first of a turn at 0
    if not np.array_equal(start, firsts) or (end < start).any() or not np.array_equal(np.diff(covered[offsets]), outputs):
        raise StreamError(f"{where}: the versions do not cover the output tokens")


def _turns(column: dict[str, Any]) -> list[Turn]:
    columns = (
        list_views(column["prompt_ids"]),
        list_views(column["output_ids"]),
        list_views(column["logprobs"]),
        _versions_of_rows(column["versions"]),
        strings(column["finish_reason"]),
        *(column[name].to_numpy().tolist() for name in ("replica", "started", "ended")),
    )
    return list(map(Turn._make, zip(*columns, strict=True)))


def _versions_of_rows(column: pa.ListArray) -> list[tuple[VersionSpan, ...]]:
    lineages, steps, starts, ends = (
        column.values.field(name).to_numpy().tolist() for name in ("lineage", "step", "start", "end")
    )
    pairs = list(zip(lineages, steps, strict=True))
    made = {pair: Version(*pair) for pair in set(pairs)}  # few in a file
    spans = list(map(VersionSpan._make, zip(map(made.__getitem__, pairs), starts, ends, strict=True)))
    return [tuple(spans[start:end]) for start, end in itertools.pairwise(column.offsets.to_numpy().tolist())]


def _metrics_of_rows(column: pa.MapArray) -> list[Mapping[str, float]]:
    keys, items = strings(column.keys.dictionary_encode()), column.items.to_numpy().tolist()
    return [
        dict(zip(keys[start:end], items[start:end], strict=True)) if end > start else NO_METRICS
        for start, end in itertools.pairwise(column.offsets.to_numpy().tolist())
    ]
