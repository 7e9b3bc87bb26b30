import json
import math
import os
import subprocess
import sys
import threading

import pytest

from prl.metrics.events import EventFollower, MetricsWriter, read_events


def test_a_written_event_comes_back(tmp_path):
    with MetricsWriter(tmp_path, "trainer", 0, 2, clock=lambda: 12.5) as writer:
        writer.write({"train/loss": 0.25, "train/lag_max": 3}, step=7, kind="step", labels={"name": "late"})
    (event,), offset = read_events(tmp_path / "trainer-0.jsonl")
    assert (event.time, event.role, event.index, event.attempt) == (12.5, "trainer", 0, 2)
    assert (event.kind, event.step) == ("step", 7)
    assert event.values == {"train/loss": 0.25, "train/lag_max": 3.0}
    assert event.labels == {"name": "late"}
    assert offset == os.path.getsize(tmp_path / "trainer-0.jsonl")


def test_the_line_is_plain_json_with_the_agreed_keys(tmp_path):
    with MetricsWriter(tmp_path, "actor", 3, 1, clock=lambda: 1.0) as writer:
        writer.write({"actor/rollouts": 5})
    line = json.loads((tmp_path / "actor-3.jsonl").read_text())
    assert line == {
        "time": 1.0,
        "role": "actor",
        "index": 3,
        "attempt": 1,
        "kind": "scalars",
        "step": None,
        "values": {"actor/rollouts": 5.0},
    }


def test_values_that_are_not_finite_are_null_on_disk_and_nan_when_read(tmp_path):
    with MetricsWriter(tmp_path, "trainer", 0, 1) as writer:
        writer.write({"a": math.inf, "b": math.nan, "c": 1})
    assert json.loads((tmp_path / "trainer-0.jsonl").read_text())["values"] == {"a": None, "b": None, "c": 1.0}
    (event,), _ = read_events(tmp_path / "trainer-0.jsonl")
    assert math.isnan(event.values["a"])
    assert math.isnan(event.values["b"])


def test_a_torn_last_line_waits_for_the_next_read(tmp_path):
    with MetricsWriter(tmp_path, "trainer", 0, 1) as writer:
        for step in (1, 2):
            writer.write({"x": step}, step=step)
    path = tmp_path / "trainer-0.jsonl"
    whole = path.read_bytes()
    first_line_end = whole.index(b"\n") + 1
    path.write_bytes(whole[: first_line_end + 20])
    events, offset = read_events(path)
    assert [event.step for event in events] == [1]
    assert offset == first_line_end
    path.write_bytes(whole)
    events, offset = read_events(path, offset)
    assert [event.step for event in events] == [2]
    assert read_events(path, offset) == ([], offset)


def test_zeros_at_the_end_are_data_that_are_not_there_yet(tmp_path):
    with MetricsWriter(tmp_path, "trainer", 0, 1) as writer:
        writer.write({"x": 1}, step=1)
    path = tmp_path / "trainer-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 10 + b"\n")
    events, offset = read_events(path)
    assert [event.step for event in events] == [1]
    assert offset == len(whole)


def test_an_attempt_after_a_crash_loses_only_the_torn_line(tmp_path, caplog):
    path = tmp_path / "trainer-0.jsonl"
    with MetricsWriter(tmp_path, "trainer", 0, 1) as writer:
        writer.write({"x": 1}, step=1)
    with open(path, "ab") as file:
        file.write(b'{"time":3,"ro')
    with MetricsWriter(tmp_path, "trainer", 0, 2) as writer:
        writer.write({"x": 2}, step=2)
    events, _ = read_events(path)
    assert [(event.attempt, event.step) for event in events] == [(1, 1), (2, 2)]
    assert "skipped a line" in caplog.text


def test_a_missing_file_is_an_empty_one(tmp_path):
    assert read_events(tmp_path / "none.jsonl", 0) == ([], 0)


def test_lines_appear_without_a_flush_by_the_owner(tmp_path):
    writer = MetricsWriter(tmp_path, "trainer", 0, 1, flush_s=0.02)
    writer.write({"x": 1})
    done = threading.Event()
    for _ in range(250):
        if read_events(writer.path)[0]:
            break
        done.wait(0.02)
    else:
        pytest.fail("nothing was flushed in 5 s")
    writer.close()


def test_a_failed_background_flush_is_raised_and_loses_nothing(tmp_path):
    folder = tmp_path / "metrics"
    writer = MetricsWriter(folder, "trainer", 0, 1, flush_s=3600)
    writer.write({"x": 1})
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        writer.flush()
    folder.mkdir()
    writer.close()
    assert len(read_events(writer.path)[0]) == 1
    with pytest.raises(ValueError, match="after close"):
        writer.write({"x": 1})


def test_a_reader_beside_a_writing_process_sees_every_line_once_and_whole(tmp_path):
    program = (
        "import sys\n"
        "from prl.metrics.events import MetricsWriter\n"
        "with MetricsWriter(sys.argv[1], 'actor', 0, 1, flush_s=3600) as writer:\n"
        "    for step in range(3000):\n"
        "        writer.write({'x': step, 'y': 1 / 3}, step=step)\n"
        "        if step % 7 == 0:\n"
        "            writer.flush()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    follower = EventFollower(tmp_path)
    steps = []
    while process.poll() is None:
        steps += [event.step for event in follower.read()]
    steps += [event.step for event in follower.read()]
    assert process.returncode == 0
    assert steps == list(range(3000))
