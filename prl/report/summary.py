"""The figures of a report, worked out from a RunRecord: what `prl-report --json` prints and the text is made of."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prl.metrics import names
from prl.metrics.events import Event
from prl.report.read import Float64, RunRecord, UsageSeries
from prl.runfolder.logs import BATCH_FAILED
from prl.runfolder.preflight import PreflightFacts


@dataclass(frozen=True)
class Spread:
    """Of one quantity over all steps that have it."""

    p50: float
    p95: float
    max: float


@dataclass(frozen=True)
class TrainerTime:
    """Shares of the trainer's time in steps; they add up to 1."""

    computing: float
    waiting: float
    sending: float


@dataclass(frozen=True)
class RoleUsage:
    role: str
    processes: int
    cpu_s: float  # of all attempts
    max_rss_bytes: float  # of the largest process


@dataclass(frozen=True)
class Samplers:
    """Who of the samplers failed, in all attempts."""

    serving: int  # at the last change
    restarts: int
    seeded: int  # got their weights from another one
    fenced: Mapping[str, int]  # by reason
    changes: Sequence[tuple[float, str]]  # seconds since the attempt's first event, what happened; from the first trouble on


@dataclass(frozen=True)
class Engines:
    """What vLLM counted, over all samplers and attempts; the spreads over the lines that they wrote."""

    kv_cache_share: Spread | None  # in use: 0 to 1
    prefix_hit_share: Spread | None  # of prompts' tokens: 0 to 1
    waiting: Spread | None  # requests of one sampler
    preemptions: int


@dataclass(frozen=True)
class Summary:
    """Everything is None, NaN or empty where the run has not said it (yet)."""

    folder: str
    name: str
    mode: str
    outcome: str  # of the last attempt; "running" where it has no exit.json but wrote something not long ago
    cause: str
    role: str | None
    code: int | None
    attempts: Sequence[Mapping[str, Any]]
    started: float | None  # seconds since the epoch
    ended: float | None  # or of the newest event
    duration_s: float | None
    start_up: Sequence[tuple[str, float]]  # phases of the last attempt, seconds since its first
    preflight: PreflightFacts | None  # what its nodes were like before that
    steps: int  # the newest optimizer step
    steps_planned: int | None
    rewards: Sequence[tuple[int, float]]  # (step, mean reward of the trained rollouts)
    evaluations: Mapping[str, Sequence[tuple[int, float]]]  # by domain: (step of the version, held-out mean reward)
    latest: Mapping[str, float]  # loss, entropy and the like at the newest step that has them
    lag_mean: float
    lag_max: float
    lag_shares: Mapping[int, float]  # of the trained tokens
    max_lag: int | None  # the limit
    mixed_version_share: float
    skipped_steps: int  # whose gradient was not finite
    trained_tokens: float
    trained_tokens_per_s: float
    rollouts: float
    rollouts_per_s: float
    step_s: Spread | None
    step_file_s: Spread | None  # from a step's last rollout to its file, without the filesystem's time
    trainer_time: TrainerTime | None
    stall_s: Spread | None  # of the trainer, for a version
    transfer_s: Spread | None  # of a version
    pause_s: Spread | None
    receive_s: Spread | None
    gap_s: Spread | None
    sent_bytes: Spread | None  # of a version
    changed_share: Spread | None  # of the values, in versions of which only those were sent
    passed_over: int  # versions that were never sent, since an update outlasted a step
    samplers: Samplers | None  # None: none ever failed
    engines: Engines | None
    usage: Sequence[RoleUsage]
    discards: Mapping[str, int]
    notes: Sequence[str]  # what could not be read
    files: Mapping[str, tuple[int, int]]  # folder: (files, bytes)


RUNNING_FOR_S = 120.0  # a run without exit.json that was silent for longer is not called running
_LATEST = (names.LOSS, names.GRAD_NORM, names.ENTROPY, names.ESS, names.OUTPUT_TOKENS_MEAN, names.CUT_SHARE)


