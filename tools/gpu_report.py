"""What `gpu_check.py` has measured, and what it has not: a table, and JSON."""

import faulthandler
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """Something to measure."""

    name: str
    measure: Callable[[], list[Row]]
    of: str = ""  # its part of it

    @property
    def label(self) -> str:
        return f"{self.name}, {self.of}" if self.of else self.name


class Report:
    """What was measured, and what was not: printed as it comes, and kept in a file."""

    def __init__(self, facts: Mapping[str, Any], checks: list[Check], path: Path | None) -> None:
        self._facts, self._path = facts, path
        self._rows: list[Row] = []
        self._missing = [check.label for check in checks]
        self._changes = threading.Lock()
        print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        self._write()

    def add(self, check: Check, rows: list[Row]) -> None:
        with self._changes:
            for row in rows:
                full = {"check": check.name, **row}
                print(*lines(full, self._rows[-1] if self._rows else {}), sep="\n", flush=True)
                self._rows.append(full)
            if not any(word in row for row in rows for word in ("skipped", "failed")):
                self._missing.remove(check.label)
            self._write()

    def end(self) -> int:
        """The last line, and the exit code."""
        faults = f"{len(self._off)} measurements failed or are off" if self._off else ""
        missing = f"not measured: {'; '.join(self._missing)}" if self._missing else ""
        said = [part for part in (faults or (missing and "all that was measured is well"), missing) if part]
        print(f"gpu_check: {', '.join(said) or 'all is well'}", flush=True)
        return 1 if faults else 0

    def give_up(self, deadline_s: float) -> None:
        """End the process, whatever it is doing."""
        try:
            with self._changes:
                print(
                    f"gpu_check: {deadline_s:g} s are over, {len(self._off)} measurements failed or are off, "
                    f"not measured: {'; '.join(self._missing)}",
                    flush=True,
                )
                faulthandler.dump_traceback()
                self._write()
        finally:
            os._exit(1)

    @property
    def _off(self) -> list[Row]:
        return [row for row in self._rows if row.get("ok") is False]

    def _write(self) -> None:
        if self._path:
            state = {"complete": not self._missing, "ok": not self._off, "missing": self._missing}
            self._path.write_text(json.dumps({"facts": self._facts, "rows": self._rows, **state}, indent=2) + "\n")


def lines(row: Row, before: Row) -> list[str]:
    """A line of the table, below the names of its columns where these are others than those of the row before."""

    def shown(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    widths = {key: max(len(key), 19 if key in ("shape", "attention") else 8) for key in row}
    names = "  ".join(f"{key:<{width}}" for key, width in widths.items()).rstrip()
    values = "  ".join(f"{shown(row[key]):<{width}}" for key, width in widths.items()).rstrip()
    return [values] if row.keys() == before.keys() else ["", names, values]
