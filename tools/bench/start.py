"""How long a job takes to be sent, and then to be ready for its preflight, on the cluster that sbatch means here.

    python tools/bench/start.py [CONFIG] [--nodes 8] [--times 3]

A run of the configuration is submitted as users do it, and cancelled once its preflight is through: no model is loaded. Printed
for each: from the start of prl-submit to its end (by then the job's id is told); from the start of the allocation, which Slurm
knows by the second (what is printed may be up to 1 s more than it was), to the last node's agent having joined; the preflight.
In the lab cluster all nodes share this machine's processors.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from prl.cluster.record import read_record
from prl.cluster.run import run
from prl.runfolder.outcome import read_outcome
from prl.runfolder.paths import RunFolder

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SUBMIT = Path(sys.executable).with_name("prl-submit")
WAIT_S = 600.0  # for the nodes
LOOK_S = 0.1


def measure(config: Path, nodes: int, folder: Path) -> str:
    began = time.monotonic()
    line = [str(SUBMIT), str(config), "--nodes", str(nodes), "--set", f"run.folder={folder}"]
    subprocess.run(line, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
    sent_s = time.monotonic() - began
    runs = RunFolder(folder)
    job_id = read_record(runs, 1).job_id
    try:
        while not runs.preflight(1).exists():
            if (ended := read_outcome(runs.exit(1))) is not None or time.monotonic() - began > WAIT_S:
                raise RuntimeError(f"{folder}: no preflight within {WAIT_S:g} s: {ended and ended.cause}")
            time.sleep(LOOK_S)
        found = run(["squeue", "-h", "-j", job_id, "-o", "%S"]).out.split()
    finally:
        run(["scancel", job_id])
    facts = json.loads(runs.preflight(1).read_text())
    joined_s = facts["all_joined"] - max(datetime.fromisoformat(start).timestamp() for start in found)
    while run(["squeue", "-h", "-j", job_id], check=False).out.split():
        time.sleep(1.0)
    took = f"{nodes} agents joined {joined_s:.1f} s after the allocation; preflight {facts['took_s']:.1f} s"
    return f"sent in {sent_s:.2f} s; {took}"


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
