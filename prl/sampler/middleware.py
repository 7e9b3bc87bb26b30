"""The guard before every route of vLLM's server: the run's token first, then whether this sampler may answer at all."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from prl.control.token import is_authorized
from prl.sampler.replica import Replica

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# What a sampler answers that has no valid weights: everything else could sample from them.
ALWAYS_OPEN = frozenset({"/health", "/ping", "/version", "/load", "/metrics", "/v1/models"})
OWN_PREFIXES = ("/prl/weights/", "/prl/state", "/prl/routes")


class Guard:
    """ASGI middleware. Must be the outermost one, so that nothing of vLLM's sees a request without the token."""

    def __init__(self, app: App, token: str, replica: Replica, direct: Mapping[str, App]) -> None:
        """`direct`: applications by path that need nothing of what vLLM's server puts around its routes."""
        self._app = app
        self._direct = direct
        self._token = token
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
        if not is_authorized(header, self._token):
            await _refuse(scope, send, 401, "this run's token is missing or wrong")
            return
        if not _always_open(scope["path"]):
            await self._replica.entrance.turn()
            if self._replica.closed is not None:
                await _refuse(scope, send, 503, self._replica.closed)
                return
        await self._direct.get(scope["path"], self._app)(scope, receive, send)


def _always_open(path: str) -> bool:
    return path in ALWAYS_OPEN or path.startswith(OWN_PREFIXES)


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason[:100]})  # before accept: the server answers 403
        return
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
