"""A process's line to the orchestrator: join, heartbeat with progress, and calls with a deadline."""

import asyncio
import os
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import aiohttp

from prl.control.options import ControlOptions
from prl.control.token import authorization


class ControlError(Exception):
    """The orchestrator could not be reached in time, or refused a call."""


class ControlClient:
    def __init__(self, url: str, token: str, role: str, index: int, options: ControlOptions) -> None:
        self.url = url
        self.role = role
        self.index = index
        self.stopping = asyncio.Event()
        self.grace_s = options.stop_s  # what is left to end by oneself once stopping is set
        self.lost: ControlError | None = None  # why the orchestrator counts as gone
        self._options = options
        self._headers = authorization(token)
        self._session: aiohttp.ClientSession | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._progress = 0
        self._doing = "starting"

    async def __aenter__(self) -> "ControlClient":
        self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def join(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Tell the orchestrator that this process is ready, with the facts that others need of it; heartbeats start here."""
        body = {"pid": os.getpid(), "host": os.uname().nodename, "facts": dict(facts)}
        answer = await self.call("join", body, deadline_s=self._options.start_s, reason="joining the run")
        self._heartbeat = asyncio.create_task(self._beat(), name="heartbeat")
        return answer

    def progress(self, doing: str) -> None:
        """Count a step forward and say what comes next; the watchdog reads it."""
        self._progress += 1
        self._doing = doing

    async def call(self, name: str, body: Mapping[str, Any], *, deadline_s: float, reason: str) -> dict[str, Any]:
        """POST /<name>. A refused or broken connection is tried again until the deadline; all tries carry one number, by which
        the orchestrator knows a call whose answer was lost. An answer other than 200 raises ControlError at once with the
        orchestrator's words."""
        if self._session is None:
            raise ControlError(f"{self.role} {self.index}: the control client is not open")
        end = time.monotonic() + deadline_s
        full = {"role": self.role, "index": self.index, "call": uuid.uuid4().hex, **body}
        pause_s = 0.05
        while True:
            if self.lost is not None:
                raise self.lost  # no run is left that an answer could help
            left_s = end - time.monotonic()
            try:
                timeout = aiohttp.ClientTimeout(total=max(left_s, 0.001))
                async with self._session.post(f"{self.url}/{name}", json=full, timeout=timeout) as response:
                    if response.status != 200:
                        raise ControlError(
                            f"orchestrator refused /{name} ({reason}): {response.status} {await response.text()}"
                        )
                    answer: dict[str, Any] = await response.json()
                    self.grace_s = answer.get("grace_s", self.grace_s)
                    if answer.get("stop"):
                        self.stopping.set()
                    return answer
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                if time.monotonic() + pause_s >= end:
                    raise ControlError(
                        f"no answer from the orchestrator at {self.url}/{name} within {deadline_s:.0f} s ({reason}): {error!r}"
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def _beat(self) -> None:
        """Heartbeats go on while the process ends its work, until it leaves the client's context."""
        while True:
            try:
                await self.call(
                    "heartbeat",
                    {"progress": self._progress, "doing": self._doing},
                    deadline_s=self._options.lost_after_s,
                    reason="heartbeat",
                )
            except ControlError as error:
                if not self.stopping.is_set():
                    self.lost = error  # without an orchestrator there is no run
                    self.stopping.set()
                return
            await asyncio.sleep(self._options.heartbeat_s)
