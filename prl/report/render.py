"""A summary as text for a terminal, 100 columns wide."""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from prl.metrics import names
from prl.report.summary import Engines, Spread, Summary
from prl.runfolder.preflight import PreflightFacts

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_COLUMNS = 60
_TABLE_ROWS = 12
_CHANGES = 20  # of the samplers, that are told one by one
_LATEST_WORDS = {
    names.LOSS: "loss",
    names.GRAD_NORM: "gradient norm",
    names.ENTROPY: "entropy",
    names.ESS: "effective sample size",
    names.OUTPUT_TOKENS_MEAN: "tokens an answer",
    names.CUT_SHARE: "answers cut",
}


def render(summary: Summary) -> str:
    """The whole report; sections of which the run has said nothing are left out."""
    lines = list(_header(summary))
    for title, section in (
        ("learning", _learning(summary)),
        ("data", _data(summary)),
        ("time", _time(summary)),
        ("weights", _weights(summary)),
        ("samplers", _samplers(summary)),
        ("processes", _processes(summary)),
        ("discarded rollouts", _discards(summary)),
        ("files", _files(summary)),
        ("notes", iter(summary.notes)),
    ):
        body = list(section)
        if body:
            lines += ["", title, *(f"  {line}" for line in body)]
    lines += ["", f"run folder  {summary.folder}"]
    return "\n".join(lines)


def sparkline(values: Sequence[float], columns: int = _CURVE_COLUMNS) -> str:
    """Bars between the least and the largest value; more values than columns are averaged in equal parts."""
    if not values:
        return ""
    count = min(columns, len(values))
    edges = [round(k * len(values) / count) for k in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _header(s: Summary) -> Iterator[str]:
    yield f"{s.name}: {s.outcome}" + (f" (exit code {s.code})" if s.code is not None else "")
    if s.cause:
        yield f"  cause       {s.cause}" + (f" [{s.role}]" if s.role else "")
    progress = f"{s.steps}" + (f" of {s.steps_planned}" if s.steps_planned else "")
    yield f"  steps       {progress}" + (f", mode {s.mode}" if s.mode else "")
    if s.started is not None:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(s.started))
        yield f"  started     {begun}" + (f", {_duration(s.duration_s)}" if s.duration_s is not None else "")
    if len(s.attempts) > 1:
        for attempt in s.attempts:
            words = attempt["outcome"] or s.outcome
            cause = f": {attempt['cause']}" if attempt["cause"] else ""
            yield f"  attempt {attempt['number']:<3} {words}{cause}"


def _learning(s: Summary) -> Iterator[str]:
    if s.rewards:
        values = [value for _, value in s.rewards]
        yield f"reward      {values[0]:.3f} {sparkline(values)} {values[-1]:.3f}"
    for domain, points in s.evaluations.items():
        if not points:
            continue
        values = [value for _, value in points]
        best_step, best = max(points, key=lambda point: point[1])
        of_domain = f" ({domain})" if len(s.evaluations) > 1 else ""
        yield f"held-out    {values[0]:.3f} {sparkline(values)} {values[-1]:.3f}{of_domain}"
        yield f"  best      {best:.3f} at step {best_step}"
        shown = _thinned(points)
        yield "  at step   " + " ".join(f"{step:>6}" for step, _ in shown)
        yield "  reward    " + " ".join(f"{value:>6.3f}" for _, value in shown)
    if s.skipped_steps:
        yield f"skipped     {s.skipped_steps:,} steps left the weights as they were: their gradient was not finite"
    if s.latest:
        yield "newest      " + ", ".join(f"{_LATEST_WORDS[name]} {value:.4g}" for name, value in s.latest.items())


def _data(s: Summary) -> Iterator[str]:
    if not math.isnan(s.lag_mean):
        limit = f" (limit {s.max_lag})" if s.max_lag is not None and s.mode != "conventional" else ""
        yield f"lag         mean {s.lag_mean:.2f}, largest {s.lag_max:.0f} steps{limit}"
    if s.lag_shares:
        yield "  of tokens " + "   ".join(f"{lag}: {_percent(share)}" for lag, share in s.lag_shares.items())
    if not math.isnan(s.mixed_version_share):
        yield f"versions    {_percent(s.mixed_version_share)} of the rollouts were sampled by more than one version"
    if s.trained_tokens:
        yield f"trained     {s.trained_tokens:,.0f} tokens" + _rate(s.trained_tokens_per_s)
    if s.rollouts:
        yield f"            {s.rollouts:,.0f} rollouts" + _rate(s.rollouts_per_s)


