"""A task that a tiny model learns from random initialisation: four digits and "=", answered by each digit plus 1, modulo 10.

"3194=" is answered by "4205" and the end of text. The reward is the share of these five positions that are right. Of the
10,000 prompts 512 are held out; which ones is fixed, whatever the seed of the run.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

from prl.domains.api import Context, DomainError, Problem, Sampler
from prl.domains.settings import read_options
from prl.streams.records import Rollout

DIGITS = 4
HELD_OUT = 512
ANSWER_TOKENS = DIGITS + 1  # the digits and the end of text
_SPLIT_SEED = 20250919


@dataclasses.dataclass(frozen=True)
class DigitsOptions:
    """The task has no options."""


def check_options(options: Mapping[str, Any]) -> None:
    read_options(DigitsOptions, options, "digits")


def load_problems(options: Mapping[str, Any], split: str, seed: int) -> Sequence[Problem]:
    """All problems of a split, in an order that depends on neither options nor seed."""
    check_options(options)
    if split == "train":
        return training_problems()
    if split == "evaluate":
        return evaluation_problems()
    raise DomainError(f'domain digits has the splits "train" and "evaluate", not {split!r}')


def training_problems() -> list[Problem]:
    return [_problem(number) for number in _shuffled_numbers()[HELD_OUT:]]


def evaluation_problems() -> list[Problem]:
    return [_problem(number) for number in _shuffled_numbers()[:HELD_OUT]]


def _shuffled_numbers() -> list[int]:
    numbers = list(range(10**DIGITS))
    random.Random(_SPLIT_SEED).shuffle(numbers)  # noqa: S311 (a split, no secret)
    return numbers


def _problem(number: int) -> Problem:
    digits = f"{number:0{DIGITS}d}"
    target = "".join(str((int(digit) + 1) % 10) for digit in digits)
    return Problem({"prompt": f"{digits}=", "target": target}, dataset="digits")


async def generate_rollout(problem: Problem, sampler: Sampler, context: Context) -> Rollout:
    tokenizer = context.tokenizer
    target_ids = (*tokenizer.encode(problem.data["target"]), tokenizer.end_ids[0])
    turn = await sampler.generate(tokenizer.encode(problem.data["prompt"]), max_tokens=ANSWER_TOKENS)
    return Rollout((turn,), reward_of(turn.output_ids.tolist(), target_ids))


def reward_of(output_ids: Sequence[int], target_ids: Sequence[int]) -> float:
    """Share of the target's positions at which the output has the same token."""
    return sum(a == b for a, b in zip(output_ids, target_ids, strict=False)) / len(target_ids)
