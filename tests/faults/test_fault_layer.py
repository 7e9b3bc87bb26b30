"""The fault layer itself: what it does to whom, and what it leaves alone."""

import errno
import io
import os
import signal
from pathlib import Path

import pytest
from fault_layer import FaultLayer, Operation


def operations(folder: Path, work) -> list[Operation]:
    seen = []
    with FaultLayer(folder, seen.append):
        work()
    return seen


def test_every_operation_in_the_folder_is_asked_for_and_none_elsewhere(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()

    def work(folder: Path = inside):
        (folder / "a").mkdir()
        descriptor = os.open(folder / "a" / "b1", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(descriptor, b"one")
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(folder / "a" / "b1", folder / "a" / "b2")
        with (folder / "c").open("a") as file:
            file.write("two")
        os.listdir(folder / "a")
        (folder / "c").read_text()
        (folder / "c").unlink()

    points = [operation.point for operation in operations(inside, work) if operation.kind != "stat"]
    assert points == [
        "mkdir a",
        "create a/bN",
        "write a/bN",
        "fsync a/bN",
        "rename a/bN -> a/bN",
        "create c",
        "write c",
        "list a",
        "read c",
        "unlink c",
    ]
    assert operations(inside, lambda: work(outside)) == []
    assert os.listdir(inside / "a") == ["b2"]


def test_a_file_in_an_open_folder_is_known_by_its_path(tmp_path):
    def work():
        folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        os.close(os.open("x", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
        os.rename("x", "y", src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
        os.close(folder)

    assert [operation.point for operation in operations(tmp_path, work)] == ["open .", "create x", "rename x -> y", "fsync ."]


def test_a_point_names_the_module_and_nothing_that_changes_from_run_to_run(tmp_path):
    from prl.runfolder.publish import publish

    points = [operation.point for operation in operations(tmp_path, lambda: publish(tmp_path / "step_12.json", b"x"))]
    assert points[0] == "create .tmp (prl.runfolder.publish)"
    assert "rename .tmp -> step_N.json (prl.runfolder.publish)" in points


@pytest.mark.parametrize("fault", ["ENOSPC", "EDQUOT", "ESTALE", "EIO"])
def test_a_failing_write_has_done_half(tmp_path, fault):
    with FaultLayer(tmp_path, lambda operation: fault if operation.kind == "write" else None):
        descriptor = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError) as raised:
            os.write(descriptor, b"12345678")
        os.close(descriptor)
    assert raised.value.errno == getattr(errno, fault)
    assert raised.value.filename is None  # a descriptor has no name
    assert (tmp_path / "a").read_bytes() == b"1234"


def test_short_writes_lose_nothing_of_a_buffered_file(tmp_path):
    with FaultLayer(tmp_path, lambda operation: "short" if operation.kind == "write" else None):
        (tmp_path / "a").write_bytes(b"12345678" * 1000)
    assert (tmp_path / "a").read_bytes() == b"12345678" * 1000


def test_a_late_name_is_neither_listed_nor_found(tmp_path):
    (tmp_path / "new").touch()
    (tmp_path / "old").touch()
    with FaultLayer(tmp_path, lambda operation: "late" if operation.path == "new" else None):
        assert os.listdir(tmp_path) == ["old"]
        assert [path.name for path in tmp_path.iterdir()] == ["old"]
        with os.scandir(tmp_path) as entries:
            assert [entry.name for entry in entries] == ["old"]
        assert not (tmp_path / "new").exists()
        with pytest.raises(FileNotFoundError):
            (tmp_path / "new").open()
    assert (tmp_path / "new").exists()


def test_a_kill_tears_the_write_and_ends_the_process(tmp_path):
    process = os.fork()
    if process == 0:
        with FaultLayer(tmp_path, lambda operation: "kill" if operation.kind == "write" else None):
            (tmp_path / "a").write_bytes(b"12345678")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"1234"


def test_everything_is_as_before_afterwards(tmp_path):
    before = (os.open, os.write, os.rename, os.stat, os.scandir, io.open, open)
    with FaultLayer(tmp_path, lambda _: None):
        assert os.open is not before[0]
    assert (os.open, os.write, os.rename, os.stat, os.scandir, io.open, open) == before
