"""Whole runs as a user starts them: `prl-submit` in a process of its own, read afterwards from the run folder."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from prl.config.load import load
from prl.config.schema import Config
from prl.metrics.events import Event, EventFollower
from prl.runfolder.paths import RunFolder
from prl.streams.files import list_published
from prl.streams.reader import read_rollouts
from prl.streams.records import Group

ROOT = Path(__file__).parents[2]
SUBMIT = Path(sys.executable).with_name("prl-submit")
DEADLINE_S = 600


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    folder: RunFolder
    code: int
    output: str

    @property
    def exit(self) -> dict:
        return json.loads(self.folder.exit(self.folder.attempts()[-1]).read_text())

    @property
    def config(self) -> Config:
        return load(self.folder.config)

    def events(self, kind: str, attempt: int | None = None) -> list[Event]:
        found = EventFollower(self.folder.metrics).read()
        return [event for event in found if event.kind == kind and attempt in (None, event.attempt)]

    def held_out(self, attempt: int | None = None) -> list[tuple[int, float]]:
        return sorted((event.step, event.values["eval/reward_mean"]) for event in self.events("evaluation", attempt))

    def groups(self) -> list[Group]:
        files = [file for writer in sorted(self.folder.rollouts.iterdir()) for _, file in list_published(writer)]
        return [group for file in files for group in read_rollouts(file.path, file.bytes, file.checksum)]

    def logs(self) -> str:
        logs = sorted(self.folder.path.glob("attempt_*/logs/*"))
        parts = [f"== {path.name}\n{path.read_text()[-3000:]}" for path in logs]
        return "\n".join([self.output, *parts])


def learned(ended: Ended, reward: float = 0.9) -> bool:
    """Whether the last two evaluations of 512 held-out prompts reached the reward."""
    last = [event.values for event in sorted(ended.events("evaluation"), key=lambda e: (e.attempt, e.step))][-2:]
    return len(last) == 2 and all(v["eval/reward_mean"] >= reward and v["eval/problems"] == 512 for v in last)


def command(*arguments: str | Path, folder: Path | None = None) -> list[str]:
    place = [] if folder is None else ["--set", f"run.folder={folder}"]
    return [str(SUBMIT), *map(str, arguments), *place]


def submit(folder: Path, *arguments: str | Path, deadline_s: float = DEADLINE_S) -> Ended:
    """Run prl-submit to its end; arguments come before `--set run.folder`."""
    done = subprocess.run(
        command(*arguments, folder=folder),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    return Ended(RunFolder(folder), done.returncode, done.stdout + done.stderr)


def steps_of(folder):
    """(attempt, step) of all steps so far, of a run that may go on."""
    return [(event.attempt, event.step) for event in Ended(folder, 0, "").events("step")]


def wait_until(condition, deadline_s, what):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.5)


def outcome(folder, attempt):
    """What an attempt's exit.json says; nothing where there is none yet."""
    path = folder.exit(attempt)
    return json.loads(path.read_text()) if path.exists() else {}
