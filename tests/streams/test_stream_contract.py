"""What every backend of the rollout stream does alike."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stream_data import assert_equal, make_group, make_turn

from prl.config.load import ConfigError, load
from prl.flow.versions import Version
from prl.runfolder.paths import RunFolder
from prl.streams.contract import announced
from prl.streams.files import StreamError
from prl.streams.memory import MemoryAppender, MemorySource, MemoryStore
from prl.streams.opening import open_reader, open_writer
from prl.streams.options import RedisOptions, StreamsOptions
from prl.streams.reader import RolloutReader
from prl.streams.records import Group, Rollout
from prl.streams.writer import RolloutWriter


class Stream:
    """The rollout stream of one run, on some backend."""

    def __init__(self, backend: str, run: RunFolder) -> None:
        self.backend = backend
        self.run = run
        self.store = MemoryStore()
        self.rng = np.random.default_rng(0)

    def writer(self, name="actor-000", attempt=1, **options) -> RolloutWriter:
        chosen = self._options(**options)
        if self.backend == "memory":
            return RolloutWriter(MemoryAppender(self.store, name), name, "run", attempt, chosen)
        return open_writer(self.run, name, "run", attempt, chosen)

    def reader(self, run_name="run") -> RolloutReader:
        if self.backend == "memory":
            return RolloutReader(MemorySource(self.store), run_name)
        return open_reader(self.run, run_name, 1, self._options())

    def _options(self, **options) -> StreamsOptions:
        backend = {"redis": "redis"}.get(self.backend, "folder")
        return StreamsOptions(backend=backend, redis=RedisOptions(start=True), **options)

    def group(self, number: int, **shape) -> Group:
        return make_group(number, self.rng, **shape)


@pytest.fixture(params=["folder", "memory", pytest.param("redis", marks=pytest.mark.redis)])
def stream(request, tmp_path):
    run = RunFolder(tmp_path / "run")
    if request.param == "redis":
        run = request.getfixturevalue("redis_run")
        return Stream(request.param, run)
    run.create()
    return Stream(request.param, run)


def test_what_is_appended_is_read(stream):
    writer, reader = stream.writer(), stream.reader()
    groups = [stream.group(n, rollouts=1 + n, turns=1 + n % 2) for n in range(4)]
    groups[2] = replace(groups[2], numbers=(0, 3, 4))
    assert [writer.append(group) for group in groups] == [[]] * 4
    (entry,) = writer.flush()
    assert writer.flush() == []
    assert (entry.writer, entry.attempt, entry.sequence) == ("actor-000", 1, 0)
    assert [(g.group, g.issue, g.rollouts) for g in entry.groups] == [(0, 0, 1), (1, 0, 2), (2, 0, 3), (3, 0, 4)]
    assert_equal(reader.read(entry), groups)
    turn = reader.read(entry)[0].rollouts[0].turns[0]
    assert not turn.output_ids.flags.owndata
    assert not turn.output_ids.flags.writeable
    writer.close()
    reader.close()


def test_an_announcement_is_enough_to_read(stream):
    writer = stream.writer()
    writer.append(stream.group(3))
    (entry,) = writer.flush()
    body = entry.announcement()
    assert body == {
        "path": entry.name,
        "bytes": entry.bytes,
        "checksum": entry.checksum,
        "writer": "actor-000",
        "sequence": 0,
        "groups": [{"group": 3, "issue": 0, "rollouts": 2}],
    }
    assert announced(body, 1) == entry
    assert len(stream.reader().read(announced(body, 1))) == 1


def test_entries_are_rolled_by_groups_and_bytes(stream):
    writer = stream.writer(roll_groups=3, roll_mib=1)
    assert [len(writer.append(stream.group(n))) for n in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    big = replace(stream.group(7), rollouts=(Rollout((_long_turn(stream.rng),), 0.0),), numbers=())
    (entry,) = writer.append(big)
    assert [g.group for g in entry.groups] == [6, 7]
    assert entry.sequence == 2


def _long_turn(rng):
    return make_turn(rng, 0, 2**17)  # 2**17 tokens and log-probs of 4 bytes: a MiB


def test_all_entries_are_found_by_looking(stream):
    writer, reader = stream.writer(roll_groups=1), stream.reader()
    assert reader.entries() == []
    first = [entry for n in range(3) for entry in writer.append(stream.group(n))]
    assert reader.entries() == first
    second = writer.append(stream.group(3))
    assert reader.entries() == first + second
    assert [reader.read(entry)[0].group for entry in reader.entries()] == [0, 1, 2, 3]


def test_several_writers_and_several_readers(stream):
    """Each reader sees everything, whatever the other has seen."""
    writers = [stream.writer(f"actor-{n:03d}", roll_groups=1) for n in range(3)]
    readers = [stream.reader() for _ in range(2)]
    written = [entry for number in range(9) for entry in writers[number % 3].append(stream.group(number))]
    for reader in readers:
        found = reader.entries()
        assert sorted(e.name for e in found) == sorted(e.name for e in written)
        assert sorted(reader.read(e)[0].group for e in found) == list(range(9))
        for writer in writers:
            assert [e.sequence for e in found if e.writer == writer.writer] == [0, 1, 2]


def test_what_earlier_attempts_have_left_is_let_go_of(stream):
    for attempt in (1, 2):
        writer = stream.writer(attempt=attempt, roll_groups=1)
        for number in range(2):
            writer.append(stream.group(number))
        writer.close()
    stream.reader().release_before(2)
    left = [0, 1, 2, 3] if stream.backend == "folder" else [2, 3]  # files are reclaimed behind a checkpoint
    assert [e.sequence for e in stream.reader().entries()] == left


def test_a_restarted_writer_goes_on_counting(stream):
    for attempt in (1, 2):
        writer = stream.writer(attempt=attempt, roll_groups=1)
        for number in range(2):
            writer.append(stream.group(number))
        writer.close()
    found = stream.reader().entries()
    assert [(e.attempt, e.sequence) for e in found] == [(1, 0), (1, 1), (2, 2), (2, 3)]


def test_what_was_not_flushed_is_not_there(stream):
    writer = stream.writer()
    writer.append(stream.group(0))
    writer.close()
    assert stream.reader().entries() == []


def test_a_released_number_is_never_used_again(stream):
    writer, reader = stream.writer(roll_groups=1), stream.reader()
    for number in range(3):
        writer.append(stream.group(number))
    writer.close()
    reader.release({"actor-000": 1})
    assert [e.sequence for e in reader.entries()] == ([0, 1, 2] if stream.backend == "folder" else [2])
    reader.release({"actor-000": 2})
    (entry,) = stream.writer(roll_groups=1).append(stream.group(3))
    assert entry.sequence == 3


def test_what_is_held_stays_whatever_comes_behind_it(stream):
    """One group that waits keeps nobody from making room for what was dropped behind it."""
    writer, reader = stream.writer(roll_groups=1), stream.reader()
    entries = [entry for number in range(8) for entry in writer.append(stream.group(number))]
    for last, held in ((4, (1, 3)), (6, (3, 5)), (6, (5,))):
        reader.release({"actor-000": last}, [entries[number] for number in held])
        left = [*held, *range(last + 1, 8)] if stream.backend != "folder" else list(range(8))
        assert [entry.sequence for entry in stream.reader().entries()] == left
    assert reader.read(entries[5])[0].group == 5
    writer.close()
    assert stream.writer(roll_groups=1).append(stream.group(8))[0].sequence == 8


@pytest.mark.parametrize("wrong", ["bytes", "checksum", "sequence", "run"])
def test_what_is_not_what_was_announced_is_set_aside(stream, wrong):
    writer = stream.writer(roll_groups=1)
    entries = [entry for n in range(2) for entry in writer.append(stream.group(n))]
    reader = stream.reader("another run" if wrong == "run" else "run")
    changed = {
        "bytes": {"bytes": entries[0].bytes - 1},
        "checksum": {"checksum": "0000000000000000"},
        "sequence": {"sequence": 7, "writer": "actor-000"},
        "run": {},
    }
    with pytest.raises(StreamError):
        reader.read(replace(entries[0], **changed[wrong]))
    assert reader.unreadable == 1
    left = [e.sequence for e in stream.reader().entries()]
    assert left == ([0, 1] if wrong == "sequence" and stream.backend != "folder" else [1])


def test_what_is_not_there_is_no_entry(stream):
    writer = stream.writer(roll_groups=1)
    (entry,) = writer.append(stream.group(0))
    gone = replace(entry, name=entry.name.replace("actor-000", "actor-009"), writer="actor-009")
    with pytest.raises(StreamError, match="not there"):
        stream.reader().read(gone)


def test_no_run_can_choose_the_memory_of_one_process():
    with pytest.raises(ConfigError, match=r"streams.backend.*memory"):
        load(Path(__file__).parents[2] / "configs/quickstart.yaml", ["streams.backend=memory"])


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a:b", "ü", "x" * 101])
def test_names_of_writers_are_plain(stream, name):
    with pytest.raises(StreamError, match="only letters, digits"):
        stream.writer(name)


def test_a_bad_group_is_refused_at_once(stream):
    writer = stream.writer()
    with pytest.raises(StreamError, match="no rollouts"):
        writer.append(Group(0, "d", "", "d/1", 7, 0, ()))
    assert writer.flush() == []


def test_a_version_that_does_not_exist_yet_makes_an_entry_unreadable(stream):
    """`make_turn` samples with versions 0:3 and 0:4. Those of other lineages are for the flow to judge."""
    writer, reader = stream.writer(roll_groups=1), stream.reader()
    (entry,) = writer.append(stream.group(0))
    for newest in (None, Version(0, 4), Version(1, 0)):
        assert len(reader.read(entry, newest=newest)) == 1
    with pytest.raises(StreamError, match="sampled by a version later than 0:3"):
        reader.read(entry, newest=Version(0, 3))
    assert reader.unreadable == 1
    assert reader.entries() == []
