"""Runs whose node agents and orchestrator are the real ones, and whose other processes load nothing and never join: what ends
a run before its first step ends it later in the same way, but for the step in hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lab_cluster
from lab_runs import LabRun, submitted

ROLES = ("trainer", "sampler", "actor", "preprocess")
STARTED_S = 60.0  # on a machine that others use, too
LIVES = "lives"  # what each says once it runs

# The signals are those of prl.control.child. A sampler has a worker, shared memory and a file; none removes anything. An agent
# looks for shared memory once a second.
CHILD = f"""
import mmap, os, signal, subprocess, tempfile, time
from prl.control.parent import end_with_parent

if os.environ["PRL_ROLE"] == "trainer":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(number=signal.SIGKILL)
else:
    end_with_parent()
if os.environ["PRL_ROLE"] == "sampler":
    subprocess.Popen(["sleep", "600"])
    tempfile.mkstemp()
    with open("/dev/shm/psm_" + str(os.getpid()), "wb+") as file:
        file.truncate(4096)
        shared = mmap.mmap(file.fileno(), 4096)
time.sleep(2)
print("{LIVES}", flush=True)
time.sleep(600)
"""


@contextmanager
def small_run(folder: Path, nodes: list[str], *overrides: str, train_nodes: int = 1) -> Iterator[LabRun]:
    with submitted(folder, nodes, "cluster.sbatch.hold=true", *overrides, training=train_nodes) as run:
        for role in ROLES:
            (run.folder.code / "prl" / role / "__main__.py").write_text(CHILD)
        lab_cluster.slurm("scontrol", "release", run.job)
        yield run


def wait_for_processes(run: LabRun, attempt: int = 1, deadline_s: float = STARTED_S) -> None:
    """Until all processes of an attempt run."""
    logs = [run.folder.logs(attempt) / f"{role}-0.log" for role in ROLES]
    lab_cluster.wait_until(
        lambda: all(log.exists() and LIVES in log.read_text() for log in logs), deadline_s, lambda: run.logs(attempt)
    )
