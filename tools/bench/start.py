"""How long a job takes to be sent, and then to be ready for its preflight, on the cluster that sbatch means here.

    python tools/bench/start.py [CONFIG] [--nodes 8] [--times 3]

A run of the configuration is submitted as users do it, and cancelled once its preflight is through: no model is loaded. Printed
for each: from the start of prl-submit to its end (by then the job's id is told); from the start of the allocation to the last
node's agent having joined; the preflight. Slurm knows by the second when an allocation starts. So squeue is asked all the time,
and what is printed counts from the last question to which none of the job's components ran: at most the time to the next
question more than it was, which is printed, too. In the lab cluster all nodes share this machine's processors.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prl.cluster.record import read_record
from prl.cluster.run import run
from prl.runfolder.outcome import read_outcome
from prl.runfolder.paths import RunFolder

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SUBMIT = Path(sys.executable).with_name("prl-submit")
WAIT_S = 600.0  # for the nodes
LOOK_S = 0.1


def allocated(name: str, over: threading.Event) -> tuple[float, float]:
    """When squeue was asked last, and first, that said that no component of the job of this name ran, and that one did (s since
    the epoch). Raises TimeoutError once `over` is set, as nobody waits for it any more."""
    before = time.time()
    while not over.wait(LOOK_S):
        now = time.time()
        if set(run(["squeue", "-h", "--me", f"--name={name}", "-o", "%T"]).out.split()) - {"PENDING"}:
            return before, now
        before = now
    raise TimeoutError(f"job {name} was not seen to run")


def measure(config: Path, nodes: int, folder: Path) -> str:
    began, over, name = time.monotonic(), threading.Event(), f"{folder.parent.name}-{folder.name}"
    line = [str(SUBMIT), str(config), "--nodes", str(nodes), "--set", f"run.folder={folder}", f"run.name={name}"]
    runs = RunFolder(folder)
    with ThreadPoolExecutor() as beside:
        looking = beside.submit(allocated, name, over)
        try:
            subprocess.run(line, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
            sent_s = time.monotonic() - began
            job_id = read_record(runs, 1).job_id
            try:
                while not runs.preflight(1).exists():
                    if (ended := read_outcome(runs.exit(1))) is not None or time.monotonic() - began > WAIT_S:
                        raise RuntimeError(f"{folder}: no preflight within {WAIT_S:g} s: {ended and ended.cause}")
                    time.sleep(LOOK_S)
            finally:
                run(["scancel", job_id])
        finally:
            over.set()
        before, after = looking.result()
    facts = json.loads(runs.preflight(1).read_text())
    while run(["squeue", "-h", "-j", job_id], check=False).out.split():
        time.sleep(1.0)
    joined = f"{facts['all_joined'] - before:.2f} s after the allocation (at most {after - before:.2f} s less)"
    return f"sent in {sent_s:.2f} s; {nodes} agents joined {joined}; preflight {facts['took_s']:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="start-") as folder:  # all nodes see it
        for number in range(options.times):
            print(measure(options.config, options.nodes, Path(folder) / f"run{number}"), flush=True)


if __name__ == "__main__":
    main()
