"""A pool of worker processes, each of which is killed and replaced when a check overruns its deadline."""

import asyncio
import json
import logging
import sys
from types import TracebackType
from typing import Any, Self

TIMEOUT = "timeout"
_START_S = 120.0  # importing math-verify takes a second, on a loaded machine many
_LINE_BYTES = 64 * 2**20

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
        self._idle: asyncio.LifoQueue[asyncio.subprocess.Process | None] = asyncio.LifoQueue()  # None: failed to start
        self._all: set[asyncio.subprocess.Process] = set()
        self._replacements: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        try:
            for worker in await asyncio.gather(*(self._start() for _ in range(self._processes))):
                self._idle.put_nowait(worker)
        except BaseException:
            await self._kill_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._kill_all()

    async def check(self, rule: str, gold: str, answer: str) -> str:
        """The verdict of one answer, "timeout" where it took longer than the deadline. Waits for a worker as long as it must:
        every worker is back within its own deadline. Raises CheckError."""
        worker = await self._idle.get()
        try:
            if worker is None:
                worker = await self._start()
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
                replacement = asyncio.create_task(self._replace())
                self._replacements.add(replacement)
                replacement.add_done_callback(self._replacements.discard)
        if "error" in reply:
            raise CheckError(f"rule {rule}: {reply['error']}")
        return str(reply["verdict"])

    async def _exchange(self, worker: asyncio.subprocess.Process, request: dict[str, str]) -> dict[str, Any]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(self._check_s):
                worker.stdin.write(json.dumps(request).encode() + b"\n")
                await worker.stdin.drain()
                line = await worker.stdout.readline()
            if not line:
                raise CheckError(f"a worker died of a check (exit code {await worker.wait()}): {str(request)[:300]}")
            reply: dict[str, Any] = json.loads(line)
        except BaseException:
            await self._kill(worker)
            raise
        return reply

    async def _replace(self) -> None:
        worker = None  # the next check tries again, and its caller is told of the error
        try:
            worker = await self._start()
        except (CheckError, OSError):
            log.exception("could not replace a verifier worker")
        finally:
            self._idle.put_nowait(worker)

    async def _start(self) -> asyncio.subprocess.Process:
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
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await worker.stdout.readline()
        except TimeoutError:
            await self._kill(worker)
            raise CheckError(f"a verifier worker was not ready within {_START_S:.0f} s") from None
        except BaseException:
            await self._kill(worker)
            raise
        if not line:
            code = await worker.wait()
            self._all.discard(worker)
            raise CheckError(
                f"a verifier worker ended at its start with exit code {code}; is math-verify installed? (pip extra math)"
            )
        return worker

    async def _kill(self, worker: asyncio.subprocess.Process) -> None:
        self._all.discard(worker)
        if worker.returncode is None:
            try:
                worker.kill()
            except ProcessLookupError:  # it ended by itself a moment ago
                log.debug("worker %d had ended already", worker.pid)
        await worker.wait()

    async def _kill_all(self) -> None:
        for replacement in self._replacements:
            replacement.cancel()
        await asyncio.gather(*self._replacements, return_exceptions=True)
        await asyncio.gather(*(self._kill(worker) for worker in list(self._all)))
