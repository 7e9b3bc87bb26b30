"""One orchestrator and many node agents: what their joins and heartbeats cost it, and when it notices one that is lost.

    python tools/bench/agents.py [--agents 1000] [--seconds 20] [--lost-after 10]

The orchestrator is the real one, in a process of its own, with the plan of a heterogeneous job of so many nodes. Its agents are
simulated: all in this process, each with the connection, the join, the calls of the preflight and for its children and the
heartbeats of a real one (one a second, as by default), but without children; what they tell at the preflight is made up.
Printed: the time until all have joined and heard that they may go on, the orchestrator's processor time and memory while they
only live on, and how long after one of them fell silent the others were told to stop.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from prl.cluster.allocation import Allocation, Host
from prl.cluster.preflight.measure import CLOCK_TRIES, Clock, NodeFacts, Room
from prl.cluster.split import make_split
from prl.config.load import load
from prl.config.schema import Config
from prl.control.client import ControlClient
from prl.control.garbage import leave_what_is_loaded
from prl.control.token import create_token, read_token
from prl.orchestrator.binding import bind
from prl.orchestrator.main import Orchestrator
from prl.orchestrator.resume import find_start, publish_plan
from prl.runfolder.paths import RunFolder

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
START_S = 600.0  # the children, which never come, are waited for that long


def config_of(agents: int, lost_after_s: float) -> Config:
    overrides = {
        "cluster.nodes": agents,
        "cluster.stage_model": "never",  # there is none
        "run.groups_per_step": agents,  # enough work for so many samplers
        "control.start_s": START_S,
        "control.lost_after_s": lost_after_s,
    }
    return load(CONFIG, [f"{key}={value}" for key, value in overrides.items()])


async def lead(folder: Path, agents: int, lost_after_s: float) -> None:
    """The orchestrator's process. Its lines: the URL, then what the run ended of and its highest memory."""
    config = config_of(agents, lost_after_s)
    run = RunFolder(folder)
    hosts = tuple(Host(f"node{number:04d}", "127.0.0.1") for number in range(agents))
    allocation = Allocation("1", 0, 0, (hosts[:1], hosts[1:]))
    start = find_start(run, config)
    plan = bind(config, make_split(config), allocation, 1)
    publish_plan(run, plan, start)
    orchestrator = Orchestrator(run, config, plan, start, read_token(run.token))
    leave_what_is_loaded()
    print(json.dumps(await orchestrator.serve("127.0.0.1")), flush=True)
    outcome = await orchestrator.lead()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cause": outcome.cause, "peak_mib": peak_mib}), flush=True)


async def pass_made_up_preflight(client: ControlClient) -> None:
    async def call(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await client.call(name, body, deadline_s=START_S, reason="the preflight")

    await call("preflight", {})
    for _ in range(CLOCK_TRIES):
        await call("clock", {})
    facts = NodeFacts("word", Clock(0.0, 0.0), 2**40, Room("/tmp", 2**40, None), 12_000, None, {})  # noqa: S108
    answer = await call("measured", {"facts": asdict(facts), "port": 1})
    link = None if answer["peer"] is None else {"to_peer_mib_per_s": 1000.0, "from_peer_mib_per_s": 1000.0}
    answer = await call("transferred", {"link": link})
    assert answer["goes_on"]


async def drive(agents: int, seconds: float, lost_after_s: float) -> None:
    options = config_of(agents, lost_after_s).control
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(folder)
        run.create()
        run.logs(1).mkdir(parents=True)
        token = create_token(run.token)
        own = [__file__, "--lead", folder, "--agents", str(agents), "--lost-after", str(lost_after_s)]
        process = await asyncio.create_subprocess_exec(sys.executable, *own, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        url = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        server = psutil.Process(process.pid)
        clients = [ControlClient(url, token, "agent", number, options) for number in range(agents)]

        async def begin(client: ControlClient) -> None:
            await client.__aenter__()
            await client.join({"address": "127.0.0.1"})
            await pass_made_up_preflight(client)
            await client.call("children", {}, deadline_s=START_S, reason="the plan of this node's children")

        began = time.monotonic()
        await asyncio.gather(*map(begin, clients))
        print(f"{agents} agents joined and passed the preflight in {time.monotonic() - began:.1f} s, all starting at once")
        await asyncio.sleep(2 * options.heartbeat_s)
        before, began = server.cpu_times(), time.monotonic()
        await asyncio.sleep(seconds)
        used, took_s = server.cpu_times(), time.monotonic() - began
        cores = (used.user + used.system - before.user - before.system) / took_s
        mib = server.memory_info().rss / 2**20
        print(f"{agents / options.heartbeat_s:.0f} heartbeats a second: {cores:.2f} cores, {mib:.0f} MiB")
        lost = clients.pop(agents // 2)
        await lost.__aexit__(None, None, None)
        silent = time.monotonic()
        await asyncio.wait_for(clients[0].stopping.wait(), lost_after_s + 60)
        print(
            f"another agent was told to stop {time.monotonic() - silent:.1f} s after one fell silent (limit {lost_after_s:g} s)"
        )
        await asyncio.gather(*(client.call("node_done", {}, deadline_s=30, reason="the end") for client in clients))
        end = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        print(f"cause of the end: {end['cause']}; highest memory {end['peak_mib']:.0f} MiB")
        await asyncio.gather(*(client.__aexit__(None, None, None) for client in clients))
        await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long their life is watched (default: %(default)s)")
    parser.add_argument("--lost-after", type=float, default=10.0, help="control.lost_after_s (default: %(default)s)")
    parser.add_argument("--lead", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8 * arguments.agents + 1000)), hard))
    if arguments.lead:
        asyncio.run(lead(arguments.lead, arguments.agents, arguments.lost_after))
    else:
        asyncio.run(drive(arguments.agents, arguments.seconds, arguments.lost_after))


if __name__ == "__main__":
    main()
