"""Works on one lease: the rollouts of a group, or the answers of an evaluation, all at once."""

import asyncio
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from prl.actor.tasks import Task
from prl.actor.troubles import Troubles
from prl.domains.api import Problem, Sampler, SamplerError, VerifierError
from prl.flow.ids import Lease
from prl.flow.versions import Version
from prl.streams.records import Group, Rollout, Turn
from prl.streams.rollouts import check_group

T = TypeVar("T")

_LARGEST = float(np.finfo(np.float32).max)  # rewards and metrics travel as float32
_CANCELLED_ITSELF = "the domain's code cancelled itself"
_REQUEST_FAULTS = ("refused", "too_long")  # a sampler's reasons that lie in what the domain asked: asking again is no use


class GroupFailed(Exception):
    """A lease came to nothing. `reason` is a short word that failures are counted by; the message says more."""

    def __init__(self, reason: str, message: str, *, domain_fault: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.domain_fault = domain_fault  # of the domain, neither of samplers nor verifier nor the clock


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
    rollout_s: float  # of each rollout, and of scoring a group
    tries: int
    enough: int | None = None  # rollouts that make a group; None: all


@dataclass(frozen=True, slots=True)
class SampledGroup:
    group: Group
    given_up: Mapping[int, str]  # rollouts that it lacks, with the reason


async def sample_group(task: Task, lease: Lease, sampler: Sampler, limits: Limits, troubles: Troubles) -> SampledGroup:
    """The group of a training lease, fit for the stream, without the rollouts that failed or were late where the others are
    enough. `troubles` gets those, and rollouts that have to be tried again. Raises GroupFailed."""
    problem = _problems(task, lease, 1)[0]
    what = f"group {lease.group} ({lease.problem})"
    asked = [_rollout(task, problem, sampler, limits.tries, troubles) for _ in range(lease.rollouts)]
    done, failures = await _enough(asked, limits, what)
    for number, failure in failures.items():
        troubles.add("rollout_given_up", f"rollout {number} of {failure}", trace=failure if failure.domain_fault else None)

    async def scored() -> Group:
        group = Group(
            epoch=lease.epoch,
            domain=lease.domain,
            dataset=problem.dataset,
            problem=lease.problem,
            group=lease.group,
            issue=lease.issue,
            rollouts=tuple(await _scored(task, problem, list(done.values()))),
            numbers=tuple(done) if failures else (),
        )
        check_group(group)
        return group

    group = await _within(scored(), limits, what)
    return SampledGroup(group, {number: failure.reason for number, failure in failures.items()})


async def evaluate(task: Task, lease: Lease, sampler: Sampler, limits: Limits, troubles: Troubles) -> EvaluationResult:
    """One answer to each of the `lease.rollouts` held-out problems from number `lease.index` on. Raises GroupFailed."""
    problems = _problems(task, lease, lease.rollouts)

    async def answered(problem: Problem) -> Sequence[Rollout]:
        return await _scored(task, problem, [await _rollout(task, problem, sampler, limits.tries, troubles)])

    async def evaluated() -> EvaluationResult:
        groups = await _all(answered(problem) for problem in problems)
        return _summed_up([rollout for group in groups for rollout in group], task.domain.name)

    return await _within(evaluated(), limits, f"evaluation {lease.group} of {lease.domain}")


def _summed_up(rollouts: Sequence[Rollout], domain: str) -> EvaluationResult:
    rewards = [rollout.reward for rollout in rollouts]
    mean = math.fsum(rewards) / len(rewards)
    versions = [span.version for rollout in rollouts for turn in rollout.turns for span in turn.versions]
    if not versions:
        raise ValueError(f"domain {domain} gave {len(rollouts)} rollouts without one output token in all")
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


async def _scored(task: Task, problem: Problem, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    n = len(rollouts)
    _check(task, rollouts, n, scored=task.domain.score_group is None)
    if task.domain.score_group is not None:
        (rollouts,) = await _all([task.domain.score_group(problem, rollouts, task.context)])
        _check(task, rollouts, n, scored=True)
    return rollouts


def _check(task: Task, rollouts: Sequence[Any], n: int, *, scored: bool) -> None:
    """Raises ValueError or TypeError unless these are n rollouts that the stream and the trainer can take. Rewards need only be
    there once the group is `scored`."""
    name = task.domain.name
    if len(rollouts) != n:
        raise ValueError(f"domain {name}: score_group gave {len(rollouts)} rollouts for {n}")
    for number, rollout in enumerate(rollouts):
        where = f"domain {name}, rollout {number} of {n}"
        if not isinstance(rollout, Rollout):
            raise TypeError(f"{where}: expected a Rollout, got {_shown(rollout)}")
        if not rollout.turns or not all(_is_whole(turn) for turn in rollout.turns):
            raise ValueError(f"{where}: expected turns as the sampler gives them, got {_shown(rollout.turns)}")
        if scored and not _is_float32(rollout.reward):
            raise ValueError(f"{where}: the reward must be a finite number in float32, got {_shown(rollout.reward)}")
        for key, value in rollout.metrics.items():
            if not isinstance(key, str) or not _is_float32(value):
                raise ValueError(f"{where}: metric {_shown(key)} must be a finite number in float32, got {_shown(value)}")


def _is_float32(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and bool(-_LARGEST <= value <= _LARGEST)


def _is_whole(turn: Any) -> bool:
    return isinstance(turn, Turn) and all(
        isinstance(array, np.ndarray) and array.ndim == dimensions and array.dtype == dtype
        for array, dimensions, dtype in (
            (turn.prompt_ids, 1, np.int32),
            (turn.output_ids, 1, np.int32),
            (turn.logprobs, 1, np.float32),
            *([] if turn.routings is None else [(turn.routings, 3, np.int16)]),
        )
    )


def _shown(value: Any) -> str:
    return repr(value)[:200]


async def _rollout(task: Task, problem: Problem, sampler: Sampler, tries: int, troubles: Troubles) -> Rollout:
    left = tries
    while True:
        left -= 1
        try:
            return await task.domain.generate_rollout(problem, sampler, task.context)
        except (SamplerError, VerifierError) as error:
            if left <= 0 or _is_domain_fault(error):
                troubles.counts[_reason(error)] += 1  # its failure tells of it
                raise
            troubles.add(_reason(error), f"a rollout of {task.domain.name} is tried again: {error}")


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first exception cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if any(done.cancelled() for done in running):
        raise RuntimeError(_CANCELLED_ITSELF)  # not by us: then we would not be here
    return [done.result() for done in running]


async def _enough(
    coroutines: Iterable[Coroutine[Any, Any, T]], limits: Limits, what: str
) -> tuple[dict[int, T], dict[int, GroupFailed]]:
    """Results and failures by number. Raises GroupFailed as soon as no `limits.enough` results can come any more."""
    running = [asyncio.create_task(coroutine) for coroutine in coroutines]
    most = len(running) - min(limits.enough or len(running), len(running))  # that may fail
    failures: dict[int, GroupFailed] = {}
    unfinished: set[asyncio.Task[T]] = set(running)
    loop = asyncio.get_running_loop()
    end = loop.time() + limits.rollout_s
    try:
        while unfinished and loop.time() < end and len(failures) <= most:
            _, unfinished = await asyncio.wait(unfinished, timeout=end - loop.time(), return_when=asyncio.FIRST_EXCEPTION)
            failures = {k: failure for k, task in enumerate(running) if (failure := _failure(task, what))}
    finally:
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
    if len(failures) <= most:
        late = GroupFailed("rollout_deadline", f"{what} was not done within {limits.rollout_s:.0f} s", domain_fault=False)
        failures |= {k: late for k, task in enumerate(running) if task in unfinished}
    if len(failures) > most:
        raise next(iter(failures.values()))
    return {k: task.result() for k, task in enumerate(running) if k not in failures}, failures


def _failure(task: "asyncio.Task[Any]", what: str) -> GroupFailed | None:
    if not task.done():
        return None
    error = RuntimeError(_CANCELLED_ITSELF) if task.cancelled() else task.exception()
    if error is None:
        return None
    if not isinstance(error, Exception):
        raise error
    return _told(error, what)


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
        raise _told(error, what) from error


def _told(error: Exception, what: str) -> GroupFailed:
    failure = GroupFailed(_reason(error), f"{what}: {type(error).__name__}: {error}", domain_fault=_is_domain_fault(error))
    failure.__cause__ = error
    return failure


def _is_domain_fault(error: Exception) -> bool:
    if isinstance(error, SamplerError):
        return error.reason in _REQUEST_FAULTS
    return not isinstance(error, VerifierError)


def _reason(error: Exception) -> str:
    if isinstance(error, SamplerError):
        return f"sampler_{error.reason}"
    if isinstance(error, VerifierError):
        return f"verifier_{error.reason}"
    return f"domain_{type(error).__name__}"