def summarize(record: RunRecord, now: float) -> Summary:
    """`now` in seconds since the epoch decides whether a run without exit.json still counts as running."""
    steps = record.steps
    weights = record.weights if len(record.weights) else steps
    options = record.config.get("run") or {}
    outcome, cause, role, code = _outcome(record, now)
    started = min([a.started for a in record.attempts if a.started is not None] + [p.time for p in record.phases], default=None)
    last_end = record.attempts[-1].ended if record.attempts else None
    ended = last_end if last_end is not None else record.newest_event
    seconds = np.nansum(steps.column(names.STEP_S))
    tokens, rollouts = np.nansum(steps.column(names.TOKENS)), np.nansum(steps.column(names.ROLLOUTS))
    return Summary(
        folder=str(record.path),
        name=str(options.get("name") or record.path.name),
        mode=str(options.get("mode") or ""),
        outcome=outcome,
        cause=cause,
        role=role,
        code=code,
        attempts=[dataclasses.asdict(attempt) for attempt in record.attempts],
        started=started,
        ended=ended,
        duration_s=None if started is None or ended is None else ended - started,
        start_up=_start_up(record),
        preflight=record.preflight,
        steps=int(steps.step[-1]) if len(steps) else 0,
        steps_planned=options.get("steps"),
        rewards=_curve(steps.step, steps.column(names.REWARD_MEAN)),
        evaluations={
            domain: _curve(table.step, table.column(names.EVAL_REWARD_MEAN)) for domain, table in record.evaluations.items()
        },
        latest={name: value for name in _LATEST if not math.isnan(value := _last(steps.column(name)))},
        lag_mean=_weighted_mean(steps.column(names.LAG_MEAN), steps.column(names.TOKENS)),
        lag_max=_max(steps.column(names.LAG_MAX)),
        lag_shares=_lag_shares(steps.columns),
        max_lag=options.get("max_lag"),
        mixed_version_share=_weighted_mean(steps.column(names.MIXED_VERSION_SHARE), steps.column(names.ROLLOUTS)),
        skipped_steps=int(np.nansum(steps.column(names.SKIPPED))),
        trained_tokens=float(tokens),
        trained_tokens_per_s=_ratio(tokens, seconds),
        rollouts=float(rollouts),
        rollouts_per_s=_ratio(rollouts, seconds),
        step_s=_spread(steps.column(names.STEP_S)),
        step_file_s=_spread(steps.column(names.READY_S) - steps.column(names.PUBLISH_S)),
        trainer_time=_trainer_time(record),
        stall_s=_spread(steps.column(names.SEND_S)),
        transfer_s=_spread(weights.column(names.TRANSFER_S)),
        pause_s=_spread(weights.column(names.PAUSE_S)),
        receive_s=_spread(weights.column(names.RECEIVE_S)),
        gap_s=_spread(weights.column(names.GAP_S)),
        sent_bytes=_spread(weights.column(names.SENT_BYTES)),
        changed_share=_spread(weights.column(names.CHANGED_SHARE)),
        passed_over=int(np.nansum(record.weights.column(names.PASSED_OVER))),
        samplers=_samplers(record),
        engines=_engines(record.engines),
        usage=_usage(record.usage),
        discards=record.discards,
        notes=record.notes,
        files={size.name: (size.files, size.size_bytes) for size in record.sizes},
    )


