"""Rollout files: what goes in comes out, and nothing else is taken for a rollout file."""

import errno
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from stream_data import assert_equal, make_group, make_turn

from prl.flow.versions import Version
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import StorageFull
from prl.runfolder.reclaim import read_aside
from prl.streams.contract import Published
from prl.streams.files import Header, StreamError, checksum_of, list_published, next_sequence, read_checked
from prl.streams.folder import FolderSource
from prl.streams.opening import open_reader, open_writer
from prl.streams.options import StreamsOptions
from prl.streams.reader import read_rollouts, read_rows
from prl.streams.records import Group, Rollout, Turn, VersionSpan
from prl.streams.rollouts import SCHEMA, to_arrow
from prl.streams.rows import rows_of, to_groups
from prl.streams.writer import RolloutWriter

ACTOR = "streams/rollouts/actor_0"


def writer_in(folder: Path, **options) -> RolloutWriter:
    return open_writer(RunFolder(folder), "actor_0", "run", 1, StreamsOptions(**options))


@dataclass
class Written:
    """What a writer published, as a file."""

    entry: Published
    path: Path
    bytes: int
    checksum: str


def write(folder: Path, groups: list[Group]) -> Written:
    writer = writer_in(folder, roll_groups=1000)
    for group in groups:
        assert writer.append(group) == []
    (entry,) = writer.flush()
    writer.close()
    return Written(entry, folder / entry.name, entry.bytes, entry.checksum)


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
    published = write(tmp_path, [make_group(0, np.random.default_rng(0))])
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
    published = write(tmp_path, [make_group(0, np.random.default_rng(0))])
    table = pa.ipc.open_file(published.path).read_all()
    assert table.column_names == SCHEMA.names
    assert table["problem_id"].to_pylist() == ["digits/0"] * 3
    assert table["run_id"].to_pylist() == ["run"] * 3
    assert table["turn"].to_pylist() == [0, 0, 1]
    assert table.schema.metadata[b"prl.writer"] == b"actor_0"


def test_a_restarted_writer_goes_on_counting(tmp_path):
    rng = np.random.default_rng(0)
    first = write(tmp_path, [make_group(0, rng)])
    second = write(tmp_path, [make_group(1, rng)])
    (tmp_path / ACTOR / ".tmp-left").write_bytes(b"x")
    (tmp_path / ACTOR / "notes.txt").write_bytes(b"x")
    assert (first.entry.sequence, second.entry.sequence) == (0, 1)
    assert next_sequence(tmp_path / ACTOR) == 2
    found = [file for _, file in list_published(tmp_path / ACTOR)]
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
    twice = turn._replace(versions=(*turn.versions, VersionSpan(Version(0, 9), 1, 4)))
    for rollouts in ((), *((Rollout(turns, 0.0),) for turns in ((), (short,), (gap,), (twice,)))):
        with pytest.raises(StreamError, match=r"group 7 \(d/1\)"):
            writer.append(Group(0, "d", "", "d/1", 7, 0, rollouts))
    broken = turn._replace(logprobs=np.array([0, 0, np.nan, 0], np.float32))
    for rollout in (Rollout((turn,), float("inf")), Rollout((turn, broken), 0.0)):
        with pytest.raises(StreamError, match=r"group 7 \(d/1\), rollout 0: .* not finite"):
            writer.append(Group(0, "d", "", "d/1", 7, 0, (rollout,)))
    two = (Rollout((turn,), 0.0),) * 2
    for numbers in ((1,), (0, 0), (1, 0), (-1, 0), (0, 1, 2)):
        with pytest.raises(StreamError, match="with numbers"):
            writer.append(Group(0, "d", "", "d/1", 7, 0, two, numbers))


