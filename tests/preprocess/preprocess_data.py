"""Groups for the preprocessor's tests."""

from collections.abc import Sequence

import numpy as np

from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.streams.contract import Published
from prl.streams.records import Group, Rollout, Turn, VersionSpan


def turn(prompt, output, versions=((3, None),), finish="stop", lineage=0) -> Turn:
    """`versions`: (step, end) of each span; None: up to the end."""
    spans, start = [], 0
    for step, end in versions:
        end = len(output) if end is None else end
        spans.append(VersionSpan(Version(lineage, step), start, end))
        start = end
    logprobs = -np.array(output, np.float32) / 10
    return Turn(np.array(prompt, np.int32), np.array(output, np.int32), logprobs, tuple(spans), finish, 0, 0.0, 1.0)


def group(*rollouts: tuple[list[Turn], float], number=0, issue=0, numbers: Sequence[int] = ()) -> Group:
    made = tuple(Rollout(tuple(turns), reward) for turns, reward in rollouts)
    return Group(0, "d", "", f"d/{number}", number, issue, made, tuple(numbers))


def ids(number: int, *rollouts: int) -> list[RolloutId]:
    return [RolloutId(0, f"d/{number}", number, k, 0) for k in rollouts]


def small(number: int, version: int = 0, rewards=(0.0, 1.0), finish="stop", issue=0, numbers: Sequence[int] = ()) -> Group:
    """Two prompt tokens and two output tokens a rollout."""
    rollouts = [([turn([1, 1], [1, 1], ((version, None),), finish)], reward) for reward in rewards]
    return group(*rollouts, number=number, issue=issue, numbers=numbers)


def entry(number: int, size: int = 100) -> Published:
    """An entry of the stream that only its name is asked of."""
    return Published(f"entry-{number}", "actor-000", 1, number, size, "00000000")
