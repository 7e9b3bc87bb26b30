"""Versions of the weights: which came from which, and how old a token is."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Step k turns version k-1 into version k; the lineage rises whenever the trainer goes back to an older checkpoint."""

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}:{self.step}"

    @classmethod
    def parse(cls, label: str) -> "Version":
        """From the wire's `lineage:step`. Raises ValueError with the label in it."""
        lineage, colon, step = label.partition(":")
        if not colon or not lineage.isdigit() or not step.isdigit():
            raise ValueError(f"not a version of the form lineage:step: {label!r}")
        return cls(int(lineage), int(step))


def is_ancestor(version: Version, lineage: int, forks: Mapping[int, int]) -> bool:
    """Whether `version` belongs to the past of `lineage`. `forks[b]` is the step at which lineage b left lineage b-1."""
    return version.lineage <= lineage and all(version.step <= forks[b] for b in range(version.lineage + 1, lineage + 1))


def lag(trained_in_step: int, version: Version) -> int:
    """Age of a token in optimizer steps when step `trained_in_step` trains on it; 0 is on-policy."""
    return trained_in_step - 1 - version.step
