"""The list of kill points: process to the operations at which it publishes, or reads what another one published.

kill_points.json is what the runs of these tests were seen to do. A point that is not in it fails a test, and so does one that
is no longer there; `PRL_WRITE_KILL_POINTS=1 pytest tests/faults/test_kills.py` writes the file anew, and with it the tests.
"""

import json
import os
import re
from pathlib import Path

from faulty_process import is_publishing

FILE = Path(__file__).with_name("kill_points.json")
PROCESSES = ("actor-0", "preprocess-0", "trainer-0", "orchestrator-0")  # the last is the dispatcher, too
MOMENTS = ("first", "middle", "last")
_AT_THE_END = re.compile(r".*export|.*exit\.json|unlink attempt_N/\.reserve|fsync \. ")
_AT_THE_START = re.compile(
    r"\w+ attempt_N|mkdir (metrics|streams)|create streams/ledger|fsync streams/ledger/attempt_N |read streams/.*reclaim"
)
# What an attempt passes only where the one before left something: the point at which that one has to have died.
_LEFTOVERS = {
    re.compile(r"(unlink|rename) checkpoints.*/\.old-"): ("trainer-0", "fsync checkpoints/step_N (prl.trainer.checkpoint)"),
    re.compile(r"rename export"): ("trainer-0", "fsync . (prl.trainer.loop)"),
    re.compile(r"unlink checkpoints.*/\.tmp-"): ("trainer-0", "fsync checkpoints/step_N/.tmp-trainer (prl.trainer.checkpoint)"),
    re.compile(r"unlink checkpoints/step_N/\.tmp "): (
        "orchestrator-0",
        "write checkpoints/step_N/.tmp (prl.runfolder.manifest)",
    ),
    re.compile(r"read streams/steps"): ("trainer-0", "mkdir checkpoints/step_N/.tmp-trainer (prl.trainer.checkpoint)"),
}


def known() -> dict[str, list[str]]:
    return json.loads(FILE.read_text())


def seen(points: dict[str, set[str]]) -> dict[str, list[str]]:
    """Of all operations those that publish."""
    return {process: sorted(filter(is_publishing, points.get(process, ()))) for process in PROCESSES}


def is_written_anew() -> bool:
    return "PRL_WRITE_KILL_POINTS" in os.environ


def write(points: dict[str, list[str]]) -> None:
    FILE.write_text(json.dumps(points, indent=1) + "\n")


def moments(process: str, point: str) -> tuple[str, ...]:
    """When a process passes the point: what is done for each step has a first, a middle and a last time."""
    if _AT_THE_END.match(point):
        return ("last",)
    if before(process, point):
        return ("first",)
    if _AT_THE_START.match(point):
        return ("first", "last") if "outcome" in point and "-> attempt_N/.reserve" not in point else ("first",)
    return MOMENTS


def before(process: str, point: str) -> tuple[str, str] | None:
    """The process and the point of another death without which the point is not passed."""
    if process == "trainer-0" and point.startswith("read"):
        return None  # it reads every step
    return next((death for pattern, death in _LEFTOVERS.items() if pattern.match(point)), None)


def after_step(process: str, point: str, moment: str, last: int, steps: int) -> int:
    """The step whose file has to be there before a process that passes the point dies there. `last` step of an attempt of
    `steps`; files are made a step ahead of the trainer, and rollouts a step or two ahead of the files."""
    if moment == "first" or _AT_THE_END.match(point):
        return 0
    if moment == "middle":
        return last - steps // 2
    is_ahead = process == "actor-0" or (process == "preprocess-0" and point.startswith("read"))
    return last - 2 if is_ahead else last - 1
