"""The writer of rollout files: what it refuses, what it asks of the filesystem, and filesystems that fail."""

import errno
import os
import stat

import numpy as np
import pytest
from stream_data import make_group, make_turn
from written_files import ACTOR, write, writer_in

from prl.flow.versions import Version
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import StorageFull
from prl.streams.files import StreamError, list_published, next_sequence
from prl.streams.opening import open_reader, open_writer
from prl.streams.options import StreamsOptions
from prl.streams.records import Group, Rollout, Turn, VersionSpan


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


class Calls:
    """Counts what a folder's metadata server is asked."""

    def __init__(self, monkeypatch, folder) -> None:
        self.made: list[str] = []
        self._folder = str(folder)
        for name in ("open", "rename", "fsync", "mkdir", "stat", "lstat", "unlink", "listdir", "scandir", "link"):
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name, call):
        def counted(at, *arguments, **named):
            folder = name == "fsync" and stat.S_ISDIR(os.fstat(at).st_mode)  # a file's is about data
            if folder or str(at).startswith(self._folder):
                self.made.append(name)
            return call(at, *arguments, **named)

        return counted

    def take(self) -> list[str]:
        made, self.made = self.made, []
        return made


@pytest.mark.parametrize("writers", [1, 16])
def test_metadata_operations(tmp_path, monkeypatch, writers):
    """Of each file written, of each announced one read, of each poll for a name that shows late, and of the listing at a
    resume."""
    rng, run, rename = np.random.default_rng(0), RunFolder(tmp_path), os.rename
    opened = [open_writer(run, f"actor_{number:02d}", "run", 1, StreamsOptions()) for number in range(writers)]
    reader = open_reader(run, "run", 1, StreamsOptions())
    calls = Calls(monkeypatch, tmp_path)
    published = []
    for number in range(2 * writers):
        writer = opened[number // 2]
        writer.append(make_group(number, rng))
        published += writer.flush()
        assert calls.take() == ["open", "rename", "fsync"]
    for number, entry in enumerate(published):
        reader.read(entry)
        assert calls.take() == [*(["lstat"] if number % 2 == 0 else []), "open"]  # a writer's folder is looked at once
    late, hidden = tmp_path / published[-1].name, tmp_path / "late"
    rename(late, hidden)
    listdir = os.listdir

    def listdir_until_it_shows(folder):
        if calls.made.count("listdir") == 2:
            rename(hidden, late)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", listdir_until_it_shows)
    reader.read(published[-1], wait_s=60.0)
    assert calls.take() == ["open", *["listdir", "open"] * 3]
    monkeypatch.setattr(os, "listdir", listdir)
    assert reader.entries() == published
    assert calls.take() == ["scandir", *["listdir"] * writers]


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
