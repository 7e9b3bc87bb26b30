"""What a trainer rank does to its own process."""

import os
import subprocess
import sys
from pathlib import Path

STATE = """
import os
from prl.trainer import device
device.install(1, yields_cpu={yields})
group = "/proc/self/autogroup"
print(os.sched_getscheduler(0) == os.SCHED_IDLE, open(group).read().split()[-1] if os.path.exists(group) else None)
"""
GROUPS = Path("/proc/self/autogroup").exists()  # no kernel needs to have them


def state(*, yields: bool) -> str:
    """Of a process in a session of its own, as the children of a run are."""
    command = [sys.executable, "-c", STATE.format(yields=yields)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, start_new_session=True)
    return done.stdout.strip()


def test_a_trainer_leaves_the_cores_to_others_in_its_session_and_with_its_session():
    assert state(yields=True) == f"True {10 if GROUPS else None}"
    as_this_process = os.sched_getscheduler(0) == os.SCHED_IDLE
    assert state(yields=False) == f"{as_this_process} {0 if GROUPS else None}"
