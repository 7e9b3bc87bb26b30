"""Rollout files: what goes in comes out, and nothing else is taken for a rollout file."""

import os
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from stream_data import assert_equal, make_group
from written_files import ACTOR, write, write_one

from prl.streams.arrays import all_finite
from prl.streams.files import Header, StreamError, checksum_of
from prl.streams.reader import read_rollouts, read_rows
from prl.streams.rollouts import SCHEMA, to_arrow
from prl.streams.rows import rows_of, to_groups


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=6), st.integers(0, 99))
def test_round_trip(tmp_path_factory, shapes, seed):
    folder = tmp_path_factory.mktemp("rollouts")
    rng = np.random.default_rng(seed)
    groups = [make_group(n, rng, rollouts, turns, issue) for n, (rollouts, turns, issue) in enumerate(shapes)]
    published = write(folder, groups)
    assert published.path.parent == folder / ACTOR
    assert published.path.stat().st_size == published.bytes
    assert [(g.group, g.issue, g.rollouts) for g in published.entry.groups] == [
        (g.group, g.issue, len(g.rollouts)) for g in groups
    ]
    assert_equal(read_rollouts(published.path, published.bytes, published.checksum, run="run"), groups)


def test_a_partial_group_keeps_its_numbers(tmp_path):
    rng = np.random.default_rng(0)
    groups = [
        replace(make_group(n, rng, rollouts=3, turns=2), numbers=numbers)
        for n, numbers in enumerate([(0, 2, 5), (), (1, 2, 3)])
    ]
    published = write(tmp_path, groups)
    found = read_rollouts(published.path, published.bytes, published.checksum)
    assert_equal(found, groups)
    assert [[i.rollout for i in g.rollout_ids()] for g in found] == [[0, 2, 5], [0, 1, 2], [1, 2, 3]]


def test_arrays_are_views_of_the_file(tmp_path):
    published = write_one(tmp_path)
    turn = read_rollouts(published.path, published.bytes, published.checksum)[0].rollouts[1].turns[0]
    for array in (turn.prompt_ids, turn.output_ids, turn.logprobs):
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_rows_are_the_groups_laid_flat(tmp_path):
    rng = np.random.default_rng(0)
    groups = [replace(make_group(n, rng, rollouts=3, turns=2, issue=n % 2), numbers=(0, 2, 5)) for n in range(3)]
    published = write(tmp_path, groups)
    (rows,) = read_rows(published.path, published.bytes, published.checksum, run="run")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    for name, offsets in (("prompt_ids", "prompt_offsets"), ("output_ids", "output_offsets"), ("logprobs", "output_offsets")):
        wanted = [getattr(turn, name) for turn in turns]
        found, starts = getattr(rows, name), getattr(rows, offsets)
        assert starts.tolist() == [sum(map(len, wanted[:i])) for i in range(len(wanted) + 1)]
        np.testing.assert_array_equal(found, np.concatenate(wanted))
        assert not found.flags.owndata
        assert not found.flags.writeable
    assert rows.rewards.tolist() == [rollout.reward for rollout in rollouts]
    assert rows.rollout_starts.tolist() == [0, 2, 5, 7, 9, 12, 14, 16, 19]  # turns: 2, 3, 2 in each group
    assert rows.group_starts.tolist() == [0, 7, 14]
    assert rows.issues() == [(0, 0), (1, 1), (2, 0)]
    assert rows.of_groups("problem_id") == ["digits/0", "digits/1", "digits/2"]


def test_tokens_that_lie_somewhere_in_a_longer_column(tmp_path):
    """Which Arrow allows, though prl does not write it."""
    groups = [make_group(n, np.random.default_rng(n)) for n in range(2)]
    published = write(tmp_path, groups)
    batch = pa.ipc.open_file(published.path).get_batch(0)
    tokens = batch.column("output_ids")
    offsets, values = tokens.offsets.to_numpy() + 2, np.concatenate(([-1, -1], tokens.values.to_numpy(), [-1]))
    moved = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(np.int32)))
    changed = batch.set_column(SCHEMA.get_field_index("output_ids"), "output_ids", moved)
    assert_equal(to_groups(rows_of(changed, "a batch")), groups)


def test_a_file_is_byte_for_byte_what_arrow_writes():
    groups = [make_group(n, np.random.default_rng(n)) for n in range(3)]
    encoded = to_arrow(groups, Header("rollouts", "run", 1, "actor_0", 0))
    data = encoded.whole()
    file = pa.ipc.open_file(pa.py_buffer(data))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, file.schema) as writer:
        writer.write_batch(file.get_batch(0))
    assert sink.getvalue().to_pybytes() == data
    assert (encoded.size, encoded.checksum) == (len(data), checksum_of(data))


