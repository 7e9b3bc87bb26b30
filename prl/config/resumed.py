"""What of a run's configuration a resume cannot change: what was fixed when the run began, and would have no effect."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from prl.config.schema import Config

FIXED_KEYS = ("model", "domains", "run.name", "run.folder", "run.seed", "run.replay", "run.replay_from", "streams.backend")


def resume_changes(before: Config, now: Config) -> list[str]:
    """The fixed keys in which two configurations of one run differ."""
    return [
        key
        for key in _changed(before, now, "")
        if any(key == fixed or key.startswith((f"{fixed}.", f"{fixed}[")) for fixed in FIXED_KEYS)
    ]


def _changed(before: Any, now: Any, name: str) -> Iterator[str]:
    if before == now:
        return
    if dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            yield from _changed(getattr(before, field.name), getattr(now, field.name), f"{name}.{field.name}".lstrip("."))
    else:
        yield name
