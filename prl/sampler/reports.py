"""What a worker tells the orchestrator of a version, from a thread."""

import asyncio
import traceback
from collections.abc import Mapping
from typing import Any

from prl.control.child import Child
from prl.control.client import ControlClient


def report_version(child: Child, worker: int, call: str, report: Mapping[str, Any]) -> None:
    """`call`: staged or stored. A loss shows with the orchestrator's own deadline."""
    try:
        asyncio.run(_report(child, call, {"replica": child.index, "worker": worker, **report}))
    except Exception:
        traceback.print_exc()


async def _report(child: Child, call: str, body: Mapping[str, Any]) -> None:
    async with ControlClient(
        child.control_url, child.token, child.role, child.index, child.config.control, start=child.start
    ) as client:
        await client.call(call, body, deadline_s=child.config.weights.update_s, reason=f"reporting a {call} version")
