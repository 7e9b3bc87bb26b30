"""The control client for synchronous code: the same calls, made on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from prl.control.client import ControlClient, ControlError
from prl.control.options import ControlOptions

T = TypeVar("T")


class ThreadedClient:
    """Every call blocks until its answer or its deadline. Heartbeats go on while the caller computes."""

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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._make = partial(ControlClient, url, token, role, index, options, start=start, on_lost=on_lost)

    def __enter__(self) -> "ThreadedClient":
        self._thread.start()
        self._client = self._run(self._open(), 10.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._run(self._client.__aexit__(kind, error, trace), 10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    @property
    def stopping(self) -> bool:
        return self._client.stopping.is_set()

    @property
    def lost(self) -> ControlError | None:
        return self._client.lost

    def join(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        return self._run(self._client.join(facts), None)

    def call(self, name: str, body: Mapping[str, Any], *, deadline_s: float, reason: str) -> dict[str, Any]:
        return self._run(self._client.call(name, body, deadline_s=deadline_s, reason=reason), deadline_s + 10.0)

    def progress(self, doing: str) -> None:
        self._client.progress(doing)

    async def _open(self) -> ControlClient:
        return await self._make().__aenter__()

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)
