"""Functions that the tests' jobs run. Their module is pickled by value: the nodes know only the run's copy of prl."""

import os
import signal
import sys
import threading
import time
from pathlib import Path


def tell(_folder):
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
        "cpus": int(os.environ["SLURM_CPUS_ON_NODE"]) if "SLURM_CPUS_ON_NODE" in os.environ else None,  # of the step, here
    }


def fail_on_task_1(_folder):
    from prl.cluster.allocation import read_allocation

    if read_allocation().task == 1:
        raise ValueError("the cause of it all")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit lets it pass by
    time.sleep(60)


def fail(_folder):
    raise ValueError("the cause of it all")


def wait_for_term(folder):
    """Until SIGTERM, then leave a mark."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    (Path(folder) / "started").touch()
    if asked.wait(60):
        (Path(folder) / "ended in order").touch()
        sys.exit(3)


def ignore_term(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / "started").touch()
    time.sleep(60)


def leave_once(folder):
    """Rank 0 says of the first attempt that it left, of the second one that the run is done."""
    from prl.cluster.allocation import read_allocation
    from prl.runfolder.outcome import Outcome
    from prl.runfolder.paths import RunFolder

    attempt = int(os.environ["PRL_ATTEMPT"])
    if read_allocation().first:
        ends = {1: Outcome("left", "", "time limit", "chain", "time limit"), 2: Outcome("done", "", "done", "stop", "done")}
        print(f"this is attempt {attempt}", flush=True)
        ends[attempt].write(RunFolder(folder).exit(attempt))


def begin(folder):
    """As an attempt that was begun; whether this is rank 0."""
    from prl.cluster.allocation import read_allocation
    from prl.runfolder.outcome import reserve
    from prl.runfolder.paths import RunFolder

    first = read_allocation().first
    if first:
        run, attempt = RunFolder(folder), int(os.environ["PRL_ATTEMPT"])
        reserve(run.exit(attempt))
        run.plan(attempt).write_text("{}")
    return first


def begin_and_wait(folder):
    begin(folder)
    time.sleep(120)


def begin_and_die(folder):
    """Rank 0 is killed before it can say why."""
    if begin(folder):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)


def die(folder):
    """All tasks, without a word, before an orchestrator has begun."""
    os._exit(1)
