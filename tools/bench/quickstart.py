"""Speed of the quickstart on this machine, as ratios from one run. A benchmark, no test: nothing here passes or fails.

    .venv/bin/python tools/bench/quickstart.py                  trains the quickstart, then both parts below
    .venv/bin/python tools/bench/quickstart.py figures RUN      figures of a finished run folder
    .venv/bin/python tools/bench/quickstart.py actors           actors against a bare load generator on the same vLLM

Wants two quiet cores. `actors` starts a run of its own, stops its trainers (SIGSTOP) once rollouts flow, puts the server on
one core and its clients on the other, and lets first the actors and then a load generator ask it for the same answers.
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
    commands.add_parser("figures").add_argument("run", type=Path)
    commands.add_parser("actors")
    options = parser.parse_args()
    if options.command == "figures":
        print_figures(options.run)
    elif options.command == "actors":
        print_actors()
    else:
        run = new_folder("bench-quickstart")
        began = time.time()
        subprocess.run([*SUBMIT, "--set", f"run.folder={run}"], check=True)
        print(f"{'command to exit':<44} {time.time() - began:8.1f} s")
        print_figures(run, began)
        print_actors()


def new_folder(name: str) -> Path:
    candidates = (ROOT / "runs" / f"{name}-{number}" for number in range(1, 10_000))
    return next(folder for folder in candidates if not folder.exists())


def row(words: str, value: float | None, unit: str, remark: str = "") -> None:
    text = "     n/a" if value is None or np.isnan(value) else f"{value:8.2f}"
    print(f"{words:<44} {text} {unit:<10} {remark}")


# --- figures of a finished run ---


@dataclasses.dataclass(frozen=True)
class ToGoal:
    """From the first request for a rollout to the version that first reached the goal on held-out problems."""

    step: int
    wall_s: float
    cpu_s: float | None  # None: the processes' usage was not recorded over time
    evaluation_share: float  # of all sampled rollouts


def print_figures(run: Path, began: float | None = None) -> None:
    record = read_run(run)
    summary = summarize(record, time.time())
    if not len(record.steps):
        sys.exit(f"{run}: no step was trained: {summary.cause}")
    command = began or phase_time(record, names.COMMAND) or summary.started
    first_request = phase_time(record, names.FIRST_ROLLOUT_REQUEST) or phase_time(record, names.RUNNING)
    last_step = float(record.steps.time[-1])
    print(f"\n{run}: {summary.outcome}, {summary.steps} steps")
    if command is not None:
        row("command to first trained step", float(record.steps.time[0]) - command, "s")
    if first_request is not None:
        row(
            "rollouts trained", summary.rollouts / (last_step - first_request), "1/s", "from the first request to the last step"
        )
    waiting = summary.trainer_time.waiting if summary.trainer_time else None
    row("trainer waiting for data", None if waiting is None else 100 * waiting, "per cent")
    row("largest token gap at a weight update", largest_ms(summary.gap_s), "ms", "goal: under 60")
    row("largest pause of a sampler", largest_ms(summary.pause_s), "ms")
    total_cpu_s = sum(role.cpu_s for role in summary.usage)
    row("CPU seconds a step, start included", total_cpu_s / summary.steps if summary.usage else None, "s")
    if first_request is not None:
        live = cpu_between(record, first_request, last_step)
        row("CPU seconds a step, live", None if live is None else live / summary.steps, "s", "goal: under 1.0")
        print_goal(to_goal(record, first_request), record, command)


def print_goal(goal: ToGoal | None, record: RunRecord, command: float | None) -> None:
    if goal is None:
        print(f"held-out reward never reached {GOAL}")
        return
    print(f"\nto a held-out reward of {GOAL} (step {goal.step}); goal: a ratio of 1.5 in one of the two")
    print(f"{'':<46} {'prl':>10} {'TRL + vLLM':>12} {'ratio':>10}")
    compare("wall seconds from the first request", goal.wall_s, TRL_WALL_S)
    compare("CPU seconds from the first request", goal.cpu_s, TRL_CPU_S)
    if goal.cpu_s is not None:
        without = goal.cpu_s * (1 - goal.evaluation_share)
        compare("  without evaluation, by its share of rollouts", without, TRL_CPU_S)
    if command is not None:
        start = float(record.steps.time[np.flatnonzero(record.steps.step == goal.step)[0]]) - command
        row("wall seconds from the command, start included", start, "s")


def compare(words: str, own: float | None, other: float) -> None:
    text = f"{'n/a':>10}" if own is None else f"{own:10.1f}"
    ratio = "" if own is None else f"{other / own:10.2f}"
    print(f"{words:<46} {text} {other:12.1f} {ratio}")


def largest_ms(spread: Spread | None) -> float | None:
    return None if spread is None else 1000 * spread.max


def phase_time(record: RunRecord, name: str) -> float | None:
    return min((phase.time for phase in record.phases if phase.name == name), default=None)


def to_goal(record: RunRecord, first_request: float) -> ToGoal | None:
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
    return None


def cpu_between(record: RunRecord, began: float, ended: float) -> float | None:
    """Processor seconds of all processes, interpolated between the recorded times. None where one recorded only its end."""
    if not record.usage or any(len(series.time) < 3 for series in record.usage):
        return None
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
    row("actors", actors, "rollouts/s", "leased, rewarded, published")
    row("bare load generator", bare, "rollouts/s", "replies read, not decoded")
    row("ratio", actors / bare, "", "goal: 0.8 or more")


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
    """The run's own processes of a role, with what they started: all carry the run's environment."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if environment.get("PRL_RUN") == str(run) and environment.get("PRL_ROLE") == role:
            found.append(process)
    if not found:
        sys.exit(f"{run}: no process of role {role} runs on this machine")
    return found


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
