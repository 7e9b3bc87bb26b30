"""Bounds of options, which stand in their annotations: Annotated[int, "what it is", AtLeast(1)].

Imports the standard library alone: every options.py may import this module, and nothing else of prl.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AtLeast:
    limit: float

    def holds(self, value: float) -> bool:
        return value >= self.limit

    def __str__(self) -> str:
        return f"at least {self.limit:g}"


@dataclass(frozen=True)
class AtMost:
    limit: float

    def holds(self, value: float) -> bool:
        return value <= self.limit

    def __str__(self) -> str:
        return f"at most {self.limit:g}"


@dataclass(frozen=True)
class Above:
    limit: float

    def holds(self, value: float) -> bool:
        return value > self.limit

    def __str__(self) -> str:
        return f"above {self.limit:g}"


@dataclass(frozen=True)
class Below:
    limit: float

    def holds(self, value: float) -> bool:
        return value < self.limit

    def __str__(self) -> str:
        return f"below {self.limit:g}"


Bound = AtLeast | AtMost | Above | Below


def bounds_of(hint: Any) -> tuple[Bound, ...]:
    """The bounds in an annotation, all of which must hold."""
    return tuple(entry for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, Bound))


def describe(bounds: tuple[Bound, ...]) -> str:
    """E.g. "above 0 and at most 1"; empty for no bounds."""
    return " and ".join(map(str, bounds))
