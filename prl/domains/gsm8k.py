r"""Word problems from parquet or jsonl files, answered in \boxed{...} or behind ####, judged by math-verify.

Files have the columns problem (or question) and answer; an answer may be a whole solution that ends with `#### 42` or
\boxed{42}. Any mathematics data of that form will do. Rewards come from a table by verdict, another one for answers that
were cut at the token limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prl.domains.answers import final_answer
from prl.domains.api import Context, DomainError, Problem, Sampler
from prl.domains.rows import read_rows
from prl.domains.settings import read_options
from prl.streams.records import Rollout

NEEDS_VERIFIER = True
VERDICTS = ("correct", "wrong", "no_answer", "unparsable", "timeout")
_ZEROS = dict.fromkeys(VERDICTS, 0.0)


@dataclass(frozen=True)
class Gsm8kOptions:
    paths: tuple[str, ...] = ()  # files to train on
    evaluate_paths: tuple[str, ...] = ()  # files to evaluate on
    template: str = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."
    system: str = ""  # system prompt; empty: none of our own
    limit: int = 0  # first so many problems of the training files; 0: all
    evaluate_limit: int = 0  # first so many problems of the evaluation files; 0: all
    rewards: Mapping[str, float] = field(default_factory=lambda: {**_ZEROS, "correct": 1.0})
    rewards_cut: Mapping[str, float] = field(default_factory=lambda: dict(_ZEROS))  # of answers cut at the token limit


def check_options(options: Mapping[str, Any]) -> None:
    """Of the files only the first row is read."""
    settings = _checked(options)
    for path in (*settings.paths, *settings.evaluate_paths):
        row = next(iter(read_rows(Path(path))), None)
        if row is None:
            raise DomainError(f"{path}: has no rows; give a file with problems, or leave it out")
        _problem(row, f"{path}, row 0", settings, dataset="")


def has_held_out(options: Mapping[str, Any]) -> bool:
    return bool(_checked(options).evaluate_paths)


def _checked(options: Mapping[str, Any]) -> Gsm8kOptions:
    settings = read_options(Gsm8kOptions, options, "gsm8k")
    if not settings.paths:
        raise DomainError("domain gsm8k: option paths names no file; give parquet or jsonl files with problem and answer")
    if "{problem}" not in settings.template:
        raise DomainError("domain gsm8k: option template must contain {problem}")
    for name in ("limit", "evaluate_limit"):
        if getattr(settings, name) < 0:
            raise DomainError(f"domain gsm8k: option {name} must not be negative")
    for path in (*settings.paths, *settings.evaluate_paths):
        if not Path(path).is_file():
            raise DomainError(f"domain gsm8k: there is no file {Path(path).absolute()}")
    return settings


def load_problems(options: Mapping[str, Any], split: str, seed: int) -> Sequence[Problem]:
    """Problems in the order of the files and of their rows."""
    settings = _checked(options)
    if split not in ("train", "evaluate"):
        raise DomainError(f'domain gsm8k has the splits "train" and "evaluate", not {split!r}')
    paths, limit = (settings.paths, settings.limit) if split == "train" else (settings.evaluate_paths, settings.evaluate_limit)
    problems: list[Problem] = []
    for path in paths:
        for number, row in enumerate(read_rows(Path(path))):
            if limit and len(problems) == limit:
                return problems
            problems.append(_problem(row, f"{path}, row {number}", settings, Path(path).name.split(".")[0]))
    return problems


def _problem(row: Mapping[str, Any], where: str, settings: Gsm8kOptions, dataset: str) -> Problem:
    question = row.get("problem", row.get("question"))
    answer = row.get("answer")
    if not isinstance(question, str) or answer is None:
        raise DomainError(f"{where}: expected the columns problem (or question) and answer; found {', '.join(row)}")
    gold = final_answer(str(answer)) or str(answer).strip()
    if not gold:
        raise DomainError(f"{where}: the answer is empty")
    messages = [{"role": "user", "content": settings.template.replace("{problem}", question)}]
    if settings.system:
        messages.insert(0, {"role": "system", "content": settings.system})
    return Problem({"messages": messages, "gold": gold, "settings": settings}, dataset=dataset)


async def generate_rollout(problem: Problem, sampler: Sampler, context: Context) -> Rollout:
    """One answer. Its reward is set by `score_group`."""
    turn = await sampler.generate(context.tokenizer.chat(problem.data["messages"]))
    return Rollout((turn,), reward=0.0)


async def score_group(problem: Problem, rollouts: Sequence[Rollout], context: Context) -> Sequence[Rollout]:
    """Asks the verifier once for the whole group. Only the final answers travel, so equal ones are checked once."""
    if context.verifier is None:
        raise DomainError("domain gsm8k needs a verifier, and this run has none: verifier.processes must be at least 1")
    answers = [final_answer(context.tokenizer.decode(rollout.turns[-1].output_ids.tolist())) for rollout in rollouts]
    asked = [f"\\boxed{{{answer}}}" for answer in answers if answer is not None]
    verdicts = iter(await context.verifier.check("math", problem.data["gold"], asked) if asked else ())
    return [
        _scored(rollout, "no_answer" if answer is None else next(verdicts), problem.data["settings"])
        for rollout, answer in zip(rollouts, answers, strict=True)
    ]


def _scored(rollout: Rollout, verdict: str, settings: Gsm8kOptions) -> Rollout:
    table = settings.rewards_cut if rollout.turns[-1].finish_reason == "length" else settings.rewards
    return replace(rollout, reward=table[verdict], metrics={f"verdict/{verdict}": 1.0})
