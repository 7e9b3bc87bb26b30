"""The agent of a node whose orchestrator is frozen ends its children and says why."""

import asyncio
import signal
import subprocess
import sys

import psutil
import pytest

from prl.control.client import ControlError
from prl.control.options import ControlOptions
from prl.orchestrator.node import run_agent
from prl.runfolder.paths import RunFolder

SERVER = """
import asyncio, sys
from prl.control.server import ControlServer
async def preflight(member, body):
    return {"wanted": None}
async def children(member, body):
    plan = {"role": "sleeper", "index": 0, "node": 1, "devices": [], "serves": False}
    return {"children": [{**plan, "environment": {"PYTHONPATH": sys.argv[1], "PYTHONSAFEPATH": "1"}}], "local": None}
async def orders(member, body):
    await asyncio.sleep(600)
async def main():
    handlers = {"preflight": preflight, "children": children, "orders": orders}
    server = ControlServer("token", handlers, on_join=lambda m: None, on_fail=lambda m, e, t: None)
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def until(condition):
    end = asyncio.get_running_loop().time() + 30
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.05)


def test_an_agent_ends_its_children(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.logs(1).mkdir(parents=True)
    (tmp_path / "stub" / "prl").mkdir(parents=True)
    (tmp_path / "stub/prl/__init__.py").touch()
    (tmp_path / "stub/prl/sleeper.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    log = run.logs(1) / "sleeper-0.log"
    options = ControlOptions(heartbeat_s=0.1, lost_after_s=1.0, stop_s=0.5)

    async def main(url):
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        await until(lambda: log.exists() and log.read_text().endswith("\n"))
        child = psutil.Process(int(log.read_text()))
        server.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(15):
            with pytest.raises(ControlError, match="has answered no heartbeat for 1 s"):
                await agent
        assert not child.is_running()

    arguments = [sys.executable, "-c", SERVER, str(tmp_path / "stub")]
    server = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        asyncio.run(main(server.stdout.readline().strip()))
    finally:
        server.kill()
        server.wait()
