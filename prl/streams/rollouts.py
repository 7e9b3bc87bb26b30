"""The table of rollouts: one row a turn, one record batch a file. How it is read: `rows.py`."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from prl.streams.arrays import DICTIONARY, Array, all_finite, dictionary_array, list_array, offsets_of
from prl.streams.files import Encoded, Header, StreamError, encode_file
from prl.streams.records import Group, Rollout, VersionSpan
from prl.streams.routings import ROUTINGS, SHAPE, shape_of, to_column

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
        wrong = _wrong(rollout)
        if wrong:
            raise StreamError(f"group {group.group} ({group.problem}), rollout {number}: {wrong}")
    logprobs = [turn.logprobs for rollout in group.rollouts for turn in rollout.turns]
    if not all_finite(np.concatenate(logprobs)):  # together, which costs less than each
        bad = [n for n, r in zip(numbers, group.rollouts, strict=True) if not all(all_finite(t.logprobs) for t in r.turns)]
        raise StreamError(f"group {group.group} ({group.problem}), rollout {bad[0]}: a log-prob is not finite")


def _wrong(rollout: Rollout) -> str:
    """What no reader would take, but for log-probs that are not finite; empty: nothing."""
    if not rollout.turns:
        return "no turns"
    if not math.isfinite(rollout.reward):
        return f"its reward ({rollout.reward}) is not finite"
    for prompt_ids, output_ids, logprobs, versions, _, _, _, _, routings in rollout.turns:
        tokens = len(output_ids)
        if len(logprobs) != tokens or not _cover(versions, tokens):
            spans = [(span.start, span.end) for span in versions]
            return f"{tokens} output tokens, {len(logprobs)} log-probs, versions {spans}"
        if routings is not None and len(routings) != len(prompt_ids) + tokens - 1:
            return f"routings of {len(routings)} tokens for {len(prompt_ids)} + {tokens}, the last of which has none"
    return ""


def _cover(spans: Sequence[VersionSpan], tokens: int) -> bool:
    """Whether each span begins where the one before ended, the first at 0, and the last ends with the tokens."""
    at = 0
    for _, start, end in spans:
        if start != at or end < start:
            return False
        at = end
    return at == tokens


def to_arrow(groups: Sequence[Group], header: Header) -> Encoded:
    """A whole Arrow file of these groups."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    prompts, outputs, logprobs, versions, reasons, replicas, started, ended, routings = zip(*turns, strict=True)
    outputs_at = offsets_of(list(map(len, outputs)))
    turns_at = offsets_of([len(rollout.turns) for rollout in rollouts])  # of each rollout
    per_rollout = np.diff(turns_at)
    per_group = np.diff(turns_at[offsets_of([len(group.rollouts) for group in groups])])

    def of_rollouts(values: Sequence[float], dtype: type[np.generic]) -> pa.Array:
        return pa.array(np.repeat(np.array(values, dtype), per_rollout))

    def of_groups(values: Sequence[int], dtype: type[np.generic]) -> pa.Array:
        return pa.array(np.repeat(np.array(values, dtype), per_group))

    def names_of_groups(values: Sequence[str]) -> pa.DictionaryArray:
        encoded = dictionary_array(values)
        indices = np.repeat(encoded.indices.to_numpy(), per_group)
        return pa.DictionaryArray.from_arrays(pa.array(indices), encoded.dictionary)

    columns = {
        "run_id": names_of_groups([header.run] * len(groups)),
        "attempt": of_groups([header.attempt] * len(groups), np.int32),
        "epoch": of_groups([g.epoch for g in groups], np.int32),
        "problem_id": names_of_groups([g.problem for g in groups]),
        "group_id": of_groups([g.group for g in groups], np.int64),
        "rollout": of_rollouts([number for g in groups for number in g.rollout_numbers()], np.int32),
        "issue": of_groups([g.issue for g in groups], np.int32),
        "turn": pa.array(np.arange(len(turns), dtype=np.int32) - np.repeat(turns_at[:-1], per_rollout)),
        "domain": names_of_groups([g.domain for g in groups]),
        "dataset": names_of_groups([g.dataset for g in groups]),
        "prompt_ids": list_array(prompts, np.int32),
        "output_ids": list_array(outputs, np.int32, outputs_at),
        "logprobs": list_array(logprobs, np.float32, outputs_at),
        "versions": _spans(versions),
        "reward": of_rollouts([rollout.reward for rollout in rollouts], np.float32),
        "metrics": _metrics([rollout.metrics for rollout in rollouts], turns_at),
        "finish_reason": dictionary_array(reasons),
        "replica": pa.array(np.array(replicas, np.int32)),
        "started": pa.array(np.array(started, np.float64)),
        "ended": pa.array(np.array(ended, np.float64)),
    }
    schema, metadata = SCHEMA, header.metadata()
    routed = shape_of(routings)
    if routed:
        columns[ROUTINGS.name] = to_column(routings)
        schema, metadata = SCHEMA.append(ROUTINGS), header.metadata({SHAPE: json.dumps(routed)})
    schema = schema.with_metadata(metadata)
    return encode_file(schema, [pa.record_batch([columns[name] for name in schema.names], schema=schema)])


def _spans(versions: Sequence[tuple[VersionSpan, ...]]) -> pa.ListArray:
    spans = list(itertools.chain.from_iterable(versions))
    sampled_by, starts, ends = zip(*spans, strict=True) if spans else ((), (), ())
    fields = [
        pa.array(np.array([version.lineage for version in sampled_by], np.int32)),
        pa.array(np.array([version.step for version in sampled_by], np.int64)),
        pa.array(np.array(starts, np.int32)),
        pa.array(np.array(ends, np.int32)),
    ]
    values = pa.StructArray.from_arrays(fields, fields=list(_SPAN))
    return pa.ListArray.from_arrays(pa.array(offsets_of(list(map(len, versions)))), values)


def _metrics(metrics: Sequence[Mapping[str, float]], turns_at: Array) -> pa.MapArray:
    """Of each rollout, in the row of its first turn."""
    lengths = np.zeros(turns_at[-1], np.int64)
    lengths[turns_at[:-1]] = list(map(len, metrics))
    named = list(filter(None, metrics))
    keys = pa.array([key for each in named for key in each], pa.string())
    items = np.array([value for each in named for value in each.values()], np.float32)
    return pa.MapArray.from_arrays(pa.array(offsets_of(lengths)), keys, pa.array(items))
