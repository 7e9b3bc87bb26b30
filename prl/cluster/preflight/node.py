"""The preflight as a node's agent goes through it: it is asked, measures, and hears whether its children may be started."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prl.cluster.preflight.measure import measure_node
from prl.cluster.preflight.transfer import Listener, transfer
from prl.control.client import ControlClient

CALL_S = 60.0  # deadline of a call that is answered at once


async def pass_preflight(client: ControlClient, canary: Path, host: str, token: str) -> bool:
    """Whether this node's children may be started. `canary` is the attempt's, `host` this node's address. Raises ControlError
    where the orchestrator is lost or does not decide in its time, and OSError where the address is not this node's."""

    async def ask_time() -> float:
        answer = await client.call("clock", {}, deadline_s=CALL_S, reason="the orchestrator's clock")
        return float(answer["time_s"])

    answer = await client.call("preflight", {}, deadline_s=CALL_S, reason="what is asked of this node")
    wanted = answer["wanted"]
    if wanted is None:
        return True
    client.progress("at the preflight")
    limit_s = float(wanted["limit_s"]) + CALL_S  # that of the orchestrator, which names whom it waited for
    facts = await measure_node(canary, wanted["visible_s"], host, devices=wanted["devices"], ask_time=ask_time)
    async with _listener(host, token) if wanted["listens"] else contextlib.nullcontext() as port:
        body = {"facts": asdict(facts), "port": port}
        answer = await client.call("measured", body, deadline_s=limit_s, reason="all nodes to be measured")
        link = None if answer["peer"] is None else await _link(answer["peer"], token)
        answer = await client.call("transferred", {"link": link}, deadline_s=limit_s, reason="the verdict on all nodes")
    return bool(answer["goes_on"])


@contextlib.asynccontextmanager
async def _listener(host: str, token: str) -> AsyncIterator[int]:
    """The port on which transfers are answered meanwhile."""
    listener = Listener(host, token)
    serving = asyncio.create_task(listener.serve(), name="the answers to transfers")
    try:
        yield listener.port
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


async def _link(peer: Mapping[str, Any], token: str) -> dict[str, Any]:
    """What became of the transfer with another node, as facts of a Link."""
    try:
        to_peer, from_peer = await transfer(peer["host"], peer["port"], token, peer["wait_s"])
    except OSError as error:
        return {"error": str(error) or type(error).__name__}
    return {"to_peer_mib_per_s": to_peer, "from_peer_mib_per_s": from_peer}
