"""Publishing: whole, durable and in the right order, or not there."""

import errno
import os

import pytest

from prl.runfolder.publish import StorageFull, open_folder, publish, publish_json, storage


@pytest.fixture
def order(monkeypatch):
    """What is asked of the filesystem, in order."""
    made = []

    def noting(name):
        call = getattr(os, name)

        def noted(*arguments, **named):
            made.append(name)
            return call(*arguments, **named)

        monkeypatch.setattr(os, name, noted)

    for name in ("open", "writev", "fsync", "close", "rename"):
        noting(name)
    return made


def test_data_are_durable_before_their_name_and_that_before_the_return(tmp_path, order):
    publish(tmp_path / "x", b"abc")
    assert order == ["open", "writev", "fsync", "close", "rename", "open", "fsync", "close"]
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_an_open_folder_is_not_opened_again(tmp_path, order):
    folder = open_folder(tmp_path)
    order.clear()
    for _ in range(2):
        publish(tmp_path / "x", memoryview(b"abc"), folder)
    assert order == ["open", "writev", "fsync", "close", "rename", "fsync"] * 2
    os.close(folder)


@pytest.mark.parametrize("taken", [1, 3, 100])
def test_all_is_written_where_the_system_takes_little_at_a_time(tmp_path, monkeypatch, taken):
    monkeypatch.setattr(os, "writev", lambda descriptor, pieces: os.write(descriptor, b"".join(pieces)[:taken]))
    publish(tmp_path / "x", bytes(range(10)))
    assert (tmp_path / "x").read_bytes() == bytes(range(10))
    publish(tmp_path / "x", [b"", b"ab", memoryview(b"cdefg"), b"", b"h"])
    assert (tmp_path / "x").read_bytes() == b"abcdefgh"


@pytest.mark.parametrize("taken", [1_000_003, 2**30])
def test_large_data_are_handed_over_in_parts(tmp_path, monkeypatch, taken):
    """So that the disk is at work meanwhile; whole, in whatever parts the system takes them."""
    sizes = []

    def takes(descriptor, pieces):
        sizes.append(sum(map(len, pieces)))
        return os.write(descriptor, b"".join(pieces)[:taken])

    monkeypatch.setattr(os, "writev", takes)
    large = [os.urandom(size) for size in (7, 3 * 2**20, 2**21, 1, 5 * 2**20 + 1)]
    publish(tmp_path / "x", large)
    assert (tmp_path / "x").read_bytes() == b"".join(large)
    assert max(sizes) <= 2**21


def test_more_pieces_than_the_system_takes_at_once(tmp_path):
    pieces = [bytes([number % 256]) for number in range(3000)]
    publish(tmp_path / "x", pieces)
    assert (tmp_path / "x").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("call", ["open", "writev", "fsync", "close", "rename"])
def test_whatever_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    publish_json(tmp_path / "x", {"a": 1})

    def failing(*arguments, **named):
        if call == "close":
            close(*arguments)
        raise OSError(errno.EIO, "a bad disk")

    close = os.close
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(OSError, match="a bad disk") as caught:
            publish(tmp_path / "x", b"new")
    assert not isinstance(caught.value, StorageFull)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == '{\n "a": 1\n}\n'


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "no space is left"), (errno.EDQUOT, "the quota is used up")])
def test_full_storage_says_where_what_and_what_to_do(tmp_path, code, words):
    with (
        pytest.raises(StorageFull, match=rf"{words}.*safe.*lfs quota.*prl-submit --resume.*'{tmp_path}/x'") as caught,
        storage(tmp_path),
        storage(tmp_path / "x"),  # the inner one knows better where
    ):
        raise OSError(code, os.strerror(code))
    assert caught.value.errno == code
    with pytest.raises(PermissionError), storage(tmp_path):
        raise PermissionError(errno.EACCES, "not yours")
