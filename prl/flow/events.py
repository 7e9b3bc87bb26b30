"""What the ledger records: one event for every rollout id that begins or ends, and the compact form of ids on the wire."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from prl.flow.ids import RolloutId
from prl.flow.versions import Version

EventKind = Literal["issued", "trained", "discarded", "issued_again"]


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """Something that happened to one rollout id. `issued` begins an id, the other three end it: `issued_again` ends this
    issue (the next one begins with its own `issued` when it is handed out)."""

    rollout: RolloutId
    kind: EventKind
    version: Version  # trained: the version that the step made; otherwise the samplers' version at that time
    step: int  # trained: the optimizer step; otherwise -1
    reason: str  # discarded, issued_again: why; otherwise ""


def to_rows(ids: Iterable[RolloutId]) -> list[list[Any]]:
    """Ids in JSON: one row [epoch, problem, group, issue, [rollout, ...]] for each run of ids of one group."""
    runs = groupby(ids, key=lambda i: (i.epoch, i.problem, i.group, i.issue))
    return [[*key, [i.rollout for i in members]] for key, members in runs]


def from_rows(rows: Iterable[Sequence[Any]]) -> list[RolloutId]:
    """The ids of `to_rows`; entries of a row after the fifth are left alone."""
    return [
        RolloutId(int(epoch), str(problem), int(group), int(rollout), int(issue))
        for epoch, problem, group, issue, rollouts, *_ in rows
        for rollout in rollouts
    ]


def to_discard_rows(discarded: Iterable[tuple[RolloutId, str]]) -> list[list[Any]]:
    """Discarded ids in JSON: rows of `to_rows` with the reason at the end."""
    runs = groupby(discarded, key=lambda d: (d[0].epoch, d[0].problem, d[0].group, d[0].issue, d[1]))
    return [[*key[:4], [i.rollout for i, _ in members], key[4]] for key, members in runs]


def from_discard_rows(rows: Iterable[Sequence[Any]]) -> dict[str, list[RolloutId]]:
    """Reason to ids, from `to_discard_rows`."""
    reasons: dict[str, list[RolloutId]] = {}
    for row in rows:
        reasons.setdefault(str(row[5]), []).extend(from_rows([row]))
    return reasons
