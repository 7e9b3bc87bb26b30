"""The node agent: starts the children that the plan puts on its node, watches them, ends them."""

import asyncio
import time

from prl.control.child import report_failure
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.ports import free_port
from prl.metrics import names
from prl.metrics.events import MetricsWriter
from prl.metrics.usage import own_usage, usage_of
from prl.orchestrator.children import ChildPlan, RunningChild, end_child, how_it_ended, log_tail, start_child
from prl.runfolder.paths import RunFolder

KILL_AFTER_S = 3.0  # between SIGTERM and SIGKILL
GRACE_LOOK_S = 0.5  # between two looks at how much time is left
USAGE_S = 2.0  # between two looks at what the children use


async def run_agent(
    run: RunFolder, attempt: int, node: int, address: str, control_url: str, token: str, options: ControlOptions
) -> None:
    """Live through one attempt on one node. Returns when the orchestrator ended the run and all children are gone; raises
    ControlError when the orchestrator was lost (the children are ended first)."""
    async with ControlClient(control_url, token, "agent", node, options) as client:
        await client.join({"address": address})
        answer = await client.call("children", {}, deadline_s=options.start_s, reason="the plan of this node's children")
        children: list[RunningChild] = []
        metrics = MetricsWriter(run.metrics, "agent", node, attempt)
        try:
            for entry in answer["children"]:
                plan = ChildPlan(**{**entry, "devices": tuple(entry["devices"])})
                common = _environment(run, attempt, plan, address, control_url)
                children.append(await start_child(plan, common, run.logs(attempt)))
            await _watch(client, children, options, metrics)
        except Exception as error:
            await report_failure(client, error, run.path)
            raise
        finally:
            try:
                _write_usage(metrics, children)
            finally:
                await asyncio.gather(*(end_child(child, KILL_AFTER_S) for child in children))
                metrics.close()
        if client.lost is not None:
            raise client.lost
        await client.call("node_done", {}, deadline_s=10.0, reason="reporting the node's end")


def _environment(run: RunFolder, attempt: int, plan: ChildPlan, address: str, control_url: str) -> dict[str, str]:
    environment = {
        "PRL_RUN": str(run),
        "PRL_ATTEMPT": str(attempt),
        "PRL_ROLE": plan.role,
        "PRL_INDEX": str(plan.index),
        "PRL_CONTROL_URL": control_url,
        "PRL_HOST": address,
        "PYTHONUNBUFFERED": "1",
    }
    if plan.serves:
        environment["PRL_PORT"] = str(free_port(address))
    return environment


async def _watch(client: ControlClient, children: list[RunningChild], options: ControlOptions, metrics: MetricsWriter) -> None:
    """Report every child's end until the run stops; then give the children their time to end by themselves."""
    waits = {asyncio.create_task(child.process.wait()): child for child in children}
    stopping = asyncio.create_task(client.stopping.wait())
    looked = time.monotonic()
    try:
        while waits and not client.stopping.is_set():
            done, _ = await asyncio.wait([*waits, stopping], timeout=options.heartbeat_s, return_when="FIRST_COMPLETED")
            if time.monotonic() - looked >= USAGE_S:
                looked = time.monotonic()
                _write_usage(metrics, children)
            for task in done & waits.keys():
                await _report(client, waits.pop(task))
            client.progress(f"watching {len(waits)} children")
        await client.stopping.wait()
        told = time.monotonic()
        while waits and time.monotonic() - told < client.grace_s:  # which a cancel may shorten
            done, _ = await asyncio.wait(waits, timeout=min(GRACE_LOOK_S, client.grace_s), return_when="FIRST_COMPLETED")
            if time.monotonic() - looked >= USAGE_S:
                looked = time.monotonic()
                _write_usage(metrics, children)
            for task in done:
                waits.pop(task)
    finally:
        stopping.cancel()
        for task in waits:
            task.cancel()


async def _report(client: ControlClient, child: RunningChild) -> None:
    body = {
        "child": child.plan.name,
        "code": child.process.returncode,
        "words": how_it_ended(child),
        "log": str(child.log),
        "tail": log_tail(child.log),
    }
    await client.call("child_ended", body, deadline_s=10.0, reason=f"reporting that {child.plan.name} ended")


def _write_usage(metrics: MetricsWriter, children: list[RunningChild]) -> None:
    """What every living child with all its descendants, and this process itself (on rank 0 with the orchestrator), have used
    so far."""
    usages = {**usage_of({child.plan.name: child.process.pid for child in children}), "agent": own_usage()}
    for process, usage in usages.items():
        metrics.write(usage.values(), kind=names.USAGE, labels={"process": process, "role": process.split()[0]})
