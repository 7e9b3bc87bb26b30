"""The orchestrator's end of the control plane: one HTTP server, the run's token before every route, members with progress."""

import asyncio
import json
import logging
import time
import traceback
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from prl.control.tasks import end_tasks
from prl.control.token import is_authorized
from prl.runfolder.publish import in_words

Answer = Mapping[str, Any]
RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Handler = Callable[["Member", Mapping[str, Any]], Awaitable[Answer]]

MAX_BODY_BYTES = 64 * 2**20
REMEMBERED_CALLS = 256  # of each member; more than it has open at once
LAST_CALLS_S = 1.0  # that calls under way have to be answered when the server closes,
BROKEN_OFF_S = 20.0  # and that they have to end where they are not
log = logging.getLogger(__name__)


@dataclass
class Member:
    """A process of the run as the orchestrator knows it."""

    role: str
    index: int
    start: int = 0  # how often its process was started before
    pid: int = 0
    host: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    joined: bool = False
    progress: int = 0
    doing: str = "starting"
    seen_s: float = 0.0  # clock of the server
    gone: bool = False  # the process has ended: what it still waits for is of no use to anyone
    ends_run: bool = False  # it failed, and another start of it would only fail again

    calls: "OrderedDict[str, asyncio.Task[web.Response]]" = field(default_factory=OrderedDict)  # the latest, by number

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


class ControlServer:
    """Answers POST /<name> with the handler of that name. `join`, `heartbeat` and `fail` are its own."""

    def __init__(
        self,
        token: str,
        handlers: Mapping[str, Handler],
        *,
        on_join: Callable[[Member], None],
        on_fail: Callable[[Member, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members: dict[tuple[str, int], Member] = {}
        self.stopping = False  # told to every process with its next heartbeat,
        self.grace_s = 0.0  # with the time that it has to end by itself
        self._token = token
        self._handlers = {"join": self._join, "heartbeat": self._heartbeat, "fail": self._fail, **handlers}
        self._on_join = on_join
        self._on_fail = on_fail
        self._clock = clock
        self._runner: web.AppRunner | None = None
        self._calls: set[asyncio.Task[web.Response]] = set()  # under way

    def add(self, handlers: Mapping[str, Handler]) -> None:
        """Answer these calls too, of parts that need the server themselves; before it is started."""
        self._handlers.update(handlers)

    async def start(self, host: str, port: int = 0) -> str:
        """Listen on one address (port 0: a free one) and return the URL."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._authorize])
        app.router.add_post("/{name}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=LAST_CALLS_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Nothing is called any more; returns once all calls under way have ended, which are broken off where nobody has
        answered them meanwhile. Raises TimeoutError where one does not end."""
        if self._runner is not None:
            await self._runner.cleanup()
        await end_tasks(self._calls, BROKEN_OFF_S)

    def forget(self, role: str, index: int, start: int) -> None:
        """This start of a process has ended. Calls of it that are on their way still are refused."""
        before = self.members.setdefault((role, index), Member(role, index, start))
        if before.start <= start:
            before.gone = True
            self.members[role, index] = Member(role, index, start + 1)

    def silent(self, after_s: float, role: str | None = None) -> list[Member]:
        """Members (of a role) that joined and were not heard of for so many seconds."""
        now, wanted = self._clock(), self.members.values()
        return [m for m in wanted if m.joined and role in (None, m.role) and now - m.seen_s > after_s]

    def of_role(self, role: str) -> list[Member]:
        """Joined members of a role by their index."""
        return sorted((m for m in self.members.values() if m.role == role and m.joined), key=lambda m: m.index)

    @web.middleware
    async def _authorize(self, request: web.Request, handler: RequestHandler) -> web.StreamResponse:
        if not is_authorized(request.headers.get("Authorization"), self._token):
            return web.Response(status=401, text="this run's token is missing or wrong")
        return await handler(request)

    async def _serve(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        handler = self._handlers.get(name)
        if handler is None:
            return web.Response(status=404, text=f"no call /{name}; there are: {', '.join(sorted(self._handlers))}")
        try:
            body = await request.json()
            role, index, start = str(body["role"]), int(body["index"]), int(body.get("start", 0))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
            return web.Response(status=400, text=f"/{name}: expected a JSON object with role and index: {error!r}")
        member = self.members.get((role, index))
        if member is None or start > member.start:
            member = self.members[role, index] = Member(role, index, start)
        elif start < member.start:
            return web.Response(status=410, text=f"/{name}: start {start} of {member.name} has ended")
        member.seen_s = self._clock()
        number = str(body.get("call") or uuid.uuid4().hex)
        if number not in member.calls:  # else the answer to an earlier try was lost: it is given again
            call = asyncio.create_task(self._answer(name, handler, member, body), name=f"/{name} of {member.name}")
            member.calls[number] = call
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            while len(member.calls) > REMEMBERED_CALLS:
                member.calls.popitem(last=False)
        response = await asyncio.shield(member.calls[number])
        return web.Response(status=response.status, text=response.text, content_type=response.content_type)

    async def _answer(self, name: str, handler: Handler, member: Member, body: Mapping[str, Any]) -> web.Response:
        try:
            return web.json_response(await handler(member, body))
        except (KeyError, TypeError, ValueError) as error:
            log.exception("call /%s of %s", name, member.name)
            return web.Response(status=400, text=f"/{name} of {member.name}: {error!r}")
        except Exception as error:  # a fault of the orchestrator (a full filesystem, say) is the run's, not the caller's
            log.exception("call /%s of %s", name, member.name)
            words = f"/{name} of {member.name}: {in_words(error)}"
            self._on_fail(Member("orchestrator", 0), words, traceback.format_exc())
            return web.Response(status=500, text=words)

    async def _join(self, member: Member, body: Mapping[str, Any]) -> Answer:
        member.pid, member.host, member.facts = int(body["pid"]), str(body["host"]), dict(body["facts"])
        member.joined = True
        self._on_join(member)
        return {}

    async def _heartbeat(self, member: Member, body: Mapping[str, Any]) -> Answer:
        member.progress, member.doing = int(body["progress"]), str(body["doing"])
        return {"stop": self.stopping, "grace_s": self.grace_s}

    async def _fail(self, member: Member, body: Mapping[str, Any]) -> Answer:
        member.ends_run = bool(body.get("ends_run"))
        self._on_fail(member, str(body["error"]), str(body.get("traceback", "")))
        return {}


class Bell:
    """Wakes everyone who waits for something to have changed: `await bell.until(condition, timeout_s)`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._looks: list[Callable[[], None]] = []

    def on_ring(self, look: Callable[[], None]) -> None:
        """Call `look` at every ring, before anyone wakes: it may ring a bell for those who wait for little of what changes."""
        self._looks.append(look)

    def off_ring(self, look: Callable[[], None]) -> None:
        """Call it no more."""
        self._looks.remove(look)

    def ring(self) -> None:
        for look in self._looks:
            look()
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether the condition held before the time was up; it is looked at after every ring."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._event.wait()
        except TimeoutError:
            return condition()
        return True