def test_a_plain_arrow_tool_reads_it(tmp_path):
    published = write_one(tmp_path)
    table = pa.ipc.open_file(published.path).read_all()
    assert table.column_names == SCHEMA.names
    assert table["problem_id"].to_pylist() == ["digits/0"] * 3
    assert table["run_id"].to_pylist() == ["run"] * 3
    assert table["turn"].to_pylist() == [0, 0, 1]
    assert table.schema.metadata[b"prl.writer"] == b"actor_0"


@pytest.mark.parametrize("fault", ["torn", "longer", "flipped", "empty", "missing"])
def test_damaged_files_are_refused(tmp_path, fault):
    published = write(tmp_path, [make_group(n, np.random.default_rng(0)) for n in range(3)])
    data = bytearray(published.path.read_bytes())
    if fault == "missing":
        published.path.unlink()
    else:
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 4
        damaged = {"torn": data[:-100], "longer": data + b"\0", "flipped": flipped, "empty": b""}[fault]
        published.path.write_bytes(damaged)
    words = {
        "torn": "announced were",
        "longer": "announced were",
        "flipped": "checksum",
        "empty": "0 bytes",
        "missing": "not there",
    }
    with pytest.raises(StreamError, match=words[fault]):
        read_rollouts(published.path, published.bytes, published.checksum)


def foreign(schema: pa.Schema, batch_of: dict) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(batch_of, schema=schema))
    return sink.getvalue().to_pybytes()


def test_foreign_files_are_refused(tmp_path):
    published = write_one(tmp_path)
    with pytest.raises(StreamError, match="of run 'run', this is run 'other'"):
        read_rollouts(published.path, published.bytes, published.checksum, run="other")
    good = pa.ipc.open_file(published.path).read_all()
    header = good.schema.metadata
    small = pa.schema([("x", pa.int32())])
    cases = {
        "not a stream file of prl": [b"{}", os.urandom(500), foreign(small, {"x": [1]})],
        "columns are not those": [foreign(small.with_metadata(header), {"x": [1]})],
        "schema version 9": [foreign(small.with_metadata({**header, b"prl.schema_version": b"9"}), {"x": [1]})],
        "holds 'step', wanted 'rollouts'": [foreign(small.with_metadata({**header, b"prl.kind": b"step"}), {"x": [1]})],
    }
    for words, files in cases.items():
        for data in files:
            path = tmp_path / "foreign.arrow"
            path.write_bytes(data)
            with pytest.raises(StreamError, match=words):
                read_rollouts(path, len(data), checksum_of(data))


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("turn", [0, 0, 2], "numbered"),
        ("turn", [1, 0, 1], "numbered"),
        ("rollout", [0, 0, 0], "numbered"),
        ("rollout", [2, 1, 1], "do not rise"),
        ("rollout", [-1, 1, 1], "do not rise"),
        ("logprobs", [[0.0] * 4, [0.0] * 3, [0.0] * 5], "log-probs"),
        ("reward", [None, 1.0, 1.0], "missing"),
        ("versions", [[{"lineage": 0, "step": 0, "start": 0, "end": 3}]] * 3, "do not cover"),
        ("versions", [[{"lineage": 0, "step": 0, "start": 1, "end": 5}]] * 3, "do not cover"),
        ("versions", [[]] * 3, "do not cover"),
        ("versions", [[{"lineage": -1, "step": 0, "start": 0, "end": 4}]] * 3, "below 0"),
        ("versions", [[{"lineage": 0, "step": -1, "start": 0, "end": 4}]] * 3, "below 0"),
        ("epoch", [-1] * 3, "below 0"),
        ("group_id", [-1] * 3, "below 0"),
        ("issue", [-1] * 3, "below 0"),
        ("prompt_ids", [[1], [-1], []], "below 0"),
        ("output_ids", [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, -7]], "below 0"),
        ("reward", [1.0, float("nan"), 0.0], "not finite"),
        ("reward", [1.0, 0.0, float("inf")], "not finite"),
        ("logprobs", [[0.0] * 4, [0.0] * 4, [0.0, float("nan"), 0.0, 0.0]], "not finite"),
        ("logprobs", [[float("-inf")] * 4] * 3, "not finite"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(tmp_path, column, values, words):
    published = write_one(tmp_path)
    table = pa.ipc.open_file(published.path).read_all()
    field = table.schema.field(column)
    table = table.set_column(table.schema.get_field_index(column), field, pa.array(values, field.type))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    path = tmp_path / "contradicting.arrow"
    path.write_bytes(sink.getvalue())
    with pytest.raises(StreamError, match=words):
        read_rollouts(path, sink.getvalue().size, checksum_of(sink.getvalue()))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FA00000, 0x7F800000, 0xFF800000])
def test_whatever_is_not_finite_is_found_without_a_warning(bits):
    """Numbers that are none (quiet and signalling) and both infinities; and values whose squares overflow are finite."""
    values = np.full(64, 3e38, np.float32)
    assert all_finite(values)
    values.view(np.uint32)[40] = bits
    assert not all_finite(values)