def _time(s: Summary) -> Iterator[str]:
    if s.start_up:
        yield "start-up    " + ", ".join(f"{name} at {seconds:.1f} s" for name, seconds in s.start_up)
    if s.preflight:
        yield "preflight   " + _preflight(s.preflight)
    if s.step_s:
        yield "step        " + _spread(s.step_s)
    if s.step_file_s:
        yield "step file   " + _spread(s.step_file_s) + " after its last rollout, without the filesystem's time"
    if s.trainer_time:
        t = s.trainer_time
        yield (
            f"trainer     computing {_percent(t.computing)}, waiting for data {_percent(t.waiting)}, "
            f"sending weights {_percent(t.sending)}"
        )


def _preflight(facts: PreflightFacts) -> str:
    words = f"{facts.nodes} node{'s' * (facts.nodes != 1)} in {_seconds(facts.took_s)}"
    if facts.slowest and facts.median_mib_per_s is not None:
        node, peer, speed = facts.slowest
        words += f"; TCP {facts.median_mib_per_s:,.0f} MiB/s, slowest {speed:,.0f} ({node} with {peer})"
    if facts.clock and facts.nodes > 1:
        words += f"; clocks within {_seconds(facts.clock[1])} ({facts.clock[0]})"
    return words


def _weights(s: Summary) -> Iterator[str]:
    spreads = {
        "stall": s.stall_s,  # the trainer's
        "transfer": s.transfer_s,
        "pause": s.pause_s,  # the samplers'
        "token gap": s.gap_s,
        "receive": s.receive_s,
    }
    for words, spread in spreads.items():
        if spread:
            yield f"{words:<11} " + _spread(spread)
    if s.sent_bytes:
        changed = f"; {_percent(s.changed_share.p50)} of the values had changed (p50)" if s.changed_share else ""
        yield f"sent        p50 {_bytes(s.sent_bytes.p50)}, max {_bytes(s.sent_bytes.max)} a version{changed}"
    if s.passed_over:
        yield f"passed over {s.passed_over:,} of the versions for newer ones, as an update lasted longer than a step"


def _engines(engines: Engines) -> Iterator[str]:
    for words, share in {"KV cache": engines.kv_cache_share, "prefix hits": engines.prefix_hit_share}.items():
        if share:
            yield f"{words:<11} p50 {_percent(share.p50)}, max {_percent(share.max)}"
    if engines.waiting and engines.waiting.max:
        yield f"waiting     p50 {engines.waiting.p50:,.0f}, max {engines.waiting.max:,.0f} requests of one sampler"
    if engines.preemptions:
        yield f"preempted   {engines.preemptions:,} times a request lost its KV cache to others: see sample.max_num_seqs"


def _samplers(s: Summary) -> Iterator[str]:
    if s.engines is not None:
        yield from _engines(s.engines)
    if s.samplers is None:
        return
    fenced = ", ".join(f"{count} {reason}" for reason, count in s.samplers.fenced.items())
    seeded = f"{s.samplers.seeded} seeded by others; " if s.samplers.seeded else ""
    yield f"fenced      {fenced}; {s.samplers.restarts} restarts; {seeded}{s.samplers.serving} serving at the last change"
    shown = s.samplers.changes[:_CHANGES]
    for seconds, words in shown:
        yield f"{seconds:>9.1f} s {words}"
    if len(s.samplers.changes) > len(shown):
        yield f"and {len(s.samplers.changes) - len(shown)} changes more"


def _processes(s: Summary) -> Iterator[str]:
    for role in s.usage:
        count = f" x {role.processes}" if role.processes > 1 else ""
        yield f"{role.role + count:<16} {role.cpu_s:>9.1f} CPU s   {_bytes(role.max_rss_bytes):>9}"


def _discards(s: Summary) -> Iterator[str]:
    for reason, count in s.discards.items():
        yield f"{count:>9,}  {reason}"


def _files(s: Summary) -> Iterator[str]:
    for name, (files, size_bytes) in s.files.items():
        if files:
            yield f"{name:<20} {files:>6} files {_bytes(size_bytes):>10}"


def _thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """The first, the last, and some between them."""
    if len(points) <= _TABLE_ROWS:
        return points
    chosen = [round(k * (len(points) - 1) / (_TABLE_ROWS - 1)) for k in range(_TABLE_ROWS)]
    return [points[k] for k in chosen]


def _spread(spread: Spread) -> str:
    return f"p50 {_seconds(spread.p50)}, p95 {_seconds(spread.p95)}, max {_seconds(spread.max)}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _rate(per_s: float) -> str:
    return "" if math.isnan(per_s) else f", {per_s:,.0f}/s of the trainer's time"


def _bytes(amount: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
