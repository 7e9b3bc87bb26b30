"""Every path of a run, in one place."""

import fnmatch
import os
import re
import stat
from pathlib import Path

from prl.runfolder.striping import stripe

_ATTEMPT_FOLDER = re.compile(r"attempt_([0-9]{3,9})")
CHECKPOINT_TARGETS = 4  # storage targets of a checkpoint's file, where the filesystem has them
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


class RunFolder:
    """The folder of one run. Nothing here touches the disk but `create`, `attempts`, `checkpoint_folders` and `manifests`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Path:
        """The newest attempt's."""
        return self.path / "config.yaml"

    def attempt_config(self, number: int) -> Path:
        return self.attempt(number) / "config.yaml"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def model(self) -> Path:
        """Config and tokenizer (and weights, where the model is pretrained) in Hugging Face's form."""
        return self.path / "model"

    @property
    def rollouts(self) -> Path:
        return self.path / "streams" / "rollouts"

    @property
    def steps(self) -> Path:
        return self.path / "streams" / "steps"

    @property
    def ledgers(self) -> Path:
        return self.path / "streams" / "ledger"

    def ledger(self, attempt: int) -> Path:
        return self.ledgers / f"attempt_{attempt:03d}"

    @property
    def reclaimed(self) -> Path:
        """The record of stream files that were deleted on purpose."""
        return self.path / "streams" / "reclaimed.jsonl"

    @property
    def quarantine(self) -> Path:
        """Stream files that are of no use, as <folder>_<name>, each with its groups in <folder>_<name>.json; a rollout file's
        folder is its writer."""
        return self.path / "streams" / "quarantine"

    @property
    def redis(self) -> Path:
        """Data of the run's own Redis server, where it has one."""
        return self.path / "streams" / "redis"

    def redis_url(self, number: int) -> Path:
        """Where the attempt's Redis server is, in JSON."""
        return self.attempt(number) / "redis.json"

    @property
    def weights(self) -> Path:
        """Versions on their way to samplers by files, as <lineage>_<step>/ (prl/runfolder/weights.py)."""
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def manifest(self, step: int) -> Path:
        return self.checkpoint(step) / "manifest.json"

    @property
    def export(self) -> Path:
        """The trained model at the end, in Hugging Face's form."""
        return self.path / "export"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def orchestrator_metrics(self) -> Path:
        """Steps, versions and checkpoints of all attempts, as events."""
        return self.metrics / "orchestrator-0.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def token(self) -> Path:
        return self.control / "token"

    @property
    def stop(self) -> Path:
        """A file of this name asks the run to end after the step in hand."""
        return self.control / "STOP"

    @property
    def save(self) -> Path:
        """A file of this name asks for a checkpoint of the step in hand; it is taken away when it has been seen."""
        return self.control / "SAVE"

    @property
    def latest(self) -> Path:
        return self.path / "latest"

    def attempt(self, number: int) -> Path:
        return self.path / f"attempt_{number:03d}"

    def submitting(self, number: int) -> Path:
        """Who submits the attempt: the claim's record, until submission.json says which job that became."""
        return self.attempt(number) / "submitting.json"

    def submission(self, number: int) -> Path:
        """The record of the job that was started for an attempt."""
        return self.attempt(number) / "submission.json"

    def script(self, number: int) -> Path:
        """The batch script of an attempt under Slurm."""
        return self.attempt(number) / "submission.sh"

    def follower_script(self, number: int, place: int) -> Path:
        """The batch script of the job in that place (2, 3, ...) of the chain that begins with the attempt."""
        return self.attempt(number) / f"follower_{place}.sh"

    def plan(self, number: int) -> Path:
        return self.attempt(number) / "plan.json"

    def logs(self, number: int) -> Path:
        return self.attempt(number) / "logs"

    def batch_log(self, number: int) -> Path:
        """What a Slurm job's batch script says itself."""
        return self.logs(number) / "batch.log"

    def chain_log(self, number: int) -> Path:
        """What the batch scripts of the jobs that follow in its chain say before they begin attempts of their own."""
        return self.logs(number) / "chain.log"

    def exit(self, number: int) -> Path:
        return self.attempt(number) / "exit.json"

    def canary(self, number: int) -> Path:
        """A file of random words that every node of the attempt has to be able to read."""
        return self.attempt(number) / "canary"

    def preflight(self, number: int) -> Path:
        """What the attempt's nodes were like before anything was loaded there (prl/cluster/preflight)."""
        return self.attempt(number) / "preflight.json"

    def orchestrator_url(self, number: int) -> Path:
        """Where the attempt's control plane listens; written by rank 0, read by the other nodes' agents."""
        return self.attempt(number) / "control.json"

    def attempts(self) -> list[int]:
        """Numbers of the attempts that exist, rising."""
        found = []
        for path in listed(self.path, "attempt_*"):
            match = _ATTEMPT_FOLDER.fullmatch(path.name)
            if match and path == self.attempt(int(match.group(1))) and path.is_dir():
                found.append(int(match.group(1)))
        return sorted(found)

    def checkpoint_folders(self) -> list[tuple[int, Path]]:
        """(step, folder) of every checkpoint, rising, finished or not."""
        found = [(_STEP_FOLDER.fullmatch(path.name), path) for path in listed(self.checkpoints, "step_*")]
        return sorted((int(match.group(1)), path) for match, path in found if match)

    def manifests(self) -> list[tuple[int, Path]]:
        """(step, manifest.json) of every finished checkpoint, rising. A checkpoint without a manifest does not exist."""
        named = [(step, folder / "manifest.json") for step, folder in self.checkpoint_folders()]
        return [(step, path) for step, path in named if os.path.lexists(path)]

    def create(self) -> None:
        """Make the folder (for its owner alone) and what every run has in it. It hands its group on where the folder above does
        (setgid)."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700 | self.path.stat().st_mode & stat.S_ISGID)
        large = CHECKPOINT_TARGETS
        for folder, targets in ((self.path / "streams", 1), (self.weights, large), (self.checkpoints, large)):
            folder.mkdir(exist_ok=True)
            stripe(folder, targets)
        for folder in (self.rollouts, self.steps, self.ledgers, self.metrics, self.control):
            folder.mkdir(parents=True, exist_ok=True)


def listed(folder: Path, pattern: str) -> list[Path]:
    """The paths in a folder whose names match the pattern, in order; none where there is no such folder. Raises OSError where
    it may not be read: what is in it is not known then (`Path.glob` takes it for empty)."""
    try:
        found = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(fnmatch.filter(found, pattern))]


def run_of_attempt(path: Path) -> RunFolder | None:
    """The run of which `path` is one attempt's folder (`latest` is one, too), where it is that."""
    folder = Path(os.path.realpath(path))
    run = RunFolder(folder.parent)
    return run if os.path.lexists(run.config) and folder in [run.attempt(number) for number in run.attempts()] else None
