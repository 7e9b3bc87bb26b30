"""How answers are judged. A rule gives the verdict of one answer against the gold one; it may take for ever, the pool has
the deadline."""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import math_verify

from prl.domains.answers import final_answer

CORRECT, WRONG, NO_ANSWER, UNPARSABLE, TIMEOUT = "correct", "wrong", "no_answer", "unparsable", "timeout"


def math(gold: str, answer: str) -> str:
    r"""math-verify on the answer's last \boxed{...} or ####. Raises ValueError where the gold answer cannot be parsed."""
    found = final_answer(answer)
    if found is None:
        return NO_ANSWER
    if found == gold.strip():
        return CORRECT
    parsed_gold = _parse(gold)
    if not parsed_gold:
        raise ValueError(f"math-verify cannot parse the gold answer {gold!r}")
    parsed = _parse(found)
    # The order matters: verify is not symmetric. Its own time-out is off, the worker is killed from outside instead.
    if parsed and math_verify.verify(list(parsed_gold), list(parsed), timeout_seconds=None):
        return CORRECT
    # What math-verify cannot read it keeps as text, to be compared as such.
    return UNPARSABLE if all(isinstance(form, str) for form in parsed) else WRONG


RULES: dict[str, Callable[[str, str], str]] = {"math": math}


@lru_cache(256)  # a group shares its gold answer
def _parse(answer: str) -> tuple[Any, ...]:
    # A bare x^2+2x+1 would not be seen as mathematics.
    return tuple(math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None))


def prepare() -> None:
    """Run every rule once, so that the first real check finds everything imported."""
    for name in ("math_verify", "math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a warning for every answer that does not parse
    math("2", r"\boxed{\frac{4}{2}}")
