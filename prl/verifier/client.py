"""Asks the verifier service."""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from prl.control.token import authorization
from prl.domains.api import VerifierError

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class VerifierClient:
    """Implements `prl.domains.api.Verifier`. Used as an async context manager."""

    def __init__(self, token: str, *, deadline_s: float) -> None:
        """`deadline_s`: how long one call may take with all its tries, in seconds."""
        self._headers = authorization(token)
        self._deadline_s = deadline_s
        self._url: str | None = None
        self._url_changed = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=64), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def set_url(self, url: str | None) -> None:
        """Where the service listens now; None: nowhere at the moment."""
        if url != self._url:
            self._url = url
            self._url_changed.set()
            self._url_changed = asyncio.Event()

    async def check(self, rule: str, gold: str, answers: Sequence[str]) -> Sequence[str]:
        """The verdict of each answer. A broken connection is tried again until the deadline. Raises VerifierError."""
        body = {"rule": rule, "gold": gold, "answers": list(answers)}
        trouble = "no verifier was known"
        pause_s = _FIRST_PAUSE_S
        try:
            async with asyncio.timeout(self._deadline_s):
                while True:
                    if self._url is not None:
                        try:
                            return await self._post(self._url, body, len(answers))
                        except aiohttp.ClientError as error:
                            trouble = f"{self._url}: {error!r}"
                    await self._new_url(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except TimeoutError:
            raise VerifierError(
                "deadline", f"no verdict within {self._deadline_s:.0f} s for {len(answers)} answers; last: {trouble}"
            ) from None

    async def _new_url(self, pause_s: float) -> None:
        """Waits for another address, or for so long before the old one is tried again."""
        try:
            async with asyncio.timeout(pause_s):
                await self._url_changed.wait()
        except TimeoutError:
            pass  # the caller tries the old one again

    async def _post(self, url: str, body: Mapping[str, Any], n: int) -> Sequence[str]:
        if self._session is None:
            raise VerifierError("closed", "the verifier client is not open")
        async with self._session.post(f"{url}/check", json=body) as response:
            if response.status != 200:
                text = await response.text()
                raise VerifierError("refused", f"the verifier at {url} answered {response.status}: {text[:500]}")
            reply = await response.json()
        verdicts = reply.get("verdicts") if isinstance(reply, dict) else None
        if not isinstance(verdicts, list) or len(verdicts) != n:
            raise VerifierError("malformed", f"the verifier at {url} answered {str(reply)[:200]} to {n} answers")
        return [str(verdict) for verdict in verdicts]
