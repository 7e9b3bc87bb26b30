"""A process's line to the orchestrator: join, heartbeat with progress, and calls with a deadline."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import aiohttp

from prl.control.options import ControlOptions
from prl.control.token import authorization

LATE_S = 1.0  # a try that took so much longer than it may was held up on this side
TRIES = 4  # of a heartbeat, before its lack of an answer means that the orchestrator is lost
_NO_ANSWER = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)


class ControlError(Exception):
    """The orchestrator could not be reached in time, or refused a call."""


class ControlClient:
    def __init__(
        self,
        url: str,
        token: str,
        role: str,
        index: int,
        options: ControlOptions,
        *,
        start: int = 0,
        on_lost: Callable[[ControlError], None] = lambda error: None,
    ) -> None:
        """`start`: how often this process was started before. `on_lost` is told once why the orchestrator counts as gone;
        `stopping` is set then, too."""
        self.url = url
        self.role = role
        self.index = index
        self._who = {"role": role, "index": index, "start": start}
        self.stopping = asyncio.Event()
        self.grace_s = options.stop_s  # what is left to end by oneself once stopping is set
        self.lost: ControlError | None = None  # why the orchestrator counts as gone
        self._gone: ControlError | None = None  # the same, also where the run was ending anyhow
        self._open: set[asyncio.Timeout] = set()  # limits of the calls in flight
        self._on_lost = on_lost
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
        orchestrator's words; so does an orchestrator that is lost."""
        if self._session is None:
            raise ControlError(f"{self.role} {self.index}: the control client is not open")
        end = time.monotonic() + deadline_s
        full = {"call": uuid.uuid4().hex, **body}
        pause_s = 0.05
        while True:
            if self._gone is not None:
                raise self._gone  # no run is left that an answer could help
            try:
                return await self._post(self._session, name, full, max(end - time.monotonic(), 0.001), reason)
            except _NO_ANSWER as error:
                if self._gone is None and time.monotonic() + pause_s >= end:
                    raise ControlError(
                        f"no answer from the orchestrator at {self.url}/{name} within {deadline_s:.0f} s ({reason}): {error!r}"
                    ) from error
            if self._gone is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)

    async def _post(
        self, session: aiohttp.ClientSession, name: str, body: Mapping[str, Any], limit_s: float, reason: str
    ) -> dict[str, Any]:
        """One try. Raises one of _NO_ANSWER, or ControlError where the call was refused."""
        full = {**body, **self._who}
        no_limit = aiohttp.ClientTimeout(total=None)  # but the one that can be shortened
        async with asyncio.timeout(limit_s) as limit:
            self._open.add(limit)
            try:
                async with session.post(f"{self.url}/{name}", json=full, timeout=no_limit) as response:
                    if response.status != 200:
                        raise ControlError(
                            f"orchestrator refused /{name} ({reason}): {response.status} {await response.text()}"
                        )
                    answer: dict[str, Any] = await response.json()
            finally:
                self._open.discard(limit)
        self.grace_s = answer.get("grace_s", self.grace_s)
        if answer.get("stop"):
            self.stopping.set()
        return answer

    async def _beat(self) -> None:
        """Heartbeats go on while the process ends its work, until it leaves the client's context. They have a session of their
        own, whose connections no other call holds up, and deadlines by which a silent orchestrator is seen: calls in flight
        may wait for much longer."""
        beat_s, lost_after_s = self._options.heartbeat_s, self._options.lost_after_s
        try_s = lost_after_s / TRIES
        async with aiohttp.ClientSession(headers=self._headers) as session:
            heard = looked = time.monotonic()
            while True:
                body = {"progress": self._progress, "doing": self._doing}
                try:
                    await self._post(session, "heartbeat", body, try_s, "heartbeat")
                    heard = looked = time.monotonic()
                except ControlError as refusal:
                    return self._give_up(refusal)
                except _NO_ANSWER as error:
                    before, looked = looked, time.monotonic()
                    if looked - before > beat_s + try_s + LATE_S:
                        heard = looked  # this process was held up itself (stopped, say) and could not read the answers
                    elif looked - heard >= lost_after_s:
                        words = (
                            f"the orchestrator at {self.url} has answered no heartbeat for {looked - heard:.0f} s: {error!r}"
                        )
                        return self._give_up(ControlError(words))
                await asyncio.sleep(beat_s)

    def _give_up(self, error: ControlError) -> None:
        """Without an orchestrator there is no run: calls in flight end now."""
        self._gone = error
        for limit in self._open:
            limit.reschedule(asyncio.get_running_loop().time())
        if not self.stopping.is_set():
            self.lost = error
            self.stopping.set()
            self._on_lost(error)
