"""Functions that the tests' jobs run. Their module is pickled by value: the nodes know only the run's copy of prl."""

import os
import signal
import sys
import threading
import time
from pathlib import Path


def tell(_folder, _attempt=1):
    import prl
    from prl.cluster.allocation import read_allocation

    found = read_allocation()
    addresses = [[(host.name, host.address) for host in hosts] for hosts in found.hosts]
    return {
        "place": (found.component, found.rank),
        "task": found.task,
        "host": found.host.name,
        "job": found.job_id,
        "hosts": addresses,
        "master": (found.master_address, os.environ.get("MASTER_ADDR")),
        "prl": str(Path(prl.__file__)),
        "attempt": os.environ["PRL_ATTEMPT"],
        "pid": os.getpid(),
    }


def fail_on_task_1(_folder, _attempt=1):
    from prl.cluster.allocation import read_allocation

    if read_allocation().task == 1:
        raise ValueError("the cause of it all")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit lets it pass by
    time.sleep(60)


def fail(_folder, _attempt=1):
    raise ValueError("the cause of it all")


def wait_for_term(folder, _attempt=1):
    """Until SIGTERM, then leave a mark."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    (Path(folder) / "started").touch()
    if asked.wait(60):
        (Path(folder) / "ended in order").touch()
        sys.exit(3)


def ignore_term(folder, _attempt=1):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / "started").touch()
    time.sleep(60)
