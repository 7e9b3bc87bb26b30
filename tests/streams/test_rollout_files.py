"""Rollout files: what goes in comes out, and nothing else is taken for a rollout file."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from prl.flow.versions import Version
from prl.streams.files import StreamError, checksum_of, list_published, next_sequence, read_checked
from prl.streams.options import StreamsOptions
from prl.streams.reader import read_rollouts
from prl.streams.records import Group, Rollout, Turn, VersionSpan
from prl.streams.rollouts import SCHEMA
from prl.streams.writer import RolloutWriter


def make_turn(rng: np.random.Generator, prompt: int, output: int, cuts=(), finish="stop") -> Turn:
    ends = [*cuts, output]
    spans = [VersionSpan(Version(0, 3 + i), a, b) for i, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]
    return Turn(
        rng.integers(0, 1000, prompt).astype(np.int32),
        rng.integers(0, 1000, output).astype(np.int32),
        rng.normal(size=output).astype(np.float32),
        tuple(spans),
        finish,
        2,
        1.5,
        2.5,
    )


def make_group(number: int, rng: np.random.Generator, rollouts=2, turns=1, issue=0) -> Group:
    def rollout(k: int) -> Rollout:
        made = tuple(make_turn(rng, int(rng.integers(0, 5)), 4, cuts=(1,) if k % 2 else ()) for _ in range(turns + k % 2))
        return Rollout(made, float(np.float32(rng.normal())), {"length": float(k), "ü": 0.5} if k else {})

    return Group(1, "digits", "set", f"digits/{number}", number, issue, tuple(rollout(k) for k in range(rollouts)))


def assert_equal(found: list[Group], wanted: list[Group]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        for name in ("epoch", "domain", "dataset", "problem", "group", "issue", "numbers"):
            assert getattr(a, name) == getattr(b, name)
        assert len(a.rollouts) == len(b.rollouts)
        for r, s in zip(a.rollouts, b.rollouts, strict=True):
            assert (r.reward, dict(r.metrics), len(r.turns)) == (s.reward, dict(s.metrics), len(s.turns))
            for t, u in zip(r.turns, s.turns, strict=True):
                for name in ("prompt_ids", "output_ids", "logprobs"):
                    x, y = getattr(t, name), getattr(u, name)
                    assert x.dtype == y.dtype
                    np.testing.assert_array_equal(x, y)
                for name in ("versions", "finish_reason", "replica", "started", "ended"):
                    assert getattr(t, name) == getattr(u, name)


def writer_in(folder: Path, clock=lambda: 0.0, **options) -> RolloutWriter:
    return RolloutWriter(folder, "actor_0", "run", 1, StreamsOptions(**options), clock)


def write(folder: Path, groups: list[Group]):
    writer = writer_in(folder, roll_groups=1000)
    for group in groups:
        assert writer.append(group) == []
    (published,) = writer.flush()
    return published


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=6), st.integers(0, 99))
def test_round_trip(tmp_path_factory, shapes, seed):
    folder = tmp_path_factory.mktemp("rollouts")
    rng = np.random.default_rng(seed)
    groups = [make_group(n, rng, rollouts, turns, issue) for n, (rollouts, turns, issue) in enumerate(shapes)]
    published = write(folder, groups)
    assert published.path.parent == folder / "actor_0"
    assert published.path.stat().st_size == published.bytes
    assert [(g.group, g.issue, g.rollouts) for g in published.groups] == [(g.group, g.issue, len(g.rollouts)) for g in groups]
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
    published = write(tmp_path, [make_group(0, np.random.default_rng(0))])
    turn = read_rollouts(published.path, published.bytes, published.checksum)[0].rollouts[1].turns[0]
    for array in (turn.prompt_ids, turn.output_ids, turn.logprobs):
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_a_plain_arrow_tool_reads_it(tmp_path):
    published = write(tmp_path, [make_group(0, np.random.default_rng(0))])
    table = pa.ipc.open_file(published.path).read_all()
    assert table.column_names == SCHEMA.names
    assert table["problem_id"].to_pylist() == ["digits/0"] * 3
    assert table["run_id"].to_pylist() == ["run"] * 3
    assert table["turn"].to_pylist() == [0, 0, 1]
    assert table.schema.metadata[b"prl.writer"] == b"actor_0"


def test_files_are_rolled_by_groups_bytes_and_age(tmp_path):
    now = [100.0]
    rng = np.random.default_rng(0)
    writer = writer_in(tmp_path, clock=lambda: now[0], roll_groups=3, roll_s=0.5, roll_mib=1)
    assert writer.flush() == []
    assert not writer.due(1e9)
    assert [len(writer.append(make_group(n, rng))) for n in range(3)] == [0, 0, 1]
    assert writer.due_s() is None
    writer.append(make_group(3, rng))
    now[0] += 0.4
    writer.append(make_group(4, rng))
    assert not writer.due()
    assert writer.due(100.5)
    (published,) = writer.flush()
    assert [g.group for g in published.groups] == [3, 4]
    assert published.sequence == 1
    turn = make_turn(rng, 0, 2**17)  # 2**17 tokens and log-probs of 4 bytes: a MiB
    assert len(writer.append(Group(0, "d", "", "d/5", 5, 0, (Rollout((turn,), 0.0),)))) == 1
    assert published.announcement(tmp_path) == {
        "path": f"actor_0/{published.path.name}",
        "bytes": published.bytes,
        "checksum": published.checksum,
        "sequence": 1,
        "groups": [{"group": 3, "issue": 0, "rollouts": 2}, {"group": 4, "issue": 0, "rollouts": 2}],
    }


def test_a_restarted_writer_goes_on_counting(tmp_path):
    rng = np.random.default_rng(0)
    first = write(tmp_path, [make_group(0, rng)])
    second = write(tmp_path, [make_group(1, rng)])
    (tmp_path / "actor_0" / ".tmp-left").write_bytes(b"x")
    (tmp_path / "actor_0" / "notes.txt").write_bytes(b"x")
    assert (first.sequence, second.sequence) == (0, 1)
    assert next_sequence(tmp_path / "actor_0") == 2
    found = [file for _, file in list_published(tmp_path / "actor_0")]
    assert [(f.path, f.bytes, f.checksum) for f in found] == [(f.path, f.bytes, f.checksum) for f in (first, second)]


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


def test_every_flipped_bit_is_refused_by_checksum_or_schema(tmp_path):
    """Also where the checksum was made for the damaged file: Arrow and the schema never crash the reader."""
    groups = [make_group(n, np.random.default_rng(n)) for n in range(2)]
    data = write(tmp_path, groups).path.read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.arrow"
    for at in rng.integers(0, len(data), 300).tolist():
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(StreamError, match="checksum"):
            read_rollouts(path, len(data), checksum_of(data))
        with contextlib.suppress(StreamError):
            read_rollouts(path, len(data), checksum_of(bytes(damaged)))


def foreign(schema: pa.Schema, batch_of: dict) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(batch_of, schema=schema))
    return sink.getvalue().to_pybytes()


def test_foreign_files_are_refused(tmp_path):
    published = write(tmp_path, [make_group(0, np.random.default_rng(0))])
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
    ],
)
def test_rows_that_contradict_each_other_are_refused(tmp_path, column, values, words):
    published = write(tmp_path, [make_group(0, np.random.default_rng(0))])
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


def test_groups_that_no_reader_would_take_are_refused_at_once(tmp_path):
    writer = writer_in(tmp_path)
    turn = make_turn(np.random.default_rng(0), 2, 4)
    short = Turn(turn.prompt_ids, turn.output_ids, turn.logprobs[:3], turn.versions, "stop", 0, 0.0, 0.0)
    gap = Turn(turn.prompt_ids, turn.output_ids, turn.logprobs, (VersionSpan(Version(0, 0), 1, 4),), "stop", 0, 0.0, 0.0)
    for rollouts in ((), (Rollout((), 0.0),), (Rollout((short,), 0.0),), (Rollout((gap,), 0.0),)):
        with pytest.raises(StreamError, match=r"group 7 \(d/1\)"):
            writer.append(Group(0, "d", "", "d/1", 7, 0, rollouts))
    two = (Rollout((turn,), 0.0),) * 2
    for numbers in ((1,), (0, 0), (1, 0), (-1, 0), (0, 1, 2)):
        with pytest.raises(StreamError, match="with numbers"):
            writer.append(Group(0, "d", "", "d/1", 7, 0, two, numbers))


def test_a_name_that_shows_late_is_waited_for(tmp_path):
    published = write(tmp_path, [make_group(0, np.random.default_rng(0))])
    hidden = tmp_path / "elsewhere"
    published.path.rename(hidden)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 20 and hidden.exists():
            hidden.rename(published.path)

    arguments = (published.path, published.bytes, published.checksum)
    with pytest.raises(StreamError, match="not there after waiting 10 s"):
        read_checked(*arguments, wait_s=10, clock=lambda: now[0], sleep=sleep)
    assert read_checked(*arguments, wait_s=60, clock=lambda: now[0], sleep=sleep).size == published.bytes
    assert 20 < now[0] < 21


def test_a_full_disk_leaves_nothing_and_loses_nothing(tmp_path, monkeypatch):
    writer = writer_in(tmp_path)
    writer.append(make_group(0, np.random.default_rng(0)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        with pytest.raises(OSError, match="No space"):
            writer.flush()
    assert list((tmp_path / "actor_0").iterdir()) == []
    (published,) = writer.flush()
    assert published.sequence == 0


def _no_space(descriptor: int) -> None:
    raise OSError(28, "No space left on device")
