"""What stands in the annotations of options beside their help: bounds, as in Annotated[int, "what it is", AtLeast(1)], and what
others call them.

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
        return f"at least {_shown(self.limit)}"


@dataclass(frozen=True)
class AtMost:
    limit: float

    def holds(self, value: float) -> bool:
        return value <= self.limit

    def __str__(self) -> str:
        return f"at most {_shown(self.limit)}"


@dataclass(frozen=True)
class Above:
    limit: float

    def holds(self, value: float) -> bool:
        return value > self.limit

    def __str__(self) -> str:
        return f"above {_shown(self.limit)}"


@dataclass(frozen=True)
class Below:
    limit: float

    def holds(self, value: float) -> bool:
        return value < self.limit

    def __str__(self) -> str:
        return f"below {_shown(self.limit)}"


Bound = AtLeast | AtMost | Above | Below


@dataclass(frozen=True, init=False)
class AlsoCalled:
    """What other programs call an option: whoever writes such a name is told the right one."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


_LIMITS = {"s": 10**6, "mib": 2**24, "gib": 10**6, "seed": 2**63}  # 11 days, 16 TiB, 1 PB, what a seed holds
_OTHER_LIMIT = 10**9


def bounds_of(hint: Any) -> tuple[Bound, ...]:
    """The bounds in an annotation, all of which must hold."""
    return tuple(entry for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, Bound))


def names_of(name: str, hint: Any) -> tuple[str, ...]:
    """The option's own name and those in its annotation."""
    others = (entry.names for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, AlsoCalled))
    return (name, *(other for names in others for other in names))


def describe(bounds: tuple[Bound, ...]) -> str:
    """E.g. "above 0 and at most 1"; empty for no bounds."""
    return " and ".join(map(str, bounds))


def unstated_limit(name: str, hint: Any) -> int | None:
    """What a number without an upper bound in its annotation must be below, by its unit, which is the last word of its name:
    far above what any run needs, and below what arrays, seeds, sockets, timers or a machine's memory cannot take. None where
    the annotation has one."""
    if any(isinstance(bound, AtMost | Below) for bound in bounds_of(hint)):
        return None
    return _LIMITS.get(name.rsplit("_", 1)[-1], _OTHER_LIMIT)


def _shown(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"
