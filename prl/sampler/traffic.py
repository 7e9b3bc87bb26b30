"""What passes between vLLM's server and its engine: requests on their way in are salted with the version (unless prefixes are
to be shared between versions), outputs on their way out are timed. Both sit at the one place that all routes share."""

import asyncio
import time
from typing import Any

_LOOK_S = 1.0  # between two looks at whether tokens come
_FIRST_TOKEN_S = 5.0  # longest wait for the first token after an update; where it lasts longer, the gap is told as so far


class Traffic:
    """`label` names the weights that new requests meet. Requests of one label may share the KV cache of a common prefix, so
    that a request never reuses keys and values that an earlier version computed; while it is None (the weights are being
    exchanged) each shares with itself alone. A request that waits in the engine's queue over an update counts as in flight:
    it keeps its label, and with it what the earlier version left."""

    def __init__(self, engine: Any, *, salted: bool) -> None:
        self.label: str | None = None
        self._outputs = engine.output_processor
        self._seen = 0  # outputs of the engine so far
        self._last_s: float | None = None  # time of the last output behind which requests were still waiting for more
        self._since_s = self._paused_s = 0.0
        # Time of the first output after a pause; None where all that could give one was aborted.
        self._first: asyncio.Future[float | None] | None = None
        if salted:
            self._add, engine.engine_core.add_request_async = engine.engine_core.add_request_async, self._salted
        self._process, self._outputs.process_outputs = self._outputs.process_outputs, self._timed
        self._abort, self._outputs.abort_requests = self._outputs.abort_requests, self._aborted

    def paused(self, asked_s: float) -> None:
        """The engine has just confirmed a pause that was asked for at the monotonic time `asked_s`."""
        self._paused_s = time.monotonic()
        self._since_s = asked_s if self._last_s is None else self._last_s
        in_flight = self._outputs.get_num_unfinished_requests()
        self._first = asyncio.get_running_loop().create_future() if in_flight else None

    def still_s(self, asked_s: float) -> float:
        """The monotonic time since which the engine stands still, as a pause that it has confirmed was asked for at `asked_s`:
        it ended the step that it was at first, whose tokens count as any other's."""
        return asked_s if self._last_s is None else max(asked_s, self._last_s)

    async def gap_s(self) -> float | None:
        """Time between the last output before the pause and the first one after it, in seconds; None where nothing was in
        flight, or all of it was aborted. Waits for that output; where it does not come in good time, the time so far."""
        if self._first is None:
            return None
        try:
            async with asyncio.timeout(_FIRST_TOKEN_S):
                first_s = await self._first
            return None if first_s is None else first_s - self._since_s
        except TimeoutError:
            return time.monotonic() - self._since_s

    async def silence(self, limit_s: float) -> str:
        """Returns once requests have waited for so long and no token has come, though the engine was not paused; with words.
        Time in which this process itself stood still does not count."""
        silent_s, seen = 0.0, self._seen
        while silent_s < limit_s:
            await asyncio.sleep(_LOOK_S)
            waits = self.label is not None and self._outputs.get_num_unfinished_requests() > 0
            silent_s = silent_s + _LOOK_S if waits and self._seen == seen else 0.0
            seen = self._seen
        waiting = self._outputs.get_num_unfinished_requests()
        return f"vLLM's engine has sampled no token for {limit_s:g} s (sample.no_token_s), with {waiting} requests in flight"

    async def _salted(self, request: Any) -> None:
        label = request.external_req_id if self.label is None else self.label
        request.cache_salt = label if request.cache_salt is None else f"{label} {request.cache_salt}"
        await self._add(request)

    def _timed(self, outputs: Any, timestamp: float, *arguments: Any, **named: Any) -> Any:
        """`timestamp`: the monotonic time at which the engine's process had sampled these outputs."""
        result = self._process(outputs, timestamp, *arguments, **named)
        self._seen += len(outputs)
        self._last_s = timestamp if self._outputs.get_num_unfinished_requests() else None
        if self._first is not None and not self._first.done() and timestamp > self._paused_s:
            self._first.set_result(timestamp)
        return result

    def _aborted(self, *arguments: Any, **named: Any) -> Any:
        result = self._abort(*arguments, **named)
        if not self._outputs.get_num_unfinished_requests():
            self._last_s = None
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
        return result
