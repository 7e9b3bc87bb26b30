"""What a task is made of. A domain is a module with two functions, and a third where rewards are judged by the group:

    def load_problems(options, split, seed) -> Sequence[Problem]
    async def generate_rollout(problem, sampler, context) -> Rollout
    async def score_group(problem, rollouts, context) -> Sequence[Rollout]      (optional)

`split` is "train" or "evaluate"; both calls must give the same problems in every process of a run. `generate_rollout` asks
the sampler for one or more turns and gives the answer with its reward; with `score_group` the rewards may be set there
instead, once a group. An exception in either fails that group alone: it is counted and sampled again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prl.streams.records import Rollout, Turn


@dataclass(frozen=True, slots=True)
class Problem:
    """`data` is the domain's own: text, gold answer, anything its functions need."""

    data: Mapping[str, Any]
    dataset: str = ""


class Sampler(Protocol):
    """Answers prompts. Equal prompts asked for at once go out as one request."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Turn:
        """One answer; `None` stands for the config's value. Raises SamplerError when no replica answers in time."""
        ...


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The model's chat template with the generation prompt, as ids."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...


class Verifier(Protocol):
    async def check(self, rule: str, gold: str, answers: Sequence[str]) -> Sequence[str]:
        """Verdict of each answer: "correct", "wrong", "no_answer", "unparsable" or "timeout"."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    tokenizer: Tokenizer
    verifier: Verifier | None
    options: Mapping[str, Any] = field(default_factory=dict)
