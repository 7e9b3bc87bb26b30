"""The routes by which the orchestrator moves a sampler from version to version; they stand behind the guard."""

import json
from collections.abc import Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from prl.flow.versions import Version
from prl.sampler.replica import CommitRefused, Replica

_CONNECT = {
    "master_address": str,
    "master_port": int,
    "rank_offset": int,
    "world_size": int,
    "epoch": int,
    "timeout_s": float,
    "facts": dict,
}
_RECEIVE = {"lineage": int, "step": int, "epoch": int, "tensors": list, "bucket_bytes": int}
_LOAD = {"lineage": int, "step": int, "epoch": int, "seed": int, "tensors": list}
_STORE = {"lineage": int, "step": int, "seed": int, "folder": str, "tensors": list}
_FENCE: dict[str, type] = {"reason": str}
_COMMIT = {"lineage": int, "step": int, "digest": str, "clear_cache": bool}


def add_routes(app: Starlette, replica: Replica, direct: Iterable[str]) -> None:
    """`direct`: paths that are answered before the application is asked; for the list of routes alone."""

    async def connect(request: Request) -> Response:
        """{master_address, master_port, rank_offset, world_size, epoch, timeout_s, facts, tensors?, lanes?}: join the transfer
        group of an epoch, or with `lanes` ({trainer_ranks, samplers}) its groups of those, in a thread. 400 where the trainer's
        `facts` (prl/weights/agreement.py) and ours do not go together, `tensors` are given and do not fit the model, or lanes
        cannot lead to this sampler."""
        body = await _body(request, _CONNECT)
        await replica.connect(_checked(body, _CONNECT) | {key: body[key] for key in ("tensors", "lanes") if key in body})
        return JSONResponse({})

    async def receive(request: Request) -> Response:
        """{lineage, step, epoch, tensors, bucket_bytes}: take the next version, in a thread. 400 where it does not fit."""
        await replica.receive(_checked(await _body(request, _RECEIVE), _RECEIVE))
        return JSONResponse({})

    async def load(request: Request) -> Response:
        """{lineage, step, epoch, seed, tensors}: read a version from weights/ of the run folder, in a thread."""
        await replica.load(_checked(await _body(request, _LOAD), _LOAD))
        return JSONResponse({})

    async def store(request: Request) -> Response:
        """{lineage, step, seed, folder, tensors}: write the live version to files in `folder`, in a thread. 409 where another
        one is live."""
        body = _checked(await _body(request, _STORE), _STORE)
        version = Version(body.pop("lineage"), body.pop("step"))
        try:
            await replica.store(version, body)
        except CommitRefused as error:
            return JSONResponse({"error": str(error)}, status_code=409)
        return JSONResponse({})

    async def commit(request: Request) -> Response:
        """{lineage, step, digest, clear_cache} -> {pause_s, gap_s, digest}. 409 where the version is not what was asked for."""
        body = _checked(await _body(request, _COMMIT), _COMMIT)
        version = Version(body["lineage"], body["step"])
        if not body["digest"].isdecimal():
            raise _Bad(f"digest must be a decimal number as a string, not {body['digest']!r}")
        try:
            done = await replica.commit(version, int(body["digest"]), body["clear_cache"])
        except CommitRefused as error:
            return JSONResponse({"error": str(error)}, status_code=409)
        return JSONResponse({"pause_s": done.pause_s, "gap_s": done.gap_s, "digest": str(done.digest)})

    async def fence(request: Request) -> Response:
        """{reason}: serve nothing until the next commit; what is in flight is aborted and answered as far as it has come."""
        await replica.fence(_checked(await _body(request, _FENCE), _FENCE)["reason"])
        return JSONResponse({})

    async def state(request: Request) -> Response:
        """{version: "lineage:step" or null, closed: the reason or null}."""
        version = None if replica.version is None else str(replica.version)
        return JSONResponse({"version": version, "closed": replica.closed})

    async def routes(request: Request) -> Response:
        """{routes: [[path, [method...]]...]}: all that this server answers; no methods: a websocket or a mount."""
        listed = [[getattr(route, "path", ""), sorted(getattr(route, "methods", None) or [])] for route in app.routes]
        listed += [[path, ["POST"]] for path in direct]
        return JSONResponse({"routes": listed})

    handlers = {"connect": connect, "receive": receive, "load": load, "store": store, "commit": commit, "fence": fence}
    for path, handler in handlers.items():
        app.add_route(f"/prl/weights/{path}", _words(handler), methods=["POST"])
    app.add_route("/prl/state", state, methods=["GET"])
    app.add_route("/prl/routes", routes, methods=["GET"])


class _Bad(ValueError):
    """The body is not what the route takes."""


def _words(handler: Any) -> Any:
    """Answer a refusal with its words: a wrong body or what the engine said 400."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except TimeoutError:
            return JSONResponse({"error": f"{request.url.path}: vLLM's engine did not answer in time"}, status_code=504)
        except Exception as error:  # vLLM hands over a worker's exception as a bare Exception with its text
            return JSONResponse({"error": f"{request.url.path}: {error}"}, status_code=400)

    return answered


async def _body(request: Request, fields: dict[str, type]) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise _Bad(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Bad(f"expected a JSON object with {', '.join(fields)}")
    return body


def _checked(body: dict[str, Any], fields: dict[str, type]) -> dict[str, Any]:
    """The named fields, each of its type (an int is a float too)."""
    for name, kind in fields.items():
        if name not in body:
            raise _Bad(f"{name} is missing (expected: {', '.join(fields)})")
        value = body[name]
        if kind is float and type(value) is int:
            body[name] = float(value)
        elif type(value) is not kind:
            raise _Bad(f"{name} must be {kind.__name__}, not {value!r}")
    return {name: body[name] for name in fields}
