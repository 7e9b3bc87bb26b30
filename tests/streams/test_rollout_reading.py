"""The reader of rollout files and what it finds on the filesystem: names, links, late, unreadable and foreign files."""

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from stream_data import make_group
from written_files import ACTOR, write, write_one, writer_in

from prl.runfolder.paths import RunFolder
from prl.runfolder.reclaim import read_aside
from prl.streams.files import StreamError, checksum_of, list_published, next_sequence, read_checked
from prl.streams.folder import FolderSource
from prl.streams.opening import open_reader
from prl.streams.options import StreamsOptions

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
    entry = write_one(tmp_path).entry
    reader = open_reader(RunFolder(tmp_path), "run", 1, StreamsOptions())
    with pytest.raises(StreamError, match="not the name of a rollout file"):
        reader.read(replace(entry, name=name.replace("FILE", Path(entry.name).name)))
    assert not RunFolder(tmp_path).quarantine.exists()
    assert len(reader.read(entry)) == 1


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(tmp_path, kind):
    entry = write_one(tmp_path).entry
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


def test_what_is_set_aside_stays_in_the_run_whatever_the_announcement_says(tmp_path):
    run = RunFolder(tmp_path / "deep" / "run")
    entry = write_one(run.path).entry
    FolderSource(run).set_aside(replace(entry, writer="../../../../escaped"))
    assert [path.name for path in run.quarantine.glob("*.arrow")] == [f"actor_0_{Path(entry.name).name}"]
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_a_link_among_the_writers_folders_is_not_followed(tmp_path):
    run, elsewhere = RunFolder(tmp_path / "run"), tmp_path / "elsewhere"
    entry = write_one(run.path).entry
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
    entry = write_one(tmp_path).entry
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


def test_a_name_that_shows_late_is_waited_for_and_told_with_its_deadline(tmp_path, caplog):
    published = write_one(tmp_path)
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
