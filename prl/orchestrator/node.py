"""The node agent: starts the children that the plan puts on its node, watches them, ends them."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from prl.cluster.preflight.measure import in_thread
from prl.cluster.preflight.node import pass_preflight
from prl.config.machine import memory_kills
from prl.control.child import report_failure, say
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.ports import free_port
from prl.metrics import names
from prl.metrics.events import MetricsWriter
from prl.metrics.usage import own_usage, usage_of
from prl.orchestrator import clean_up, leftovers
from prl.orchestrator.children import (
    ChildPlan,
    RunningChild,
    dump_stacks,
    end_child,
    end_rest,
    how_it_ended,
    kill_child,
    note_segments,
    start_child,
)
from prl.orchestrator.node_devices import processors, with_given_devices
from prl.orchestrator.outcome import MEMORY_KILL
from prl.orchestrator.staging import StageOrders, cache_environment, local_folder, stage
from prl.runfolder.logs import bound_log, log_end
from prl.runfolder.paths import RunFolder

CLEAN_S = 30.0  # deadline of removing what killed agents have left: their processes may die slowly, or a filesystem not answer
KILL_AFTER_S = 3.0  # between SIGTERM and SIGKILL
GRACE_LOOK_S = 0.5  # between two looks at how much time is left
LOG_LINES = 25  # of a child that ended, which may explain why
USAGE_S = 2.0  # between two looks at what the children use
TOLD_S = 10.0  # deadline of telling that the batch system ends a task, which it does some seconds later
ORDERS_S = 600.0  # deadline of a call that its loss ends; the orchestrator answers after half a minute, or a ledger's write

Start = Callable[[ChildPlan, int], Awaitable[RunningChild]]


async def run_agent(
    run: RunFolder,
    attempt: int,
    node: int,
    address: str,
    control_url: str,
    token: str,
    options: ControlOptions,
    terminated: asyncio.Event | None = None,
) -> None:
    """Live through one attempt on one node. `terminated`: once the batch system has sent SIGTERM here, of which the
    orchestrator is told. Returns when the orchestrator ended the run and all children are gone; raises ControlError when the
    orchestrator was lost (the children are ended first)."""
    async with ControlClient(control_url, token, "agent", node, options) as client:
        await client.join({"address": address})
        children: dict[str, RunningChild] = {}
        given_up: set[tuple[str, int]] = set()  # starts of children that are to end, also those that are still to be made
        metrics = MetricsWriter(run.metrics, "agent", node, attempt)
        telling = asyncio.create_task(
            _tell(client, terminated or asyncio.Event()), name="tell that the batch system ends this node's task"
        )
        with contextlib.ExitStack() as after:
            after.callback(telling.cancel)
            try:
                prefix = clean_up.prefix(os.environ.get("SLURM_JOB_ID", "local"), node)
                temporary = after.enter_context(_temporary_files(prefix))
                folders: list[Path] = []
                record = partial(_record, Path(temporary), children, folders)
                record()
                await _clean_up_after_the_dead()
                plans, orders = await _plans(client, run, attempt, address, token, options)
                own, caches = {"TMPDIR": temporary, "PRL_MODEL": str(run.model)}, dict[str, str]()
                if orders is not None and plans:
                    folders.append(_local_folder(orders, prefix, Path(temporary), after))
                    record()
                    own |= await _stage(client, run, folders[-1], orders, plans, metrics)
                    caches = cache_environment(folders[-1] / "caches", os.environ)
                cpus = await processors(plans)

                async def start(plan: ChildPlan, number: int) -> RunningChild:
                    environment = _environment(run, attempt, plan, number, address, control_url) | own
                    environment |= caches if plan.devices else {}
                    child = children[plan.name] = await start_child(
                        plan, environment, run.logs(attempt), number, cpus.get(plan.name)
                    )
                    record()
                    if (plan.name, number) in given_up:
                        kill_child(child)
                    return child

                kills = memory_kills()  # before there is one of them that could be killed
                for plan in plans:
                    await start(plan, 0)
                await _watch(client, children, start, given_up, options, metrics, record, telling, kills)
            except Exception as error:
                await report_failure(client, error, run.path)
                raise
            finally:
                try:
                    _write_usage(metrics, children)
                finally:
                    await asyncio.gather(*(end_child(child, KILL_AFTER_S) for child in children.values()))
                    metrics.close()
        if client.lost is not None:
            raise client.lost
        await client.call("node_done", {}, deadline_s=10.0, reason="reporting the node's end")


async def _clean_up_after_the_dead() -> None:
    """What agents that were killed have left. No run fails for it."""
    try:
        for folder in await in_thread(clean_up.clean_dead, CLEAN_S):
            say(f"prl: removed {folder} and what belonged to it, which a node agent has left that was killed")
    except OSError as error:
        say(f"prl: what node agents have left that were killed is not all removed: {error}")


async def _plans(
    client: ControlClient, run: RunFolder, attempt: int, address: str, token: str, options: ControlOptions
) -> tuple[list[ChildPlan], StageOrders | None]:
    """The children of this node, none where the preflight keeps the run from going on, or the run stops before its end; and
    what is to lie on the node's own disk."""
    passing = asyncio.create_task(pass_preflight(client, run.canary(attempt), address, token), name="preflight")
    stopping = asyncio.create_task(client.stopping.wait())
    try:
        await asyncio.wait([passing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not passing.done() or not passing.result():
            return [], None
    finally:
        for task in (passing, stopping):
            task.cancel()
    answer = await client.call("children", {}, deadline_s=options.start_s, reason="the plan of this node's children")
    plans = [with_given_devices(ChildPlan(**{**entry, "devices": tuple(entry["devices"])})) for entry in answer["children"]]
    return plans, StageOrders(**answer["local"]) if answer["local"] is not None else None


def _temporary_files(prefix: str) -> AbstractContextManager[str]:
    """A folder for the children's temporary files and sockets: not all remove their own, and none that is killed. Its name is
    short, for a socket's path may have 107 bytes; by it prl.orchestrator.clean_up finds it where this process is killed. What a
    dying process adds while it is removed does not fail the run's end."""
    return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)


def _local_folder(orders: StageOrders, prefix: str, temporary: Path, after: contextlib.ExitStack) -> Path:
    """On the node's own disk; among the temporary files where that cannot be."""
    try:
        return Path(after.enter_context(local_folder(orders, prefix)))
    except OSError as error:
        say(f"prl: {temporary} takes the place of cluster.local_folder: {error}")
        return temporary


async def _stage(
    client: ControlClient,
    run: RunFolder,
    folder: Path,
    orders: StageOrders,
    plans: Sequence[ChildPlan],
    metrics: MetricsWriter,
) -> dict[str, str]:
    """Copy the model to this node's disk, and say what became of that; variables by which the children find it."""
    began = time.monotonic()
    trains = any(plan.role == "trainer" for plan in plans)
    staged = await stage(client, run.model, folder / "model", orders, weights=trains)
    say(f"prl: {staged}")
    values = {names.MODEL_COPIED_BYTES: float(staged.copied_bytes), names.MODEL_COPY_S: time.monotonic() - began}
    metrics.write(values, kind=names.MODEL, labels={"obstacle": staged.obstacle})
    return {"PRL_MODEL": str(staged.model)} if staged.copied_bytes else {}


def _record(temporary: Path, children: Mapping[str, RunningChild], folders: Sequence[Path]) -> None:
    """No run fails where there is no room for it: whether a node has enough, the preflight says, and later its processes."""
    groups = [child.group for child in children.values()]
    segments = [segment for child in children.values() for segment in child.segments]
    try:
        clean_up.record(temporary, groups, segments, folders)
    except OSError as error:
        say(f"prl: should this agent be killed, {temporary} does not tell what is to be removed: {error}")


def _environment(run: RunFolder, attempt: int, plan: ChildPlan, start: int, address: str, control_url: str) -> dict[str, str]:
    environment = {
        "PRL_RUN": str(run),
        "PRL_ATTEMPT": str(attempt),
        "PRL_ROLE": plan.role,
        "PRL_INDEX": str(plan.index),
        "PRL_START": str(start),
        "PRL_CONTROL_URL": control_url,
        "PRL_HOST": address,
        "PYTHONUNBUFFERED": "1",
    }
    if plan.serves:
        environment["PRL_PORT"] = str(free_port(address))
    return environment


async def _watch(
    client: ControlClient,
    children: dict[str, RunningChild],
    start: Start,
    given_up: set[tuple[str, int]],
    options: ControlOptions,
    metrics: MetricsWriter,
    record: Callable[[], None],
    telling: asyncio.Task[None],
    kills: int,
) -> None:
    """Report every child's end until the run stops, and start again what the orchestrator wants to have again; then give the
    children their time to end by themselves. An error of `telling` is one of this, too. `kills`: what the kernel had counted
    before the children were started (`memory_kills`)."""
    waits = {asyncio.create_task(child.process.wait()): child for child in children.values()}
    starts: set[asyncio.Task[RunningChild | None]] = set()
    stopping = asyncio.create_task(client.stopping.wait())
    obeying = asyncio.create_task(_obey(client, children, given_up), name="end what the orchestrator gave up")
    tasks: list[asyncio.Task[Any]] = [stopping, obeying, telling]
    looked, segments, new, unbound = time.monotonic(), frozenset[str](), False, set[Path]()
    try:
        while (waits or starts) and not client.stopping.is_set():
            done, _ = await asyncio.wait(
                [*waits, *starts, *tasks], timeout=options.heartbeat_s, return_when=asyncio.FIRST_COMPLETED
            )
            if time.monotonic() - looked >= USAGE_S:
                looked = time.monotonic()
                _write_usage(metrics, children)
                _bound_logs(children, options, unbound)
            before, segments = segments, leftovers.names()
            if segments != before or new:  # once more, since a file is there before it is mapped
                new = segments != before
                note_segments(children.values())
                record()
            ended = [waits.pop(task) for task in done & waits.keys()]
            if ended:  # a process may take long to die: what was counted since others ended counts
                kills_before, kills = kills, memory_kills()
            for child in ended:
                end_rest(child)
                pause_s = await _report(client, child, out_of_memory=kills > kills_before)
                if pause_s is not None:
                    starts.add(asyncio.create_task(_start_again(client, child, start, pause_s), name="restart"))
            for again in done & starts:
                starts.discard(again)
                started = again.result()
                if started is not None:
                    waits[asyncio.create_task(started.process.wait())] = started
            for task in done.intersection(tasks):
                task.result()
            client.progress(f"watching {len(waits)} children")
        await client.stopping.wait()
        waits |= {asyncio.create_task(c.process.wait()): c for c in await asyncio.gather(*starts) if c is not None}
        told = time.monotonic()
        while waits and time.monotonic() - told < client.grace_s:  # which a cancel may shorten
            done, _ = await asyncio.wait(waits, timeout=min(GRACE_LOOK_S, client.grace_s), return_when="FIRST_COMPLETED")
            if time.monotonic() - looked >= USAGE_S:
                looked = time.monotonic()
                _write_usage(metrics, children)
                _bound_logs(children, options, unbound)
            for task in done:
                waits.pop(task)
    finally:
        for unfinished in [*tasks, *waits, *starts]:
            unfinished.cancel()


async def _start_again(client: ControlClient, child: RunningChild, start: Start, pause_s: float) -> RunningChild | None:
    """After the pause; None where the run stops before."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(client.stopping.wait(), pause_s)
        return None
    return await start(child.plan, child.start + 1)


async def _tell(client: ControlClient, terminated: asyncio.Event) -> None:
    """Once the batch system has sent SIGTERM here: it may end this node's component alone, of which rank 0 would not hear."""
    await terminated.wait()
    await client.call("terminated", {}, deadline_s=TOLD_S, reason="telling that the batch system ends this node's task")
    await client.stopping.wait()


async def _obey(client: ControlClient, children: dict[str, RunningChild], given_up: set[tuple[str, int]]) -> None:
    """Kill the processes that the orchestrator has given up, and have all write their stacks down when it asks for that, until
    it stops the run. `given_up` holds all of them, also those that are not started yet."""
    dumps = 0
    while not client.stopping.is_set():
        body = {"known": sorted(given_up), "dumps": dumps}
        answer = await client.call("orders", body, deadline_s=ORDERS_S, reason="what is to end on this node")
        if answer["dumps"] > dumps:
            dumps = answer["dumps"]
            for child in children.values():
                dump_stacks(child)
        for name, number in answer["end"]:
            given_up.add((name, number))
            ending = children.get(name)
            if ending is not None and ending.start == number and ending.process.returncode is None:
                kill_child(ending)


async def _report(client: ControlClient, child: RunningChild, *, out_of_memory: bool) -> float | None:
    """The pause after which it is to be started again, in seconds; None: not at all. `out_of_memory`: just now the kernel has
    killed a process here for that, with SIGKILL."""
    words = how_it_ended(child)
    if out_of_memory and child.process.returncode == -signal.SIGKILL:
        words = f"{words}: {MEMORY_KILL}"
    body = {
        "child": child.plan.name,
        "number": child.start,
        "code": child.process.returncode,
        "words": words,
        "log": str(child.log),
        "log_end": log_end(child.log, LOG_LINES),
    }
    answer = await client.call("child_ended", body, deadline_s=ORDERS_S, reason=f"reporting that {child.plan.name} ended")
    pause_s: float | None = answer.get("restart_after_s")
    return pause_s


def _write_usage(metrics: MetricsWriter, children: Mapping[str, RunningChild]) -> None:
    """What every living child with all its descendants, and this process itself (on rank 0 with the orchestrator), have used
    so far."""
    usages = {**usage_of({name: child.process.pid for name, child in children.items()}), "agent": own_usage()}
    for process, usage in usages.items():
        metrics.write(usage.values(), kind=names.USAGE, labels={"process": process, "role": process.split()[0]})


def _bound_logs(children: Mapping[str, RunningChild], options: ControlOptions, unbound: set[Path]) -> None:
    """No run fails for it: of a filesystem that is full or gone others tell. `unbound`: logs of which that was said."""
    for child in children.values():
        try:
            bound_log(child.log, options.log_mib * 2**20)
        except OSError as error:
            if child.log not in unbound:
                say(f"prl: {child.log} may grow beyond control.log_mib: {error}")
            unbound.add(child.log)
