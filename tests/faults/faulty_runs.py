"""Runs with faults in them: everything is real but the samplers, which are played from a tape."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import accounts
import psutil

from prl.runfolder.paths import RunFolder

ROOT = Path(__file__).absolute().parents[2]
INJECT = Path(__file__).absolute().parent / "inject"
SUBMIT = Path(sys.executable).with_name("prl-submit")
SETTINGS = (
    "run.groups_per_step=4",
    "run.rollouts_per_group=4",
    "run.max_lag=1",
    "run.evaluate_every_steps=0",
    "run.stop_at_reward=null",
    "train.tensor_parallel=1",
    "train.checkpoint_every_steps=2",
    "train.checkpoint_keep_last=2",
    "metrics.tensorboard=false",
    "streams.keep=needed",
    "control.restarts=0",
    "control.restart_pause_s=0.05",
)
STEPS = 6  # of an attempt that meets no fault
DEADLINE_S = 240
LEFT_S = 15  # for what a death leaves behind to end


@dataclass
class FaultyRun:
    """A run in `folder`, attempt after attempt."""

    folder: RunFolder
    code: int = 0
    output: str = ""

    def start(self, *rules: dict, settings: Sequence[str] = (), steps: int = STEPS) -> None:
        """The run's first attempt, to its end."""
        self._submit(["configs/quickstart.yaml", "--set", f"run.folder={self.folder}", *SETTINGS, *settings], steps, rules)

    def resume(self, *rules: dict, settings: Sequence[str] = (), more: int = STEPS) -> None:
        """Another attempt, for so many steps more than its checkpoint has."""
        self._submit(["--resume", str(self.folder), "--set", *settings], self.checkpoint + more, rules)

    @property
    def checkpoint(self) -> int:
        return max((step for step, _ in self.folder.manifests()), default=0)

    @property
    def log(self) -> Path:
        """What this attempt's processes say of operations and faults."""
        return self.folder.path.with_name(f"{self.folder.path.name}-faults-{len(self.folder.attempts())}")

    @property
    def fired(self) -> list[dict]:
        path = self.log / "fired.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def points(self) -> dict[str, set[str]]:
        """Process to the points that it passed."""
        return {path.stem: set(path.read_text().splitlines()) for path in self.log.glob("*.points")}

    @property
    def exit(self) -> dict:
        path = self.folder.exit(self.folder.attempts()[-1])
        return json.loads(path.read_text())

    def check(self, *, ended: bool = False) -> None:
        """Nothing is lost, nothing doubled, and no process left."""
        psutil.wait_procs(left := self.processes(), timeout=LEFT_S)
        assert not [process for process in left if process.is_running()]
        assert accounts.problems(self.folder, ended=ended) == []

    def processes(self) -> list[psutil.Process]:
        """What the run has started and what runs still."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or it is somebody else's
                if process.environ().get("PRL_RUN") == str(self.folder):
                    found.append(process)
        return found

    def check_ended(self) -> None:
        assert self.code == 0, self.words()
        self.check(ended=True)

    def words(self) -> str:
        logs = sorted(self.folder.logs(self.folder.attempts()[-1]).glob("*"))
        return "\n".join([self.output, *(f"== {path.name}\n{path.read_text()[-2000:]}" for path in logs)])

    def _submit(self, arguments: list[str], steps: int, rules: Sequence[dict]) -> None:
        attempt = len(self.folder.attempts()) + 1
        log = self.folder.path.with_name(f"{self.folder.path.name}-faults-{attempt}")
        path = os.pathsep.join([str(INJECT), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        asked = {"run": str(self.folder), "log": str(log), "rules": rules}
        done = subprocess.run(
            [SUBMIT, *arguments, f"run.steps={steps}"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PRL_FAULTS": json.dumps(asked), "PRL_FAULTS_SAMPLER": "replay"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        self.code, self.output = done.returncode, done.stdout + done.stderr


def kill(process: str, point: str, after_step: int = 0) -> dict:
    """The rule by which a process ("actor-0") dies at a point."""
    role, _, index = process.rpartition("-")
    return {"role": role, "index": int(index), "fault": "kill", "point": re.escape(point), "after_step": after_step}
