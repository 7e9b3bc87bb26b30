"""What the one task of every node runs: its node agent and, on rank 0, the orchestrator beside it."""

import asyncio
import json
import os
import shlex
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from prl.cluster.allocation import Allocation, read_allocation
from prl.cluster.executors import SUBMITTER
from prl.cluster.means import dismiss_followers, means_of
from prl.cluster.run import ProgramError
from prl.cluster.slurm import requeue, why_terminated
from prl.config.load import load
from prl.config.plain_files import read_plain
from prl.config.schema import Config
from prl.control.child import say
from prl.control.garbage import leave_what_is_loaded
from prl.control.parent import end_with_parent
from prl.control.ports import free_port
from prl.control.token import read_token
from prl.flow.ending import NO_MEANS, Reason
from prl.metrics.progress import last_step
from prl.orchestrator.node import run_agent
from prl.orchestrator.outcome import RunFailed
from prl.runfolder.outcome import CANCELLED, DONE, EXIT_CODES, FAILED, Outcome, reserve
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import in_words, publish_json

if TYPE_CHECKING:
    from prl.orchestrator.main import Orchestrator
    from prl.orchestrator.shutdown import Shutdown
    from prl.streams.redis_server import RedisServer

WARNED = "warned by SIGUSR1: the time limit is near"
POLL_S = 0.2  # how often other nodes look for rank 0's address on the shared filesystem


def run_node(run_folder: str) -> None:
    """Live through an attempt of a run on this node: the one that PRL_ATTEMPT names. Rank 0 raises RunFailed with the cause
    when the run failed, so that the job counts as failed; other nodes end quietly, so that they do not end rank 0's task before
    it has written it."""
    # The batch system warns with these; nobody but rank 0 wants to hear it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):  # until the orchestrator takes them over
        signal.signal(number, _cancel)
    run = RunFolder(run_folder)
    allocation = read_allocation()
    attempt = int(os.environ["PRL_ATTEMPT"])
    if allocation.job_id is None:
        end_with_parent()  # under Slurm that is Slurm's business
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    if allocation.first:
        early: list[int] = []  # signals that came before the orchestrator could hear them, and be asked what for
        for number in (signal.SIGUSR1,) if allocation.job_id is None else (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, _: early.append(number))
        outcome = _lead(run, attempt, allocation, early)
        if outcome.next == "requeue" and outcome.reason != "requeued" and allocation.job_id is not None:
            _requeue(allocation.job_id)
        if outcome.next == "stop" and allocation.job_id is not None:
            dismiss_followers(run, attempt)
        say(f"{outcome.detail}{outcome.log_end}\nprl: {outcome.outcome}: {outcome.cause}".lstrip())
        if outcome.outcome != DONE:
            raise RunFailed(outcome.cause)
    else:
        config = load(run.config)
        asyncio.run(_follow(run, attempt, allocation, config))


def _requeue(job_id: str) -> None:
    """Slurm then ends what is left of this job here. Where it refuses, the run stays as it is, for a person to go on with."""
    try:
        requeue(job_id)
    except ProgramError as error:
        say(f"prl: the job is not put into the queue again: {error}")


class CancelledEarly(Exception):
    """Somebody wants the run to end before it has begun."""


def _cancel(number: int, _: FrameType | None) -> None:
    raise CancelledEarly(f"cancelled by {signal.Signals(number).name}")


def _check_submitter() -> None:
    """The controller asks its task to end when the submitting command is gone. Before this task took SIGTERM over, it could
    not hear that, and looks for itself."""
    submitter = os.environ.get(SUBMITTER)
    if submitter is not None and str(psutil.Process(os.getppid()).ppid()) != submitter:
        raise CancelledEarly("cancelled: prl-submit is gone")


def _lead(run: RunFolder, attempt: int, allocation: Allocation, early: Sequence[int]) -> Outcome:
    """Rank 0; whatever goes wrong ends up in exit.json."""
    started = time.time()
    try:
        if allocation.job_id is None:
            _check_submitter()
        reserve(run.exit(attempt))
        return asyncio.run(_orchestrate(run, attempt, allocation, load(run.config), early))
    except CancelledEarly as error:
        code, now = EXIT_CODES[CANCELLED], time.time()
        outcome = Outcome(
            CANCELLED, str(error), "cancelled", "stop", "cancelled", code=code, steps=0, started=started, ended=now
        )
        outcome.write(run.exit(attempt))
        return outcome
    except Exception as error:
        outcome = Outcome(
            FAILED,
            f"orchestrator: {in_words(error, run.path)}",
            "error",
            "stop",
            "error",
            role="orchestrator",
            code=EXIT_CODES[FAILED],
            detail=traceback.format_exc(),
            steps=last_step(run, attempt),
            started=started,
            ended=time.time(),
        )
        outcome.write(run.exit(attempt))
        return outcome


async def _orchestrate(run: RunFolder, attempt: int, allocation: Allocation, config: Config, early: Sequence[int]) -> Outcome:
    if run.plan(attempt).exists():
        raise RuntimeError(
            f"attempt {attempt} was started before: a requeued job is no new attempt; use "
            f"prl-submit --resume {shlex.quote(str(run))}"
        )
    # What no other node's agent waits for at its start.
    from prl.cluster.split import make_split
    from prl.orchestrator.binding import bind
    from prl.orchestrator.main import Orchestrator
    from prl.orchestrator.resume import find_start, publish_plan

    split = make_split(config)
    start = find_start(run, config, parts=False)  # the orchestrator checks them while the children start
    plan = bind(config, split, allocation, attempt)
    publish_plan(run, plan, start)
    token = read_token(run.token)
    leave_what_is_loaded()
    with _own_redis(run, attempt, allocation.host.address, config, token) as redis:
        means = partial(means_of, run, attempt, config) if allocation.job_id is not None else lambda: NO_MEANS
        orchestrator = Orchestrator(run, config, plan, start, token, means, redis)
        return await _lead_through(run, attempt, allocation, config, orchestrator, token, early)


