"""Rollout ids as single numbers, and findings that name them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
SHOWN = 5  # findings of one kind that are named,
SHOWN_IN_ALL = 40  # and of all kinds


class Ids:
    """(group, issue, rollout) in 63 bits, sorted as the three are; epoch and problem follow from the group."""

    ROLLOUT_BITS = 16
    ISSUE_BITS = 12
    GROUP_BITS = 35

    @classmethod
    def in_range(cls, group: Int64, issue: Int64, rollout: Int64) -> npt.NDArray[np.bool_]:
        bounds = ((group, cls.GROUP_BITS), (issue, cls.ISSUE_BITS), (rollout, cls.ROLLOUT_BITS))
        sound: npt.NDArray[np.bool_] = np.logical_and.reduce([(values >= 0) & (values < 1 << bits) for values, bits in bounds])
        return sound

    @classmethod
    def keys(cls, group: Any, issue: Any, rollout: Any) -> Int64:
        columns = [np.asarray(values, np.int64) for values in (group, issue, rollout)]
        return (((columns[0] << cls.ISSUE_BITS) | columns[1]) << cls.ROLLOUT_BITS) | columns[2]

    @classmethod
    def of_pair(cls, pair: int, rollouts: Int64) -> Int64:
        return (pair << cls.ROLLOUT_BITS) | rollouts

    @classmethod
    def rollout(cls, keys: Int64) -> Int64:
        return keys & ((1 << cls.ROLLOUT_BITS) - 1)

    @classmethod
    def group_of_pair(cls, pairs: Int64) -> Int64:
        return pairs >> cls.ISSUE_BITS

    @classmethod
    def issue_of_pair(cls, pairs: Int64) -> Int64:
        return pairs & ((1 << cls.ISSUE_BITS) - 1)

    @classmethod
    def words(cls, key: int) -> str:
        pair = key >> cls.ROLLOUT_BITS
        return f"{cls.words_of_pair(pair)} rollout {key & ((1 << cls.ROLLOUT_BITS) - 1)}"

    @classmethod
    def words_of_pair(cls, pair: int) -> str:
        return f"group {pair >> cls.ISSUE_BITS} issue {pair & ((1 << cls.ISSUE_BITS) - 1)}"


def pairs_of(keys: Int64) -> Int64:
    """(group, issue) of ids, as single numbers."""
    return keys >> Ids.ROLLOUT_BITS


def gaps(numbers: Int64, first: int = 0) -> list[tuple[int, int]]:
    """(from, to), both inclusive, of the numbers from `first` on that are missing below the greatest."""
    held = np.unique(np.append(numbers[numbers >= first], first - 1))
    before = np.flatnonzero(np.diff(held) > 1)
    return list(zip((held[before] + 1).tolist(), (held[before + 1] - 1).tolist(), strict=True))


def numbered(noun: str, start: int, end: int) -> str:
    return f"{noun} {start}" if start == end else f"{noun}s {start} to {end}"


class Findings:
    """What is wrong, all is counted, the first few of each kind are named."""

    def __init__(self) -> None:
        self.count = 0
        self.named: list[tuple[str, str]] = []  # (what is concerned, what is wrong)

    def add_ids(self, keys: Int64, wrong: str | Callable[[int], str]) -> None:
        """The same is wrong with each of these ids."""
        self._add([(Ids.words(key), _said(wrong, key)) for key in keys[:SHOWN].tolist()], len(keys))

    def add_groups(self, pairs: Int64, wrong: str | Callable[[int], str]) -> None:
        """The same is wrong with each of these groups, as pairs of group and issue."""
        self._add([(Ids.words_of_pair(pair), _said(wrong, pair)) for pair in pairs[:SHOWN].tolist()], len(pairs))

    def add(self, what: str, wrong: str) -> None:
        self._add([(what, wrong)], 1)

    def _add(self, first: list[tuple[str, str]], count: int) -> None:
        self.count += count
        self.named += first[: SHOWN_IN_ALL - len(self.named)]


def _said(wrong: str | Callable[[int], str], key: int) -> str:
    return wrong if isinstance(wrong, str) else wrong(key)