def test_a_name_that_shows_late_is_waited_for_and_told_with_its_deadline(tmp_path, caplog):
    published = write(tmp_path, [make_group(0, np.random.default_rng(0))])
    hidden = tmp_path / "elsewhere"
    published.path.rename(hidden)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 20 and hidden.exists():
            hidden.rename(published.path)

    arguments = (published.path, published.bytes, published.checksum)
    words = rf"{published.path}: not there after waiting 10.\d s for it, the deadline is 10 s"
    with pytest.raises(StreamError, match=words):
        read_checked(*arguments, wait_s=10, clock=lambda: now[0], sleep=sleep)
    caplog.clear()
    assert read_checked(*arguments, wait_s=60, clock=lambda: now[0], sleep=sleep).size == published.bytes
    assert 20 < now[0] < 21
    late, there = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"{published.path}: announced, and not there after 1\.\d s; waited for up to 60 s", late)
    assert re.fullmatch(rf"{published.path}: there after (9|10)\.\d s", there)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "writev", "fsync", "rename"])
def test_a_full_disk_leaves_nothing_and_loses_nothing(tmp_path, monkeypatch, code, call):
    writer = writer_in(tmp_path)
    writer.append(make_group(0, np.random.default_rng(0)))

    def full(*arguments):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StorageFull, match=f"{os.strerror(code)}.*prl-submit --resume.*{ACTOR}") as caught:
            writer.flush()
    assert caught.value.errno == code
    assert list((tmp_path / ACTOR).iterdir()) == []
    (published,) = writer.flush()
    assert published.sequence == 0


def test_a_failed_flush_is_repeated_as_it_was(tmp_path, monkeypatch):
    """Whatever came in meanwhile: the file may be there already, and must not be there twice."""
    rng = np.random.default_rng(0)
    writer = writer_in(tmp_path)
    writer.append(make_group(0, rng))
    rename = os.rename

    def renames_and_fails(*arguments):
        rename(*arguments)
        raise OSError(errno.EIO, "the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", renames_and_fails)
        with pytest.raises(OSError, match="the answer was lost"):
            writer.flush()
    writer.append(make_group(1, rng))
    published = writer.flush()
    assert [(p.sequence, p.groups[0].group) for p in published] == [(0, 0), (1, 1)]
    found = open_reader(RunFolder(tmp_path), "run", 1, StreamsOptions()).entries()
    assert found == published


def test_a_stale_folder_is_opened_again(tmp_path, monkeypatch):
    writer = writer_in(tmp_path)
    writer.append(make_group(0, np.random.default_rng(0)))
    fsync, failures = os.fsync, [errno.ESTALE]

    def stale_once(descriptor):
        if failures and os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(failures.pop(), "stale")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", stale_once)
    (published,) = writer.flush()
    assert not failures
    assert [f.path for _, f in list_published(tmp_path / ACTOR)] == [tmp_path / published.name]


def test_a_stale_folder_that_cannot_be_opened_again_stays_open(tmp_path, monkeypatch):
    """Else the next file's folder would be a closed descriptor, or somebody else's."""
    writer = writer_in(tmp_path)
    writer.append(make_group(0, np.random.default_rng(0)))
    fsync, opens = os.fsync, os.open

    def stale(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ESTALE, "stale")
        fsync(descriptor)

    def stale_folder(path, flags, *arguments, **named):
        if flags & os.O_DIRECTORY:
            raise OSError(errno.ESTALE, "stale")
        return opens(path, flags, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stale)
        patch.setattr(os, "open", stale_folder)
        with pytest.raises(OSError, match="stale"):
            writer.flush()
    (published,) = writer.flush()
    writer.close()
    assert [f.path for _, f in list_published(tmp_path / ACTOR)] == [tmp_path / published.name]


