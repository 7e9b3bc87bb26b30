"""Where requests wait for their turn to be taken in by a sampler's server."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Entrance:
    """Lets one request in per round of the event loop, and none while it is shut. A burst of requests (a step's leases come
    together) is a tenth of a second of the server's work: the calls of a weight update would stand behind all of it."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()

    async def turn(self) -> None:
        """Returns when it is the caller's turn, in the order of the calls."""
        async with self._turn:
            await asyncio.sleep(0)
            await self._open.wait()

    def close(self) -> None:
        """Nobody enters until it is opened, for which whoever closes it has a deadline."""
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Nobody enters within this context; it is open behind it."""
        self.close()
        try:
            yield
        finally:
            self.open()
