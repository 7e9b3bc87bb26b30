"""The route that actors ask: token ids in, token ids with log-probs and versions out, straight to vLLM's engine.

vLLM's own routes answer the same (and stay where they are); a server of its kind builds objects and JSON for every token,
which for short answers is a good part of a sampler's work.

POST /prl/generate {token_ids, sampling_params}, as of /inference/v1/generate, ->
{answers: [{token_ids, logprobs, versions: [[version, start, end]...], finish_reason}...]}, all arrays, one answer for each of
`sampling_params.n`. Where vLLM records the experts that tokens went to: also routings, [tokens, layers, experts a token, dtype,
the numbers' bytes in base64], of prompt and answer without the last token.
"""

import asyncio
import itertools
from functools import lru_cache
from typing import Any

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from prl.sampler.middleware import Receive, Scope, Send

PATH = "/prl/generate"
_HEADERS = [(b"content-type", b"application/json")]


class _Request(msgspec.Struct):
    token_ids: list[int]
    sampling_params: msgspec.Raw


_decoder = msgspec.json.Decoder(_Request)
_encoder = msgspec.json.Encoder()


class Generate:
    """ASGI application of the route. A client that goes away aborts its request."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _answer(send, 405, {"error": f"{PATH} takes POST alone"})
            return
        body = await _body(receive)
        if body is None:
            return
        gone = asyncio.ensure_future(receive())  # nothing but the disconnect comes behind the body
        work = asyncio.ensure_future(self._generate(body))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await _answer(send, *work.result())
        finally:
            gone.cancel()
            work.cancel()

    async def _generate(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            request = _decoder.decode(body)
            parameters = _parameters(bytes(request.sampling_params))
            prompt = tokens_input(request.token_ids)
            answered = self._engine.generate(prompt, parameters, f"prl-{next(self._numbers)}")
            output: RequestOutput = [one async for one in answered][-1]  # there is but the last one
        except (VLLMClientError, msgspec.MsgspecError, TypeError, ValueError) as error:
            return 400, {"error": f"{PATH}: {error}"}
        except Exception as error:  # what the engine failed at; its log has the rest
            return 500, {"error": f"{PATH}: {type(error).__name__}: {error}"}
        return 200, {"answers": [_as_arrays(one) for one in output.outputs]}


@lru_cache(maxsize=256)
def _parameters(text: bytes) -> SamplingParams:
    """Requests of a run share a few sets of parameters; vLLM copies them for each."""
    fields = msgspec.json.decode(text, type=dict[str, Any])
    always = {"logprobs": 0, "flat_logprobs": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(**fields | always)


def _as_arrays(output: CompletionOutput) -> dict[str, Any]:
    spans = [(span.version, span.start, span.end) for span in output.weight_versions or ()]
    logprobs = output.logprobs.logprobs if output.logprobs else []  # flat: the sampled token's alone
    routed = output.routed_experts
    return {
        "token_ids": list(output.token_ids),
        "logprobs": logprobs,
        "versions": spans,
        "finish_reason": output.finish_reason,
        **({} if routed is None else {"routings": [*routed.shape, routed.dtype.name, routed.tobytes()]}),  # bytes in base64
    }


async def _body(receive: Receive) -> bytes | None:
    """None: the client went away."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = _encoder.encode(content)
    headers = [*_HEADERS, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
