"""An attempt's submission.json: the job that does it."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from prl.cluster.split import Kind
from prl.config.load import ConfigError
from prl.config.plain_files import read_plain
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish_json


@dataclass(frozen=True)
class Record:
    kind: Kind
    job_id: str  # Slurm's (of component 0), or the process id of a local job
    nodes: tuple[int, ...]  # of each component
    host: str  # where prl-submit ran
    submitted: float  # seconds since the epoch
    folder: Path  # submitit's; that of the attempt with which the job, or its chain, began
    cluster: str | None = None  # its name in Slurm; None where that is not known, and without Slurm
    chain: tuple[str, ...] = ()  # ids of all jobs of the chain that the job belongs to, in their order; of one job alone: none

    @property
    def tasks(self) -> int:
        """One a node."""
        return sum(self.nodes)

    @property
    def followers(self) -> tuple[str, ...]:
        """Ids of the jobs that come after it in its chain."""
        return self.chain[self.chain.index(self.job_id) + 1 :] if self.job_id in self.chain else ()

    def write(self, path: Path) -> None:
        """Raises OSError."""
        components = len(self.nodes) if self.kind == "het" else 1
        facts = {
            "kind": self.kind,
            "job_id": self.job_id,
            # Slurm numbers the components of one job one after another.
            "component_job_ids": [str(int(self.job_id) + k) for k in range(components)],
            "nodes": self.nodes,
            "submitted": self.submitted,
            "host": self.host,
            "folder": str(self.folder),
            "cluster": self.cluster,
            "chain": self.chain,
        }
        publish_json(path, facts)


def read_record(folder: RunFolder, attempt: int) -> Record:
    """The record of an attempt's job. Raises ConfigError where there is none."""
    path = folder.submission(attempt)
    try:
        facts = json.loads(read_plain(path))
        nodes, chain = tuple(int(number) for number in facts["nodes"]), tuple(map(str, facts.get("chain", ())))
        job_id, host, submitted = str(facts["job_id"]), str(facts["host"]), float(facts["submitted"])
        return Record(facts["kind"], job_id, nodes, host, submitted, Path(facts["folder"]), facts.get("cluster"), chain)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no record of a submission: prl-submit is still sending attempt {attempt}, or was killed; wait, or "
            f"go on with prl-submit --resume {shlex.quote(str(folder))}, which looks for what may still run"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: no record of a submission ({type(error).__name__}: {error}), so that nobody can tell whether that job "
            f"still runs; see that it has ended, then remove the file"
        ) from None
