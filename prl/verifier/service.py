"""The verifier's HTTP service: POST /check {"rule", "gold", "answers": [...]} -> {"verdicts": [...]}, the run's token before
every route."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web

from prl.control.token import is_authorized
from prl.verifier.pool import CheckError, Pool

_BODY_BYTES = 64 * 2**20


class VerifierService:
    """Used as an async context manager; listens on entry, on `url`."""

    def __init__(self, pool: Pool, token: str, host: str, port: int = 0) -> None:
        """`port` 0: a free one."""
        self.checks = 0
        self.url = ""
        self._pool = pool
        self._token = token
        self._host = host
        self._port = port
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[self._authorize])
        app.router.add_post("/check", self._check)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self.url = f"http://{self._host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not is_authorized(request.headers.get("Authorization"), self._token):
            return web.json_response({"error": "this run's token is missing or wrong"}, status=401)
        return await handler(request)

    async def _check(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            rule, gold, answers = body["rule"], body["gold"], body["answers"]
            if not (isinstance(rule, str) and isinstance(gold, str) and isinstance(answers, list)):
                raise TypeError("rule and gold must be texts, answers a list")
            if not all(isinstance(answer, str) for answer in answers):
                raise TypeError("answers must be texts")
        except (ValueError, KeyError, TypeError) as error:
            return web.json_response({"error": f"expected rule, gold and answers: {error!r}"}, status=400)
        distinct = list(dict.fromkeys(answers))  # the rollouts of a group often agree
        # Not a TaskGroup: one failure would cancel the other checks, and a worker with a cancelled check must be killed.
        results = await asyncio.gather(*(self._pool.check(rule, gold, answer) for answer in distinct), return_exceptions=True)
        for result in results:
            if isinstance(result, CheckError):
                return web.json_response({"error": str(result)}, status=422)
            if isinstance(result, BaseException):
                raise result
        self.checks += len(answers)
        verdicts = dict(zip(distinct, results, strict=True))
        return web.json_response({"verdicts": [verdicts[answer] for answer in answers]})
