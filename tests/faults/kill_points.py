"""The list of kill points: process to the operations at which it publishes, or reads what another one published.

kill_points.json is what the runs of these tests were seen to do. A point that is not in it fails a test, and so does one that is
no longer there; `PRL_WRITE_KILL_POINTS=1 pytest tests/faults/test_kills.py` writes the file anew, and with it the tests.
"""

import json
import os
import re
from pathlib import Path

from faulty_process import is_publishing

FILE = Path(__file__).with_name("kill_points.json")
PROCESSES = ("actor-0", "preprocess-0", "trainer-0", "orchestrator-0")  # the last is the dispatcher, too
MOMENTS = ("first", "middle", "last")
_AT_THE_END = re.compile(r".*export|.*exit\.json|unlink attempt_N/\.reserve|fsync \.")
_AT_THE_START = re.compile(
    r"\w+ attempt_N|mkdir (metrics|streams)|(create|fsync) streams/ledger/attempt_N(/ledger_N.frames)? .*"
)
_EVERY_LEDGER_APPEND = "fsync streams/ledger/attempt_N/ledger_N.frames"


def known() -> dict[str, list[str]]:
    return json.loads(FILE.read_text())


def seen(points: dict[str, set[str]]) -> dict[str, list[str]]:
    """Of all operations those that publish."""
    return {process: sorted(filter(is_publishing, points.get(process, ()))) for process in PROCESSES}


def is_written_anew() -> bool:
    return "PRL_WRITE_KILL_POINTS" in os.environ


def write(points: dict[str, list[str]]) -> None:
    FILE.write_text(json.dumps(points, indent=1) + "\n")


def moments(point: str) -> tuple[str, ...]:
    """When a run passes the point: what is done for each step has a first, a middle and a last time."""
    if _AT_THE_END.match(point):
        return ("last",)
    if point.startswith(_EVERY_LEDGER_APPEND):
        return MOMENTS
    if _AT_THE_START.match(point):
        return ("first", "last") if "outcome" in point and "-> attempt_N/.reserve" not in point else ("first",)
    return MOMENTS


def after_step(process: str, point: str, moment: str, last: int, steps: int) -> int:
    """The step whose file has to be there before a process that passes the point dies there. `last` step of an attempt of
    `steps`; files are made a step ahead of the trainer, and rollouts a step or two ahead of the files."""
    if moment == "first" or _AT_THE_END.match(point):
        return 0
    if moment == "middle":
        return last - steps // 2
    is_ahead = process == "actor-0" or (process == "preprocess-0" and point.startswith("read"))
    return last - 2 if is_ahead else last - 1
