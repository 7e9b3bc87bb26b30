"""What a task is made of. A domain is a module with two functions, and two more where they are needed:

    def load_problems(options, split, seed) -> Sequence[Problem]
    async def generate_rollout(problem, sampler, context) -> Rollout
    async def score_group(problem, rollouts, context) -> Sequence[Rollout]      (optional)
    def check_options(options) -> None                                          (optional)
    def has_held_out(options) -> bool                                           (optional)
    NEEDS_VERIFIER = True                                                       (optional)

`options` are the mapping given under `domains[i].options`. `split` is "train" or "evaluate"; both calls must give the same
problems in the same order in every process of a run, and an empty evaluate split means that there is nothing to evaluate on.
`generate_rollout` asks the sampler for one or more turns and gives the answer with its reward; with `score_group` the rewards
may be set there instead, once a group. `check_options` raises DomainError for options that cannot work (a missing file, say);
it is called before a run is submitted. So is `has_held_out`, which says without loading them whether there will be problems
in the evaluate split; a domain without it is taken to have some. `NEEDS_VERIFIER` refuses runs without verifier processes.

SamplerError and VerifierError fail one rollout, which is tried again a few times; any other exception fails its group, which
is counted and sampled again. So does a prompt that samplers refuse or that does not fit their context: that is a fault of the
domain's. An actor ends when 16 groups in a row failed by their domain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prl.streams.records import Rollout, Turn


class DomainError(Exception):
    """A domain is missing or incomplete, or its options or data are wrong."""


class SamplerError(Exception):
    """No usable answer came from the samplers. `reason` is a short word that failures are counted by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class VerifierError(Exception):
    """No verdict came from the verifier. `reason` is a short word that failures are counted by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


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
        """One answer; `None` stands for the config's value. `max_tokens` is cut to what the prompt leaves of the sampler's
        context. Raises SamplerError when no replica gives a usable answer in time."""
        ...


class Tokenizer(Protocol):
    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of the text alone, without special tokens around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, without special tokens."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The model's chat template with the generation prompt, as ids. Raises DomainError where the model has none."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, the tokenizer's own one first."""
        ...


class Verifier(Protocol):
    async def check(self, rule: str, gold: str, answers: Sequence[str]) -> Sequence[str]:
        """Verdict of each answer: "correct", "wrong", "no_answer", "unparsable" or "timeout". Raises VerifierError."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """What a domain's functions work with. `verifier` is None where the run has none."""

    tokenizer: Tokenizer
    verifier: Verifier | None
    options: Mapping[str, Any] = field(default_factory=dict)


class GenerateRollout(Protocol):
    async def __call__(self, problem: Problem, sampler: Sampler, context: Context) -> Rollout: ...


class ScoreGroup(Protocol):
    async def __call__(self, problem: Problem, rollouts: Sequence[Rollout], context: Context) -> Sequence[Rollout]: ...
