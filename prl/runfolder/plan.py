"""What an attempt's plan.json says of its place in the run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prl.config.plain_files import read_plain


class PlanError(Exception):
    """A plan.json is not what an attempt writes; the message names it and says what is wrong and what to do."""


@dataclass(frozen=True)
class PlanFacts:
    lineage: int
    forks: Mapping[int, int]  # lineage -> the step at which it left the one before
    refused: Sequence[str]  # checkpoints and step files that the attempt passed over, and why


def read_plan(path: Path) -> PlanFacts:
    """Raises PlanError."""
    try:
        facts = json.loads(read_plain(path))
        forks = {int(lineage): int(step) for lineage, step in facts["forks"].items()}
        return PlanFacts(int(facts["lineage"]), forks, tuple(str(words) for words in facts.get("refused", ())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(
            f"{path}: is no plan of an attempt ({type(error).__name__}: {error}); restore it as it was, or submit the run anew"
        ) from error