def _own_redis(
    run: RunFolder, attempt: int, host: str, config: Config, token: str
) -> AbstractContextManager["RedisServer | None"]:
    """The run's own Redis server, where the config asks for one, for as long as the attempt lasts."""
    streams = config.streams
    if streams.backend != "redis" or not streams.redis.start:
        return nullcontext()
    from prl.streams.redis_server import RedisServer  # an extra, loaded where it is used

    return closing(RedisServer(run, attempt, host, free_port(host), token, start_s=config.control.start_s))


async def _lead_through(
    run: RunFolder,
    attempt: int,
    allocation: Allocation,
    config: Config,
    orchestrator: "Orchestrator",
    token: str,
    early: Sequence[int],
) -> Outcome:
    loop, shutdown = asyncio.get_running_loop(), orchestrator.shutdown
    loop.add_signal_handler(signal.SIGINT, shutdown.cancel, "cancelled by SIGINT")
    if allocation.job_id is None:
        loop.add_signal_handler(signal.SIGUSR1, shutdown.leave, WARNED, "time limit")
        if early:  # while the start was looked for
            shutdown.leave(WARNED, "time limit")
        loop.add_signal_handler(signal.SIGTERM, shutdown.cancel, "cancelled by SIGTERM")
    else:
        why, warned = partial(_why_terminated, allocation.job_id, allocation.restarts), asyncio.Event()
        for number, heard in ((signal.SIGUSR1, warned), (signal.SIGTERM, shutdown.terminated)):
            loop.add_signal_handler(number, heard.set)
            if number in early:
                heard.set()
        for name, asking in (
            ("what Slurm warns of", _ask_what_for(warned, shutdown, why)),
            ("why Slurm ends the job", _ask_why(shutdown, why)),
        ):
            orchestrator.watch(asyncio.create_task(asking, name=name))
    url = await orchestrator.serve(allocation.host.address)
    publish_json(run.orchestrator_url(attempt), {"url": url})
    agent = asyncio.create_task(
        run_agent(run, attempt, allocation.task, allocation.host.address, url, token, config.control), name="node agent"
    )
    orchestrator.watch(agent)
    outcome = await orchestrator.lead()
    await asyncio.wait([agent], timeout=config.control.stop_s)
    return outcome


def _why_terminated(job_id: str, restarts: int) -> Reason | None:
    return why_terminated(job_id, time.time(), restarts)


async def _ask_what_for(warned: asyncio.Event, shutdown: "Shutdown", why: Callable[[], Reason | None]) -> None:
    """Once Slurm has sent the signal of --signal: before the time limit, and at a preemption where the site has it so
    (PreemptParameters=send_user_signal)."""
    await warned.wait()
    try:
        preempted = await asyncio.to_thread(why) == "preempted"
    except ProgramError as error:
        say(f"prl: the warning is taken for that of the time limit: {error}")
        preempted = False
    if preempted:
        shutdown.leave("warned by SIGUSR1: Slurm preempts the job", "preempted")
    else:
        shutdown.leave(WARNED, "time limit")


async def _ask_why(shutdown: "Shutdown", why: Callable[[], Reason | None]) -> None:
    """Once Slurm has sent SIGTERM: what it does to a job that is cancelled, preempted or over its time, or that has lost a
    node, and to a component that is cancelled alone, without which the run cannot go on."""
    await shutdown.terminated.wait()
    shutdown.expect_deaths()  # of all that it sends SIGTERM to beside this process
    try:
        reason = await asyncio.to_thread(why)
    except ProgramError as error:
        shutdown.cancel(f"cancelled by SIGTERM, and Slurm does not say why: {error}")
        return
    missed = shutdown.missed_nodes
    if reason == "requeued" and missed:
        reason = "node failure"  # after which Slurm has queued the job again, and forgotten why
    if reason is None:
        await shutdown.blame_lost_agent("cancelled by SIGTERM")
    elif reason == "cancelled":
        shutdown.cancel("cancelled by SIGTERM")
    else:
        where = f" (nothing is heard of {', '.join(missed)})" if reason == "node failure" and missed else ""
        shutdown.leave(f"Slurm ends the job with SIGTERM: {reason}{where}", reason)


async def _follow(run: RunFolder, attempt: int, allocation: Allocation, config: Config) -> None:
    """Any other node: find rank 0, then do what its plan says. Why Slurm sends SIGTERM here, rank 0 finds out."""
    terminated = asyncio.Event()
    if allocation.job_id is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    url = await _find_orchestrator(run.orchestrator_url(attempt), config.control.start_s)
    token = read_token(run.token)
    await run_agent(run, attempt, allocation.task, allocation.host.address, url, token, config.control, terminated)


async def _find_orchestrator(path: Path, deadline_s: float) -> str:
    """The URL that rank 0 published. The folder is listed before the name is tried: a shared filesystem may remember for long
    that a name did not exist."""
    end = time.monotonic() + deadline_s
    while path.name not in os.listdir(path.parent):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline_s:.0f} s for rank 0 to write {path}: see its log in {path.parent}")
        await asyncio.sleep(POLL_S)
    url: str = json.loads(read_plain(path))["url"]
    return url
