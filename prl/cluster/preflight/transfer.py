"""A TCP transfer between two nodes, both ways one after the other, and its bandwidth."""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prl.control.token import is_authorized

SEND_S = 0.1  # each way: some rounds of TCP's slow start, and little beside a run's start
LIMIT_S = 15.0  # of a transfer whose turn it is: a node may be busy at its start
GREETING_S = 10.0  # from a connection to its first line
_CHUNK_BYTES = 2**20
_MIB = 2**20


@dataclass(frozen=True)
class Link:
    """What went between a node and the one that it connected to, in MiB/s; or why nothing did."""

    node: str
    peer: str
    to_peer_mib_per_s: float = 0.0
    from_peer_mib_per_s: float = 0.0
    error: str = ""

    @property
    def slowest_mib_per_s(self) -> float:
        return min(self.to_peer_mib_per_s, self.from_peer_mib_per_s)


def pairs(components: Sequence[int]) -> dict[int, int]:
    """Who connects to whom, by the component of each node: every node of the larger component to one of the smaller, one
    after another. Nobody where there is one component alone."""
    sides = [[node for node, component in enumerate(components) if component == side] for side in (0, 1)]
    few, many = sorted(sides, key=len)
    return {node: few[number % len(few)] for number, node in enumerate(many)} if few else {}


def turns_s(pairs: Mapping[int, int]) -> float:
    """How long the last node may have to wait for its turn, and have it."""
    return GREETING_S + LIMIT_S * max(Counter(pairs.values()).values(), default=0)


class Listener:
    """Answers the transfers of other nodes, one at a time, so that none takes from another's bandwidth. A port of the system's
    choice; whoever does not begin with the run's token is sent away."""

    def __init__(self, host: str, token: str) -> None:
        """Raises OSError where this machine has no such address."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._socket.setblocking(False)
        self._token = token
        self.port: int = self._socket.getsockname()[1]

    async def serve(self) -> None:
        """Until cancelled."""
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            with connection, contextlib.suppress(OSError):  # the other side sees it fail, too, and tells it
                await self._answer(connection)

    def close(self) -> None:
        self._socket.close()

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(GREETING_S):
            greeting = b""
            while not greeting.endswith(b"\n"):
                part = await loop.sock_recv(connection, 1024)
                greeting += part
                if not part or len(greeting) > 1024:
                    return
        if not is_authorized(greeting.decode(errors="replace").strip(), self._token):
            return
        async with asyncio.timeout(LIMIT_S):
            await loop.sock_sendall(connection, b"\n")  # it is your turn
            await _receive(connection)
            await _send(connection)
            connection.shutdown(socket.SHUT_WR)
            await loop.sock_recv(connection, 1)  # until the other one has read all and closes


async def transfer(host: str, port: int, token: str, wait_s: float) -> tuple[float, float]:
    """MiB/s to the listener and from it. `wait_s`: how long it may take until it is this node's turn. Raises OSError."""
    loop = asyncio.get_running_loop()
    where = f"{host}:{port}"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(wait_s):
                await loop.sock_connect(connection, (host, port))
                await loop.sock_sendall(connection, f"Bearer {token}\n".encode())
                if await loop.sock_recv(connection, 1) != b"\n":
                    raise ConnectionError(f"{where} did not accept the run's token")
        except TimeoutError:
            raise TimeoutError(f"no answer from {where} within {wait_s:g} s") from None
        try:
            async with asyncio.timeout(LIMIT_S):
                began = time.perf_counter()
                sent = await _send(connection)
                connection.shutdown(socket.SHUT_WR)
                first = len(await loop.sock_recv(connection, 1))  # it comes once all has arrived
                turned = time.perf_counter()
                received = first + await _receive(connection)
                ended = time.perf_counter()
        except TimeoutError:
            raise TimeoutError(f"the transfer with {where} did not end within {LIMIT_S:g} s") from None
    if not first:
        raise ConnectionError(f"{where} closed the connection in the middle of a transfer")
    return sent / (turned - began) / _MIB, received / (ended - turned) / _MIB


async def _send(connection: socket.socket) -> int:
    """For SEND_S, as much as goes; bytes."""
    loop, chunk, sent = asyncio.get_running_loop(), bytes(_CHUNK_BYTES), 0
    end = time.perf_counter() + SEND_S
    while time.perf_counter() < end:
        await loop.sock_sendall(connection, chunk)
        sent += len(chunk)
    return sent


async def _receive(connection: socket.socket) -> int:
    """To the end of what the other side sends; bytes."""
    loop, buffer, received = asyncio.get_running_loop(), bytearray(_CHUNK_BYTES), 0
    while count := await loop.sock_recv_into(connection, buffer):
        received += count
    return received
