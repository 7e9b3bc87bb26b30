"""A pool of worker processes, each of which is killed and replaced when a check overruns its deadline."""

import asyncio
import json
import logging
import sys
from types import TracebackType
from typing import Any, Self

TIMEOUT = "timeout"
_START_S = 120.0  # importing math-verify takes a second, on a loaded machine many
_CLOSE_LOOK_S = 0.1  # between two looks at what is still being started while the pool closes
_LINE_BYTES = 64 * 2**20
CLOSED = "the verifier's pool is closed"

log = logging.getLogger(__name__)


class CheckError(Exception):
    """A check could not be made: an unknown rule, an unusable gold answer."""


class Pool:
    """Used as an async context manager; workers are started on entry."""

    def __init__(self, processes: int, check_s: float, memory_mib: int) -> None:
        """`processes` workers; `check_s`: deadline of one answer, in seconds; `memory_mib`: address space of a worker."""
        if processes < 1:
            raise ValueError(f"a pool needs at least one process, not {processes}")
        self.killed = 0  # workers that overran
        self._processes = processes
        self._check_s = check_s
        self._memory_mib = memory_mib
        self._idle: asyncio.LifoQueue[asyncio.subprocess.Process | CheckError] = asyncio.LifoQueue()  # or why one is missing
        self._all: set[asyncio.subprocess.Process] = set()
        self._starts: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        for _ in range(self._processes):
            self._begin_start()
        try:
            first = [await self._idle.get() for _ in range(self._processes)]
            for worker in first:
                if isinstance(worker, CheckError):
                    raise worker
                self._idle.put_nowait(worker)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def check(self, rule: str, gold: str, answer: str) -> str:
        """The verdict of one answer, "timeout" where it took longer than the deadline. Waits for a worker as long as it must:
        every worker is back within its own deadline. Raises CheckError, also once the pool is closed."""
        worker = await self._take()
        try:
            reply = await self._exchange(worker, {"rule": rule, "gold": gold, "answer": answer})
        except TimeoutError:
            log.warning(
                "check overran %.1f s and was killed: rule %s, gold %r, answer %r", self._check_s, rule, gold, answer[:200]
            )
            self.killed += 1
            reply = {"verdict": TIMEOUT}
        finally:
            if worker in self._all:
                self._idle.put_nowait(worker)
            else:  # it was killed, or died; the others go on meanwhile
                self._begin_start()
        if "error" in reply:
            raise CheckError(f"rule {rule}: {reply['error']}")
        return str(reply["verdict"])

    async def _take(self) -> asyncio.subprocess.Process:
        """An idle worker. One that could not be started is tried once more."""
        worker = await self._idle.get()
        if isinstance(worker, CheckError) and not self._closed:
            self._begin_start()
            worker = await self._idle.get()
        if self._closed:
            self._idle.put_nowait(worker)  # for whoever waits beside this one
            raise CheckError(CLOSED)
        if isinstance(worker, CheckError):
            self._begin_start()
            raise worker
        return worker

    async def _exchange(self, worker: asyncio.subprocess.Process, request: dict[str, str]) -> dict[str, Any]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(self._check_s):
                try:
                    worker.stdin.write(json.dumps(request).encode() + b"\n")
                    await worker.stdin.drain()
                    line = await worker.stdout.readline()
                except ConnectionError:  # nobody reads it
                    line = b""
            if not line and self._closed:
                raise CheckError(CLOSED)
            if not line:
                raise CheckError(f"a worker died of a check (exit code {await worker.wait()}): {str(request)[:300]}")
            reply: dict[str, Any] = json.loads(line)
        except BaseException:
            await self._kill(worker)
            raise
        return reply

    def _begin_start(self) -> None:
        """Start a worker, in a task that nobody cancels: asyncio may wait for ever for a process whose start was cancelled.
        The worker, or why there is none, goes to the idle ones."""
        if self._closed:
            self._idle.put_nowait(CheckError(CLOSED))
            return
        start = asyncio.create_task(self._start(), name="start of a verifier worker")
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)

    async def _start(self) -> None:
        try:
            self._idle.put_nowait(await self._started())
        except (CheckError, OSError) as error:
            if not self._closed:
                log.exception("could not start a verifier worker")
            self._idle.put_nowait(error if isinstance(error, CheckError) else CheckError(f"no verifier worker: {error}"))

    async def _started(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "prl.verifier.worker",
            str(self._memory_mib),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        self._all.add(worker)
        if self._closed:
            await self._kill(worker)
            raise CheckError(CLOSED)
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await worker.stdout.readline()
        except TimeoutError:
            await self._kill(worker)
            raise CheckError(f"a verifier worker was not ready within {_START_S:.0f} s") from None
        if not line:
            code = await worker.wait()
            self._all.discard(worker)
            raise CheckError(
                f"a verifier worker ended at its start with exit code {code}; is math-verify installed? (pip extra math)"
            )
        return worker

    async def _kill(self, worker: asyncio.subprocess.Process) -> None:
        """Returns once it is gone."""
        try:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
        except ProcessLookupError:  # it ended by itself a moment ago
            await worker.wait()
        finally:
            self._all.discard(worker)

    async def _close(self) -> None:
        """No worker starts from now on; those there are, and those that are being started, are gone when this returns."""
        self._closed = True
        while self._all or self._starts:
            await asyncio.gather(*map(self._kill, list(self._all)), return_exceptions=True)
            if self._starts:
                await asyncio.wait(self._starts, timeout=_CLOSE_LOOK_S)
        self._idle.put_nowait(CheckError(CLOSED))  # wakes who waits for a worker
