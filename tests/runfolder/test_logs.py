"""Logs are cut down where they get too large, while processes go on writing to them."""

import os
import subprocess
import sys
import time

import pytest

from prl.runfolder.logs import bound_log, log_end

WRITER = """
import sys
for line in sys.stdin:
    for number in range(*map(int, line.split())):
        print(f"line {number:05}")
    print("done", flush=True)
"""


def test_a_log_that_is_written_to_is_cut_down_to_its_end(tmp_path):
    log = tmp_path / "sampler-0.log"
    with log.open("ab") as output:
        writer = subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=output, text=True)

    def write(first, last):
        size = log.stat().st_size
        print(first, last, file=writer.stdin, flush=True)
        while log.stat().st_size < size + 11 * (last - first) + 5:
            assert writer.poll() is None
            time.sleep(0.01)

    write(0, 100)
    bound_log(log, 2000)
    assert log.stat().st_size == 1105  # small enough
    write(100, 200)
    bound_log(log, 2000)
    first, *kept = log.read_text().splitlines()
    assert kept == [f"line {number:05}" for number in range(156, 200)] + ["done"]  # whole lines of the last 500 bytes
    assert first == f"prl: {2210 - 44 * 11 - 5} bytes of this log were dropped here (control.log_mib)"
    write(200, 300)  # at its new end
    assert log_end(log, 102).splitlines() == ["done", *(f"line {number:05}" for number in range(200, 300)), "done"]
    writer.stdin.close()
    assert writer.wait(20) == 0


def test_what_is_no_log_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="is no regular file"):
        bound_log(tmp_path / "log", 10)
