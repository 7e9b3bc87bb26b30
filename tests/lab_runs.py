"""Runs as jobs of the lab cluster, submitted as users do it, and what is known of them afterwards."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lab_cluster
import psutil
from children import children_of

from prl.cli import submit
from prl.metrics.events import read_events
from prl.runfolder.outcome import Outcome, read_outcome
from prl.runfolder.paths import RunFolder

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


@dataclass(frozen=True)
class LabRun:
    folder: RunFolder
    job: str
    nodes: list[str]  # of the cluster
    temporary: Path  # where all processes of the run make their temporary files

    def hosts(self, attempt: int = 1) -> list[str]:
        """The names of the attempt's nodes, that of rank 0 first."""
        return [node["name"] for node in json.loads(self.folder.plan(attempt).read_text())["nodes"]]

    def ended(self, attempt: int = 1, deadline_s: float = 60.0) -> Outcome:
        path = self.folder.exit(attempt)
        lab_cluster.wait_until(path.exists, deadline_s, lambda: self.logs(attempt))
        outcome = read_outcome(path)
        assert outcome is not None
        return outcome

    def steps(self, attempt: int) -> list[int]:
        """That an attempt has recorded, in their order."""
        events, _ = read_events(self.folder.orchestrator_metrics)
        return [event.step or 0 for event in events if event.kind == "step" and event.attempt == attempt]

    def agent(self, node: str) -> psutil.Process:
        """The task of a node: its agent, on the first one with the orchestrator."""
        wanted = ["-u", "-m", "submitit.core._submit"]
        (found,) = [process for process in lab_cluster.processes(node) if process.cmdline()[1:4] == wanted]
        return found

    def children(self, attempt: int = 1) -> dict[str, psutil.Process]:
        """What the agents of an attempt have started, by role and index, on all nodes."""
        found = [children_of(self.agent(node).pid, self.folder) for node in self.hosts(attempt)]
        return {name: child for on_node in found for name, child in on_node.items()}

    def is_clean(self, dead: int | None = None, deadline_s: float = 60.0) -> None:
        """Nothing of the run is left on any node, or soon will be: Slurm takes some seconds to end what it ends. `dead`: the
        task whose node has lost its power, where nobody could have removed its temporary files."""

        def left() -> dict[str, list[str]]:
            found = lab_cluster.census(self.nodes, self.temporary)
            files = [name for name in found.pop(str(self.temporary), ()) if f"/prl-{self.job}-{dead}-" not in name]
            return {**found, "temporary files": files} if files else found

        lab_cluster.wait_until(lambda: not left(), deadline_s, left)

    def states(self) -> list[str]:
        """Of the job's components, by the accounting."""
        return [
            line.split()[0] for line in lab_cluster.slurm("sacct", "-X", "-n", "-P", "-j", self.job, "-o", "State").splitlines()
        ]

    def logs(self, attempt: int) -> str:
        paths = [*sorted(self.folder.logs(attempt).glob("*.log")), *sorted(self.folder.path.glob("attempt_*/submitit/*_log.*"))]
        return "\n".join([lab_cluster.slurm("squeue"), *(f"== {path}\n{path.read_text()[-2000:]}" for path in paths)])


@contextmanager
def submitted(folder: Path, nodes: list[str], *overrides: str, training: int = 1, sampling: int = 1) -> Iterator[LabRun]:
    """Submit one with so many nodes that train and that sample; afterwards the cluster is as it was."""
    run = RunFolder(folder)
    # A short path, for sockets lie there.
    with tempfile.TemporaryDirectory(prefix="prl", ignore_cleanup_errors=True) as temporary, lab_cluster.mended(nodes):
        # All nodes share this machine's processors: what a link gives there says nothing of it.
        given = [f"run.folder={run}", f"cluster.environment.TMPDIR={temporary}", "cluster.preflight.bandwidth_mib_per_s=0.01"]
        given += overrides
        asked = ["--nodes", str(training + sampling), "--trainer-nodes", str(training)]
        assert submit.main([str(CONFIG), *asked, "--set", *given]) == 0
        yield LabRun(run, json.loads(run.submission(1).read_text())["job_id"], nodes, Path(temporary))


def said(outcome: Outcome) -> tuple[str, str, str]:
    """What an attempt's exit.json says of it, in three words."""
    return outcome.outcome, outcome.reason, outcome.next
