"""What all tests share: no test may hang, and the ones that need a Slurm cluster or a Redis server are left out where there is
none."""

import faulthandler
import os
import shutil
import signal

import pytest

DEADLINE_S = 300
STUCK_S = 30  # between the exception that a deadline raises and the end of the whole test process
stderr = 2


def pytest_configure(config):
    global stderr
    stderr = os.dup(2)  # now, before pytest redirects it: a stuck test's stacks must reach the terminal
    config.addinivalue_line("markers", f"deadline(seconds): a test's limit, if it is not {DEADLINE_S} s")


def pytest_collection_modifyitems(config, items):
    """Leave out what this machine cannot run: tools/test.sh says so, and exports what tools/slurmlab.sh prints."""
    lacking = set()
    if "SLURM_CONF" not in os.environ:
        lacking.add("slurm")
    if os.environ.get("PRL_LAB_MODE") != "netns":
        lacking.add("slurm_netns")
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in lacking)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if shutil.which("redis-server") is None:
        missing = pytest.mark.skip(reason="no redis-server here; as root on Debian or Ubuntu tools/test.sh installs it")
        for item in items:
            if item.get_closest_marker("redis"):
                item.add_marker(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A deadline for each test with its fixtures. The alarm fails the test; where the interpreter does not get to it (stuck
    in C code), all stacks are printed and the process ends."""
    marker = item.get_closest_marker("deadline")
    limit_s = marker.args[0] if marker else DEADLINE_S

    def fail(_signal, _frame):
        pytest.fail(f"{item.nodeid} took longer than its deadline of {limit_s} s")

    earlier = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + STUCK_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
