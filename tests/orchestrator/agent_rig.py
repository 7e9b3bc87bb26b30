"""Stands for the orchestrator towards a node agent, whose children are a few lines that stand for samplers."""

import asyncio

from prl.control.server import Bell, ControlServer
from prl.runfolder.paths import RunFolder


class Orchestrator:
    """Grants so many restarts and notes what it hears."""

    def __init__(self, stub, restarts):
        self.restarts, self.ended, self.to_end, self.dumps, self.bell = restarts, [], [], 0, Bell()
        self.local, self.devices, self.near_devices = None, [[], []], False
        self.environment = {"PYTHONPATH": str(stub), "PYTHONSAFEPATH": "1"}
        handlers = {name: getattr(self, name) for name in ("preflight", "children", "child_ended", "orders", "node_done")}
        self.server = ControlServer("token", handlers, on_join=lambda m: None, on_fail=lambda m, e, t: self.ended.append(e))

    async def preflight(self, member, body):
        return {"wanted": None}

    async def children(self, member, body):
        plan = {"role": "sampler", "node": 1, "serves": True, "environment": self.environment}
        plan["near_devices"] = self.near_devices
        children = [{**plan, "index": index, "devices": devices} for index, devices in enumerate(self.devices)]
        return {"children": children, "local": self.local}

    async def child_ended(self, member, body):
        self.ended.append((body["child"], body["words"]))
        self.restarts -= 1
        return {"restart_after_s": 0.1 if self.restarts >= 0 else None}

    async def orders(self, member, body):
        def new():
            return [entry for entry in self.to_end if entry not in body["known"]]

        await self.bell.until(lambda: bool(new()) or self.dumps > body["dumps"] or self.server.stopping, 5)
        return {"end": new(), "dumps": self.dumps}

    async def node_done(self, member, body):
        self.ended.append("node done")
        return {}


def run_of(tmp_path, program):
    """A run folder, and beside it the code of its samplers."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.logs(1).mkdir(parents=True)
    (tmp_path / "stub" / "prl").mkdir(parents=True)
    (tmp_path / "stub/prl/__init__.py").touch()
    (tmp_path / "stub/prl/sampler.py").write_text(program)
    return run


async def started(run, index, number):
    """Process id and port of a start of a child, once it is there."""
    log = run.logs(1) / f"sampler-{index}.log"
    async with asyncio.timeout(20):
        while not log.exists() or len(log.read_text().splitlines()) <= number:  # noqa: ASYNC110 (written by another process)
            await asyncio.sleep(0.02)
    return [int(word) for word in log.read_text().splitlines()[number].split()]
