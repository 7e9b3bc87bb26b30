"""A stand-in for a sampler: a real HTTP server that replays recorded replies. Faults that cannot be had from a real one at will
are set by tests."""

import asyncio
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

RECORDED = json.loads((Path(__file__).parent / "recorded_reply.json").read_text())
TOKEN = "the run's token"


def choice(token_ids: list[int], *, finish_reason: str = "stop", spans: list[tuple[str, int, int]] | None = None):
    """A recorded answer with other tokens; token t has the log-prob -(t + 1) / 16."""
    changed = copy.deepcopy(RECORDED["answers"][0])
    spans = [("0:0", 0, len(token_ids))] if spans is None else spans
    changed.update(
        finish_reason=finish_reason,
        token_ids=token_ids,
        versions=[list(span) for span in spans],
        logprobs=[-(t + 1) / 16 for t in token_ids],
    )
    return changed


def reply(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"answers": answers}


def replay(body: dict[str, Any]) -> dict[str, Any]:
    """The recorded answers in turn, as many as were asked for."""
    recorded = RECORDED["answers"]
    return reply([recorded[k % len(recorded)] for k in range(body["sampling_params"]["n"])])


class SamplerStandIn:
    """`answer` gives the JSON reply, a status or bytes to a request's body; requests are kept in `bodies`."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any] = replay) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.hold: asyncio.Event | None = None  # answers wait for it,
        self.holds: Callable[[dict[str, Any]], bool] = lambda body: True  # those to such requests
        self.dropped = 0  # requests whose client went away
        self.url = ""

    async def __aenter__(self) -> "SamplerStandIn":
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/prl/generate", self._generate)
        # As uvicorn does: a client that goes away cancels its request.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "token"}, status=401)
        body = await request.json()
        self.bodies.append(body)
        try:
            if self.hold is not None and self.holds(body):
                await self.hold.wait()
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        answer = self.answer(body)
        if isinstance(answer, int):
            return web.json_response({"error": f"status {answer}"}, status=answer)
        if answer == "disconnect":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(
            body=answer if isinstance(answer, bytes) else json.dumps(answer).encode(), content_type="application/json"
        )


async def until(condition: Callable[[], Any], deadline_s: float = 10.0) -> None:
    """Returns once the condition holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 (conditions of all kinds)
            await asyncio.sleep(0.01)
