"""Works on one lease: the rollouts of a group, or the answers of an evaluation, all at once."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prl.actor.tasks import Task
from prl.domains.api import Problem, Sampler, SamplerError, VerifierError
from prl.flow.ids import Lease
from prl.flow.versions import Version
from prl.streams.records import Group, Rollout

log = logging.getLogger(__name__)
T = TypeVar("T")


class GroupFailed(Exception):
    """A lease came to nothing. `reason` is a short word that failures are counted by; the message says more."""

    def __init__(self, reason: str, message: str, *, domain_fault: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.domain_fault = domain_fault  # the domain's code raised, neither samplers nor verifier nor the clock


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    reward_mean: float
    reward_std: float
    problems: int
    version_start: Version  # oldest and newest version that sampled a token
    version_end: Version
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    rollout_s: float
    tries: int


async def sample_group(task: Task, lease: Lease, sampler: Sampler, limits: Limits, errors: Counter[str]) -> Group:
    """The group of a training lease. `errors` counts rollouts that had to be tried again. Raises GroupFailed."""
    problem = _problems(task, lease, 1)[0]
    rollouts = await _within(
        _scored(task, problem, lease.rollouts, sampler, limits, errors), limits, f"group {lease.group} ({lease.problem})"
    )
    return Group(
        epoch=lease.epoch,
        domain=lease.domain,
        dataset=problem.dataset,
        problem=lease.problem,
        group=lease.group,
        issue=lease.issue,
        rollouts=tuple(rollouts),
    )


async def evaluate(task: Task, lease: Lease, sampler: Sampler, limits: Limits, errors: Counter[str]) -> EvaluationResult:
    """One answer to each of the `lease.rollouts` held-out problems from number `lease.index` on. Raises GroupFailed."""
    answers = (_scored(task, problem, 1, sampler, limits, errors) for problem in _problems(task, lease, lease.rollouts))
    groups = await _within(_all(answers), limits, f"evaluation {lease.group} of {lease.domain}")
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts]
    mean = math.fsum(rewards) / len(rewards)
    versions = [span.version for rollout in rollouts for turn in rollout.turns for span in turn.versions]
    return EvaluationResult(
        reward_mean=mean,
        reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        problems=len(rewards),
        version_start=min(versions),
        version_end=max(versions),
        output_tokens=sum(len(turn.output_ids) for rollout in rollouts for turn in rollout.turns),
    )


def _problems(task: Task, lease: Lease, count: int) -> Sequence[Problem]:
    problems = task.problems(lease.kind)[lease.index : lease.index + count]
    if len(problems) != count:
        raise GroupFailed(
            "unknown_problem",
            f"lease of {lease.kind} problems {lease.index} to {lease.index + count - 1} of {lease.domain}, "
            f"which has {len(task.problems(lease.kind))}",
            domain_fault=True,
        )
    return problems


async def _scored(
    task: Task, problem: Problem, n: int, sampler: Sampler, limits: Limits, errors: Counter[str]
) -> Sequence[Rollout]:
    rollouts: Sequence[Rollout] = await _all(_rollout(task, problem, sampler, limits.tries, errors) for _ in range(n))
    if task.domain.score_group is not None:
        rollouts = await task.domain.score_group(problem, rollouts, task.context)
    if len(rollouts) != n or not all(_is_whole(rollout) for rollout in rollouts):
        raise ValueError(
            f"domain {task.domain.name} must give {n} rollouts with turns and finite rewards: {str(rollouts)[:300]}"
        )
    return rollouts


def _is_whole(rollout: Any) -> bool:
    return isinstance(rollout, Rollout) and len(rollout.turns) > 0 and math.isfinite(rollout.reward)


async def _rollout(task: Task, problem: Problem, sampler: Sampler, tries: int, errors: Counter[str]) -> Rollout:
    left = tries
    while True:
        left -= 1
        try:
            return await task.domain.generate_rollout(problem, sampler, task.context)
        except (SamplerError, VerifierError) as error:
            errors[_reason(error)] += 1
            if left <= 0:
                raise
            log.warning("rollout of %s is tried again: %s", task.domain.name, error)


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first exception cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [done.result() for done in running]


async def _within(work: Coroutine[Any, Any, T], limits: Limits, what: str) -> T:
    """Its result before the deadline; every exception becomes GroupFailed."""
    try:
        async with asyncio.timeout(limits.rollout_s) as deadline:
            return await work
    except Exception as error:
        if deadline.expired():
            raise GroupFailed(
                "rollout_deadline", f"{what} was not done within {limits.rollout_s:.0f} s", domain_fault=False
            ) from error
        fault = not isinstance(error, SamplerError | VerifierError)
        raise GroupFailed(_reason(error), f"{what}: {type(error).__name__}: {error}", domain_fault=fault) from error


def _reason(error: Exception) -> str:
    if isinstance(error, SamplerError):
        return f"sampler_{error.reason}"
    if isinstance(error, VerifierError):
        return f"verifier_{error.reason}"
    return f"domain_{type(error).__name__}"
