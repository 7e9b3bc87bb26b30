"""Faults in the processes of a whole run, as PRL_FAULTS asks for them: JSON {"log": folder, "rules": [...]}.

Every process of a run appends its first operation of each point to log/<role>-<index>.points, and each fault that it met to
log/fired.jsonl. A rule:

    role, index   whose process; roles are prl's packages and "orchestrator"
    start         the number of its start in the attempt, 0 for the first (default: all)
    fault         see `fault_layer`
    point         what the operation's point has to match, a regular expression
    after_step    only once the step file of this number, or a later one, is there (default 0: from the start)
    times         how often, at most (default: always)
    each          `times` counts for each path by itself
"""

import json
import os
import re
from collections import Counter
from pathlib import Path

from fault_layer import LOOKS, FaultLayer, Operation

PUBLISHED = re.compile(r"attempt_N|streams|checkpoints|\.tmp-export|export|metrics|control|\. ")
STEP_FILE = re.compile(r"step_(\d+)_")
LEFT_OUT = re.compile(r"attempt_N/(logs|submitit)\b")  # by others, and nothing that a run goes by


def install(module: str) -> None:
    asked = json.loads(os.environ["PRL_FAULTS"])
    role = "orchestrator" if module.startswith("submitit.") else module.removeprefix("prl.")
    index = int(os.environ.get("PRL_INDEX", "0"))
    start = int(os.environ.get("PRL_START", "0"))
    run = Path(asked["run"])
    rules = [rule for rule in asked["rules"] if (rule["role"], rule.get("index", 0)) == (role, index)]
    rules = [rule for rule in rules if rule.get("start", start) == start]
    process = FaultyProcess(run, Path(asked["log"]), f"{role}-{index}", rules)
    FaultLayer(run, process.plan, process.fired).__enter__()


class FaultyProcess:
    def __init__(self, run: Path, log: Path, name: str, rules: list[dict]) -> None:
        self._run = run
        self._log = log
        self._name = name
        self._rules = rules
        self._points: set[str] = set()
        self._counts: Counter[tuple[int, str]] = Counter()

    def plan(self, operation: Operation) -> str | None:
        point = operation.point
        if point not in self._points:
            self._points.add(point)
            self._append(f"{self._name}.points", point)
        for number, rule in enumerate(self._rules):
            if not re.fullmatch(rule["point"], point) or not self._is_there(rule.get("after_step", 0)):
                continue
            key = number, operation.path if rule.get("each") else ""
            if "times" in rule and self._counts[key] >= rule["times"]:
                continue
            self._counts[key] += 1
            if self._counts[key] == 1 and rule["fault"] != "kill":
                self.fired(operation)
            return rule["fault"]
        return None

    def fired(self, operation: Operation) -> None:
        self._append("fired.jsonl", json.dumps({"process": self._name, "point": operation.point, "path": operation.path}))

    def _is_there(self, step: int) -> bool:
        found = map(STEP_FILE.match, os.listdir(self._run / "streams" / "steps") if step else ())
        return not step or any(match and int(match[1]) >= step for match in found)

    def _append(self, name: str, line: str) -> None:
        self._log.mkdir(parents=True, exist_ok=True)
        with (self._log / name).open("a") as file:
            file.write(line + "\n")


def is_publishing(point: str) -> bool:
    """Whether something of what a run leaves is made at this point, or read by another of its processes."""
    kind, _, path = point.partition(" ")
    if kind in LOOKS:
        return kind == "read" and path.startswith("streams/") and ".arrow" in path
    return bool(PUBLISHED.match(path)) and not LEFT_OUT.match(path)