def as_json(summary: Summary) -> dict[str, Any]:
    """Plain values for a JSON file: NaN becomes null."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(summary))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _outcome(record: RunRecord, now: float) -> tuple[str, str, str | None, int | None]:
    if not record.attempts:
        return "not started", "submitted, but no attempt has begun", None, None
    last = record.attempts[-1]
    if last.outcome is not None:
        return last.outcome, last.cause, last.role, last.code
    if not last.begun and BATCH_FAILED in last.batch_end:
        return "failed", last.batch_end, None, None
    said = f"; its batch log ends: {last.batch_end}" if last.batch_end else ""
    if record.newest_event is None:
        return (
            "unknown",
            f"attempt {last.number} has written neither metrics nor exit.json (yet): see its logs{said}",
            None,
            None,
        )
    silent_s = now - record.newest_event
    if silent_s < RUNNING_FOR_S:
        return "running", f"newest event {max(silent_s, 0):.0f} s ago", None, None
    return "lost", f"no exit.json, and silent for {silent_s:.0f} s: killed, or its node is gone{said}", None, None


def _start_up(record: RunRecord) -> Sequence[tuple[str, float]]:
    if not record.phases:
        return ()
    phases = [phase for phase in record.phases if phase.attempt == record.phases[-1].attempt]
    first: dict[str, float] = {}  # several processes may say the same
    for phase in phases:
        first.setdefault(phase.name, phase.time - phases[0].time)
    return list(first.items())


def _curve(step: np.typing.NDArray[np.int64], value: Float64) -> Sequence[tuple[int, float]]:
    return [(int(k), float(x)) for k, x in zip(step, value, strict=True) if not math.isnan(x)]


def _known(values: Float64) -> Float64:
    known: Float64 = values[~np.isnan(values)]
    return known


def _last(values: Float64) -> float:
    known = _known(values)
    return float(known[-1]) if len(known) else math.nan


def _max(values: Float64) -> float:
    known = _known(values)
    return float(known.max()) if len(known) else math.nan


def _weighted_mean(values: Float64, weights: Float64) -> float:
    """Over rows that have a value; rows count alike where the weights are not known."""
    known = ~np.isnan(values)
    if not known.any():
        return math.nan
    chosen = weights[known]
    usable = not np.isnan(chosen).any() and chosen.sum() > 0
    return float(np.average(values[known], weights=chosen if usable else None))


def _ratio(amount: float, seconds: float) -> float:
    return float(amount / seconds) if seconds > 0 else math.nan


def _spread(values: Float64) -> Spread | None:
    known = _known(values)
    if not len(known):
        return None
    return Spread(float(np.percentile(known, 50)), float(np.percentile(known, 95)), float(known.max()))


def _lag_shares(columns: Mapping[str, Float64]) -> Mapping[int, float]:
    counts = {
        int(name.removeprefix(names.LAG_COUNT_PREFIX)): float(np.nansum(column))
        for name, column in columns.items()
        if name.startswith(names.LAG_COUNT_PREFIX) and name.removeprefix(names.LAG_COUNT_PREFIX).isdigit()
    }
    total = sum(counts.values())
    return {lag: counts[lag] / total for lag in sorted(counts)} if total else {}


def _trainer_time(record: RunRecord) -> TrainerTime | None:
    seconds = record.steps.column(names.STEP_S)
    total = float(np.nansum(seconds))
    if total <= 0:
        return None
    waiting = float(np.nansum(record.steps.column(names.WAIT_S))) / total
    sending = float(np.nansum(record.steps.column(names.SEND_S))) / total
    return TrainerTime(computing=1 - waiting - sending, waiting=waiting, sending=sending)


def _samplers(record: RunRecord) -> Samplers | None:
    last = {change.attempt: change for change in record.samplers}  # of each attempt: its counts are so far
    fenced: dict[str, int] = {}
    for change in last.values():
        for name, value in change.values.items():
            if name.startswith(names.FENCED_PREFIX):
                reason = name.removeprefix(names.FENCED_PREFIX)
                fenced[reason] = fenced.get(reason, 0) + int(value)
    if not fenced:
        return None
    began: dict[int, float] = {}
    for phase in record.phases:
        began.setdefault(phase.attempt, phase.time)
    troubled = [change for change in record.samplers if any(n.startswith(names.FENCED_PREFIX) for n in change.values)]
    return Samplers(
        serving=int(record.samplers[-1].values.get(names.SERVING, 0)),
        restarts=sum(int(change.values.get(names.RESTARTS, 0)) for change in last.values()),
        seeded=sum(int(change.values.get(names.SEEDED, 0)) for change in last.values()),
        fenced=fenced,
        changes=[(change.time - began.get(change.attempt, change.time), change.words) for change in troubled],
    )


def _engines(events: Sequence[Event]) -> Engines | None:
    if not events:
        return None

    def spread(name: str) -> Spread | None:
        return _spread(np.array([event.values.get(name, math.nan) for event in events], np.float64))

    preemptions, last = 0, dict[tuple[int, int], int]()
    for event in events:
        who, count = (event.attempt, event.index), int(event.values.get(names.PREEMPTIONS, 0))
        before = last.get(who, 0)
        preemptions += count - before if count >= before else count  # a process that was started again counts anew
        last[who] = count
    return Engines(spread(names.KV_CACHE_SHARE), spread(names.PREFIX_HIT_SHARE), spread(names.ENGINE_WAITING), preemptions)


def _usage(series: Sequence[UsageSeries]) -> Sequence[RoleUsage]:
    roles: dict[str, list[UsageSeries]] = {}
    for one in series:
        roles.setdefault(one.role, []).append(one)
    return [
        RoleUsage(
            role=role,
            processes=len({one.process for one in found}),
            cpu_s=sum(_max(one.cpu_s) for one in found),
            max_rss_bytes=max(_max(one.max_rss_bytes) for one in found),
        )
        for role, found in sorted(roles.items())
    ]
