import subprocess
import sys
import time

import pytest

from prl.metrics.usage import own_usage, usage_of

BURN = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\n"


def start(program):
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_child_counts_with_living_and_ended_descendants():
    """The child has one descendant that burned 0.4 s and ended, and one that burned 0.4 s and still lives."""
    program = (
        "import subprocess, sys\n"
        f"burn = {BURN!r}\n"
        "subprocess.run([sys.executable, '-c', burn], check=True)\n"
        "wait = burn + 'print(1, flush=True)\\nimport sys\\nsys.stdin.read()'\n"
        "alive = subprocess.Popen([sys.executable, '-c', wait], stdout=subprocess.PIPE)\n"
        "alive.stdout.readline()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "alive.wait()\n"
    )
    child = start(program)
    try:
        assert child.stdout.readline() == b"ready\n"
        usage = usage_of({"child": child.pid})["child"]
    finally:
        child.communicate(timeout=30)
    assert 0.8 <= usage.cpu_s < 2.0
    assert usage.rss_bytes > 2 * 5_000_000
    assert usage_of({"child": child.pid}) == {}


def test_own_usage_leaves_children_out():
    before = own_usage().cpu_s
    subprocess.run([sys.executable, "-c", BURN], check=True, timeout=60)
    assert own_usage().cpu_s - before < 0.3
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert own_usage().cpu_s - before == pytest.approx(0.2, abs=0.2)