NAMES = [
    "/etc/passwd",
    "../run/streams/rollouts/actor_0/FILE",
    "streams/rollouts/../rollouts/actor_0/FILE",
    "streams/rollouts/actor_0/../actor_0/FILE",
    "streams/rollouts/../../FILE",
    "streams/steps/actor_0/FILE",
    "streams/rollouts/FILE",
    "streams/rollouts/actor_0/x/FILE",
    "streams/rollouts/actor_0/notes.txt",
    "streams/rollouts/actor_0/.FILE",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_leads_nowhere_else(tmp_path, name):
    entry = write(tmp_path, [make_group(0, np.random.default_rng(0))]).entry
    reader = open_reader(RunFolder(tmp_path), "run", 1, StreamsOptions())
    with pytest.raises(StreamError, match="not the name of a rollout file"):
        reader.read(replace(entry, name=name.replace("FILE", Path(entry.name).name)))
    assert not RunFolder(tmp_path).quarantine.exists()
    assert len(reader.read(entry)) == 1


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(tmp_path, kind):
    entry = write(tmp_path, [make_group(0, np.random.default_rng(0))]).entry
    path = tmp_path / entry.name
    elsewhere = path.rename(tmp_path / "elsewhere")
    {"link": lambda: path.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    reader = open_reader(RunFolder(tmp_path), "run", 1, StreamsOptions())
    with pytest.raises(StreamError, match=r"is a link|is no regular file"):
        reader.read(entry)


def test_unreadable_files_are_set_aside_and_counted(tmp_path):
    rng = np.random.default_rng(0)
    run = RunFolder(tmp_path)
    entries = [write(tmp_path, [make_group(n, rng)]).entry for n in range(4)]
    torn, swapped = tmp_path / entries[0].name, tmp_path / entries[1].name
    torn.write_bytes(torn.read_bytes()[:100])
    swapped.write_bytes((tmp_path / entries[2].name).read_bytes())
    (tmp_path / entries[3].name).unlink()
    reader = open_reader(run, "run", 1, StreamsOptions())
    renamed = replace(entries[2], name=entries[2].name.replace("_00000002_", "_00000009_"), sequence=9)
    (tmp_path / renamed.name).write_bytes((tmp_path / entries[2].name).read_bytes())
    for entry in (entries[0], entries[1], renamed, entries[3]):
        with pytest.raises(StreamError):
            reader.read(entry)
    assert reader.unreadable == 4
    kept = {f"actor_0_{Path(e.name).name}" for e in (entries[0], entries[1], renamed)}
    assert {path.name for path in run.quarantine.glob("*.arrow")} == kept
    assert sorted(read_aside(run)) == [(0, 0), (1, 0), (2, 0)]  # as they were announced
    assert reader.entries() == [entries[2]]


class Calls:
    """Counts what a filesystem's metadata server is asked."""

    def __init__(self, monkeypatch) -> None:
        self.made: list[str] = []
        for name in ("open", "rename", "fsync", "mkdir", "stat", "lstat", "unlink", "listdir", "scandir", "link"):
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name, call):
        def counted(*arguments, **named):
            data = name == "fsync" and not os.path.isdir(f"/proc/self/fd/{arguments[0]}")  # data, not metadata
            if not data:
                self.made.append(name)
            return call(*arguments, **named)

        return counted

    def take(self) -> list[str]:
        made, self.made = self.made, []
        return [name for name in made if name != "stat"]  # os.path.isdir above asks that, of /proc


@pytest.mark.parametrize("writers", [1, 4])
def test_metadata_operations(tmp_path, monkeypatch, writers):
    """Of each file, and of a listing: one for the writers, and one for the files of each, however many those are."""
    rng, run = np.random.default_rng(0), RunFolder(tmp_path)
    opened = [open_writer(run, f"actor_{number}", "run", 1, StreamsOptions()) for number in range(writers)]
    reader = open_reader(run, "run", 1, StreamsOptions())
    calls = Calls(monkeypatch)
    published = []
    for number in range(3 * writers):
        writer = opened[number // 3]
        writer.append(make_group(number, rng))
        published += writer.flush()
        assert calls.take() == ["open", "rename", "fsync"]
    for number, entry in enumerate(published):
        reader.read(entry)
        assert calls.take() == [*(["lstat"] if number % 3 == 0 else []), "open"]  # a writer's folder is looked at once
    assert reader.entries() == published
    assert calls.take() == ["scandir", *["listdir"] * writers]


def test_what_is_set_aside_stays_in_the_run_whatever_the_announcement_says(tmp_path):
    run = RunFolder(tmp_path / "deep" / "run")
    entry = write(run.path, [make_group(0, np.random.default_rng(0))]).entry
    FolderSource(run).set_aside(replace(entry, writer="../../../../escaped"))
    assert [path.name for path in run.quarantine.glob("*.arrow")] == [f"actor_0_{Path(entry.name).name}"]
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_a_link_among_the_writers_folders_is_not_followed(tmp_path):
    run, elsewhere = RunFolder(tmp_path / "run"), tmp_path / "elsewhere"
    entry = write(run.path, [make_group(0, np.random.default_rng(0))]).entry
    file = Path(entry.name).name
    (run.path / ACTOR).rename(elsewhere)
    (run.path / ACTOR).symlink_to(elsewhere)
    (run.rollouts / "loop").symlink_to("loop")
    reader = open_reader(run, "run", 1, StreamsOptions())
    assert reader.entries() == []
    with pytest.raises(StreamError, match="a link, not a folder"):
        reader.read(entry)
    assert [path.name for path in elsewhere.iterdir()] == [file]
    with pytest.raises(StreamError, match="a link, not a folder"):
        writer_in(run.path)


@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN])
def test_a_file_that_the_disk_does_not_give_is_set_aside(tmp_path, monkeypatch, code):
    entry = write(tmp_path, [make_group(0, np.random.default_rng(0))]).entry
    reader = open_reader(RunFolder(tmp_path), "run", 1, StreamsOptions())

    def fails(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(StreamError, match=f"cannot be read .{os.strerror(code)}"):
        reader.read(entry)
    assert reader.unreadable == 1
    assert len(list(RunFolder(tmp_path).quarantine.glob("*.arrow"))) == 1


def test_a_long_sparse_file_takes_no_memory(tmp_path, monkeypatch):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2**20 + 1)
    monkeypatch.setattr("prl.config.plain_files.MOST_BYTES", 2**20)
    before = pa.total_allocated_bytes()
    with pytest.raises(StreamError, match="1048577 bytes; the most that is read of one file here is 1048576"):
        read_checked(path, 2**20 + 1, "0" * 16)
    assert pa.total_allocated_bytes() == before
    os.truncate(path, 2**20)
    assert read_checked(path, 2**20, checksum_of(bytes(2**20))).size == 2**20


def test_numbers_in_names_are_bounded(tmp_path):
    """And are what prl writes: no other digits, no other stems."""
    kept = f"rollouts_a001_{10**14}_5_{'0' * 16}.arrow"
    names = [
        kept,
        f"rollouts_a001_{10**20}_5_{'0' * 16}.arrow",
        f"rollouts_a001_00000001_{10**20}_{'0' * 16}.arrow",
        f"rollouts_a{10**10}_00000001_5_{'0' * 16}.arrow",
        f"rollouts_a001_\u0661_5_{'0' * 16}.arrow",
        f"step_{10**20}_a001_00000001_5_{'0' * 16}.arrow",
        f"step_\u00b2_a001_00000001_5_{'0' * 16}.arrow",
        f".rollouts_a001_00000001_5_{'0' * 16}.arrow",
    ]
    for name in names:
        (tmp_path / name).touch()
    assert [file.path.name for _, file in list_published(tmp_path)] == [kept]
    assert next_sequence(tmp_path) == 10**14 + 1
    (tmp_path / f"rollouts_a001_{10**15 - 1}_5_{'0' * 16}.arrow").touch()
    with pytest.raises(StreamError, match="has the number 999999999999999, which nothing can follow"):
        next_sequence(tmp_path)
