"""Speed of the quickstart on this machine, as ratios from one run. A benchmark, no test: nothing here passes or fails.

    .venv/bin/python tools/bench/quickstart.py                  trains the quickstart, then both parts below
    .venv/bin/python tools/bench/quickstart.py figures RUN ...  figures of finished run folders, and their median and range
    .venv/bin/python tools/bench/quickstart.py actors           actors against a bare load generator on the same vLLM

`--seeds 1 2 3` trains it once for each of these seeds. Wants two quiet cores. `actors` starts a run of its own, stops its
trainers (SIGSTOP) once rollouts flow, puts the server on one core and its clients on the other, and lets first the actors and
then a load generator ask it for the same answers.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np
import psutil

from prl.actor.tokenizer import ModelTokenizer
from prl.config.load import load
from prl.control.token import authorization, read_token
from prl.domains import digits
from prl.metrics import names
from prl.metrics.events import EventFollower
from prl.report.read import RunRecord, read_run
from prl.report.summary import Spread, summarize
from prl.runfolder.paths import RunFolder

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
SUBMIT = [str(Path(sys.executable).with_name("prl-submit")), str(CONFIG)]
GOAL = 0.9
# To the goal with TRL's asynchronous trainer and a vLLM server, two cores of the kind these figures were taken on, start and
# evaluation excluded. Measured once, not by this program: another machine needs its own figures.
TRL_WALL_S, TRL_CPU_S = 114.0, 170.0
WARM_S, MEASURED_S = 5.0, 20.0  # of each side of `actors`
PAUSED = (
    "run.max_lag=1000000",
    "run.steps=1000000",
    "run.evaluate_every_steps=0",
    "run.stop_at_reward=null",
    "control.lost_after_s=600",
    "weights.update_s=600",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("figures").add_argument("runs", type=Path, nargs="+")
    commands.add_parser("actors")
    parser.add_argument("--seeds", type=int, nargs="+", default=[load(CONFIG).run.seed], help="seeds to train with")
    options = parser.parse_args()
    if options.command == "actors":
        print_actors()
    else:
        runs = options.runs if options.command == "figures" else [train(seed) for seed in options.seeds]
        print_figures([figures_of(run) for run in runs], runs)
        if options.command is None:
            print_actors()


def train(seed: int) -> Path:
    run = new_folder(f"bench-quickstart-seed{seed}")
    subprocess.run([*SUBMIT, "--set", f"run.folder={run}", "--set", f"run.seed={seed}"], check=True)
    return run


def new_folder(name: str) -> Path:
    candidates = (ROOT / "runs" / f"{name}-{number}" for number in range(1, 10_000))
    return next(folder for folder in candidates if not folder.exists())


# --- figures of finished runs ---


class Figure(NamedTuple):
    words: str
    value: float  # nan: not known
    unit: str
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class ToGoal:
    """From the first request for a rollout to the version that first reached the goal on held-out problems."""

    step: int | None  # None, and the rest nan: it never did
    wall_s: float
    cpu_s: float  # nan: the processes' usage was not recorded over time
    evaluation_share: float  # of all sampled rollouts


def print_figures(runs: Sequence[Sequence[Figure]], folders: Sequence[Path]) -> None:
    """A line a figure: its value in each run; where there are several, first their median and range."""
    print("\n" + "\n".join(map(str, folders)))
    for figures in zip(*runs, strict=True):
        values = np.array([figure.value for figure in figures])
        words, _, unit, remark = figures[0]
        of_runs = " ".join("     n/a" if np.isnan(value) else f"{value:8.2f}" for value in values)
        if len(values) > 1 and not np.isnan(values).any():
            of_runs = f"{np.median(values):8.2f} ({values.min():.2f} to {values.max():.2f}) of {of_runs}"
        print(f"{words:<52} {of_runs} {unit:<5} {remark}")


def figures_of(run: Path) -> list[Figure]:
    record = read_run(run)
    summary = summarize(record, time.time())
    if not len(record.steps):
        sys.exit(f"{run}: no step was trained: {summary.cause}")
    command = first(phase_time(record, names.COMMAND), summary.started)
    request = first(phase_time(record, names.FIRST_ROLLOUT_REQUEST), phase_time(record, names.RUNNING))
    last_step = float(record.steps.time[-1])
    ended = first(summary.ended, last_step)
    waiting = summary.trainer_time.waiting if summary.trainer_time else np.nan
    cpu_s = sum(role.cpu_s for role in summary.usage) if summary.usage else np.nan
    goal = to_goal(record, request)
    to_goal_s = float(record.steps.time[record.steps.step == goal.step][0]) - command if goal.step else np.nan
    return [
        Figure("command to exit", ended - command, "s"),
        Figure("steps", summary.steps, ""),
        Figure("command to first trained step", float(record.steps.time[0]) - command, "s"),
        Figure("rollouts trained, from the first request", summary.rollouts / (last_step - request), "1/s"),
        Figure("trainer waiting for data", 100 * waiting, "%"),
        *in_ms("token gap at a weight update", summary.gap_s, "goal: under 60"),
        *in_ms("pause of a sampler", summary.pause_s),
        *in_ms("last rollout to step file, without the disk's time", summary.step_file_s),
        Figure("CPU seconds a step, start included", cpu_s / summary.steps, "s"),
        Figure("CPU seconds a step, live", cpu_between(record, request, last_step) / summary.steps, "s", "goal: under 1.0"),
        Figure(f"step that reached {GOAL} on held-out problems", goal.step or np.nan, ""),
        Figure("  wall seconds from the command", to_goal_s, "s"),
        Figure("  wall seconds from the first request", goal.wall_s, "s"),
        Figure("  TRL + vLLM to it", TRL_WALL_S / goal.wall_s, "", "goal: 1.5 in one of the two"),
        Figure("  CPU seconds from the first request", goal.cpu_s, "s"),
        Figure("  TRL + vLLM to it", TRL_CPU_S / goal.cpu_s, ""),
        Figure("  TRL + vLLM to it, evaluation's share left out", TRL_CPU_S / (goal.cpu_s * (1 - goal.evaluation_share)), ""),
    ]


def first(*times: float | None) -> float:
    """The first that is known."""
    return next((time for time in times if time is not None), np.nan)


def in_ms(words: str, spread: Spread | None, remark: str = "") -> list[Figure]:
    p50, p95, largest = (np.nan,) * 3 if spread is None else (1000 * value for value in dataclasses.astuple(spread))
    return [
        Figure(f"{words}, p50", p50, "ms"),
        Figure("  p95", p95, "ms"),
        Figure("  largest", largest, "ms", remark),
    ]


def phase_time(record: RunRecord, name: str) -> float | None:
    return min((phase.time for phase in record.phases if phase.name == name), default=None)


def to_goal(record: RunRecord, first_request: float) -> ToGoal:
    """The clock stops when the version was trained: its evaluation is not counted, but others ran in between."""
    for table in record.evaluations.values():
        reached = np.flatnonzero(table.column(names.EVAL_REWARD_MEAN) >= GOAL)
        for step in table.step[reached]:
            trained = record.steps.step <= step
            if not trained.any():
                continue
            end = float(record.steps.time[trained][-1])
            evaluated = float(np.nansum(table.column(names.EVAL_PROBLEMS)[table.step < step]))
            sampled = float(np.nansum(record.steps.column(names.ROLLOUTS)[trained]))
            share = evaluated / (evaluated + sampled) if sampled else 0.0
            return ToGoal(int(step), end - first_request, cpu_between(record, first_request, end), share)
    return ToGoal(None, np.nan, np.nan, np.nan)


def cpu_between(record: RunRecord, began: float, ended: float) -> float:
    """Processor seconds of all processes, interpolated between the recorded times. NaN where one recorded only its end."""
    if not record.usage or any(len(series.time) < 3 for series in record.usage):
        return np.nan
    both = [np.interp([began, ended], series.time, series.cpu_s) for series in record.usage]
    return float(sum(after - before for before, after in both))


# --- actors against a bare load generator ---


def print_actors() -> None:
    run = RunFolder(new_folder("bench-actors"))
    config = load(CONFIG)
    overrides = [f"run.folder={run}", *PAUSED]
    settings = [argument for override in overrides for argument in ("--set", override)]
    submit = subprocess.Popen([*SUBMIT, *settings], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(read_steps(run)) > 0, 300, "the first trained step", submit)
        server, client = sorted(os.sched_getaffinity(0))[:2]
        pin(processes(run, "sampler"), server)
        for role in ("actor", "preprocess"):
            pin(processes(run, role), client)
        pin([agent_of(run)], client)
        with stopped(processes(run, "trainer")):
            time.sleep(WARM_S)
            began = time.time()
            time.sleep(MEASURED_S)
            actors = rollouts_per_s(run, began)
            with stopped(processes(run, "actor")):
                os.sched_setaffinity(0, {client})
                groups = min(config.actor.max_groups * config.actor.processes, 64)
                bare = asyncio.run(load_rate(run, groups, config.run.rollouts_per_group))
    finally:
        os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
        submit.send_signal(signal.SIGINT)
        submit.wait(120)
    print("\nactors against a bare load generator, same vLLM, same requests, trainers stopped")
    print(f"{'actors, leased, rewarded, published':<52} {actors:8.2f} rollouts/s")
    print(f"{'bare load generator, replies read, not decoded':<52} {bare:8.2f} rollouts/s")
    print(f"{'ratio':<52} {actors / bare:8.2f} (goal: 0.8 or more)")


def wait_for(condition: Callable[[], bool], seconds: float, what: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            sys.exit(f"the run ended with code {process.returncode} while this program waited for {what}")
        if time.monotonic() > end:
            sys.exit(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.2)


def read_steps(run: RunFolder) -> Sequence[int]:
    return [e.step for e in EventFollower(run.metrics).read() if e.kind == names.STEP and e.step is not None]


def processes(run: RunFolder, role: str) -> list[psutil.Process]:
    """The run's own processes of a role, with what they started: known by the run's environment, or (vLLM's engine writes its
    title over its own) by their parents."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if environment.get("PRL_RUN") == str(run) and environment.get("PRL_ROLE") == role:
            found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    if not found:
        sys.exit(f"{run}: no process of role {role} runs on this machine")
    return list(found.values())


def agent_of(run: RunFolder) -> psutil.Process:
    """The node agent, with the orchestrator in it: what started the actors."""
    agent = processes(run, "actor")[0].parent()
    if agent is None:
        sys.exit(f"{run}: the node agent has ended")
    return agent


def pin(found: Sequence[psutil.Process], core: int) -> None:
    for process in found:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


@contextmanager
def stopped(found: Sequence[psutil.Process]) -> Iterator[None]:
    for process in found:
        process.suspend()
    try:
        yield
    finally:
        for process in found:
            process.resume()


def rollouts_per_s(run: RunFolder, began: float) -> float:
    """Sum over the actors of their mean rate since `began`."""
    rates: dict[int, list[float]] = {}
    for event in EventFollower(run.metrics).read():
        if event.role == "actor" and event.time > began + 1 and "actor/rollouts_per_s" in event.values:
            rates.setdefault(event.index, []).append(event.values["actor/rollouts_per_s"])
    return sum(float(np.mean(found)) for found in rates.values())


async def load_rate(run: RunFolder, groups: int, n: int) -> float:
    """Answers a second with `groups` requests of n answers always in flight."""
    environment = processes(run, "sampler")[0].environ()
    url = f"http://{environment['PRL_HOST']}:{environment['PRL_PORT']}/prl/generate"
    bodies = [request_body(prompt, n) for prompt in digit_prompts(run)]
    headers = {**authorization(read_token(run.token)), "Content-Type": "application/json"}
    answers = 0
    end = time.monotonic() + WARM_S + MEASURED_S

    async def ask(session: aiohttp.ClientSession, first: int) -> None:
        nonlocal answers
        number = first
        while time.monotonic() < end:
            async with session.post(url, data=bodies[number % len(bodies)]) as response:
                await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{url} answered {response.status}: {await response.text()}")
            answers += n
            number += groups

    timeout = aiohttp.ClientTimeout(total=WARM_S + MEASURED_S + 60)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for first in range(groups):
            tasks.create_task(ask(session, first))
        await asyncio.sleep(WARM_S)
        warm, began = answers, time.monotonic()
        await asyncio.sleep(MEASURED_S)
        return (answers - warm) / (time.monotonic() - began)


def digit_prompts(run: RunFolder) -> list[Sequence[int]]:
    """Prompts of the quickstart's task, as its actors send them."""
    tokenizer = ModelTokenizer(run.model)
    return [tokenizer.encode(problem.data["prompt"]) for problem in digits.training_problems()]


def request_body(prompt_ids: Sequence[int], n: int) -> bytes:
    sampling: Mapping[str, object] = {
        "n": n,
        "max_tokens": digits.ANSWER_TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop_token_ids": [],
    }
    return json.dumps({"token_ids": list(prompt_ids), "sampling_params": sampling}, separators=(",", ":")).encode()


if __name__ == "__main__":
    main()
