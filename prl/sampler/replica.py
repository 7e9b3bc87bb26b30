"""One sampler's state: which version it serves, whether it may answer, and the steps of an update."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prl.control.child import say
from prl.flow.versions import Version
from prl.sampler.entrance import Entrance
from prl.sampler.traffic import Traffic
from prl.weights.digest import MODULUS
from prl.weights.options import WeightsOptions


class CommitRefused(Exception):
    """The version was not put into service; says why."""


@dataclass(frozen=True)
class Commit:
    version: Version
    digest: int  # of the live parameters, all workers together
    pause_s: float  # the engine stood still for so long, from the end of the step that it was at when it was asked to
    gap_s: float  # between the tokens before and behind it; `pause_s` where nothing was in flight


class Replica:
    """Drives vLLM's engine through updates. `closed` says why generation is refused; None while it is allowed."""

    def __init__(self, engine: Any, options: WeightsOptions) -> None:
        self.version: Version | None = None
        self.closed: str | None = "this sampler has no weights yet: the first version was not committed"
        self.entrance = Entrance()
        self._engine = engine
        self._traffic = Traffic(engine, salted=options.prefix_cache != "keep")
        self._update_s = options.update_s
        self._chunked = options.staging == "chunked"
        self._still_since_s: float | None = None  # it stands still for a version that is written over the last one
        self._stillness_s = options.stillness_s
        self._limit: asyncio.Task[None] | None = None  # of that stillness
        self._lock = asyncio.Lock()

    async def silence(self, limit_s: float) -> str:
        """Returns once requests have waited for so long and no token has come, with words."""
        return await self._traffic.silence(limit_s)

    async def connect(self, info: Mapping[str, Any]) -> None:
        """Arm the building of a transfer group in every worker. Raises what the engine refuses, as an Exception with words."""
        async with self._lock, asyncio.timeout(self._update_s):
            await self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": dict(info)})

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Arm the receiving of one version in every worker; the workers report to the orchestrator when it is staged."""
        async with self._lock, asyncio.timeout(self._update_s):
            await self._stand_still()
            await self._engine.collective_rpc("prl_receive", args=(dict(info),))

    async def load(self, info: Mapping[str, Any]) -> None:
        """Arm the reading of a version from files in every worker; the workers report when it is staged."""
        async with self._lock, asyncio.timeout(self._update_s):
            await self._stand_still()
            await self._engine.collective_rpc("prl_load", args=(dict(info),))

    async def store(self, version: Version, info: Mapping[str, Any]) -> None:
        """Arm the writing of the live version to files in every worker; the workers report when it is done. What comes next
        (receive, load, commit) ends it. Raises CommitRefused where another version is live, or none."""
        async with self._lock, asyncio.timeout(self._update_s):
            if self.closed is not None or self.version != version:
                live = "another one is written over it" if self.version is None else f"version {self.version} is live"
                raise CommitRefused(f"version {version} cannot be stored: {self.closed or live}")
            await self._engine.collective_rpc("prl_store", args=(dict(info),))

    async def commit(self, version: Version, digest: int, clear_cache: bool) -> Commit:
        """Pause, copy what is staged into the live parameters, label, verify, resume. Requests in flight go on over it,
        with their KV cache unless `clear_cache`; of what later ones reuse see weights.prefix_cache. Raises CommitRefused;
        where the digests differ the sampler stays closed. Returns behind the first token of what was in flight."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._update_s):
                    await self._check_staged(version, digest)
                    with self.entrance.shut():
                        pause_s = await self._swap(version, digest, clear_cache)
            except TimeoutError:
                reason = f"the commit of version {version} did not end within {self._update_s:.0f} s"
                self._refuse(reason)
                raise CommitRefused(reason) from None
            gap_s = await self._traffic.gap_s()
        return Commit(version, digest, pause_s, pause_s if gap_s is None else gap_s)

    async def fence(self, reason: str) -> None:
        """Serve nothing until the next commit."""
        async with self._lock, asyncio.timeout(self._update_s):
            await self._shut(reason)

    async def _check_staged(self, version: Version, digest: int) -> None:
        found = await self._engine.collective_rpc("prl_staged")
        for worker, staged in enumerate(found):
            if staged.get("version") != str(version):
                raise CommitRefused(f"worker {worker} holds {staged.get('version', 'no staged version')}, not {version}")
        for where, value in _digests(found).items():
            if value != digest:
                await self._close(f"version {version} arrived in {where} with digest {value}, not {digest}")

    async def _stand_still(self) -> None:
        """With weights.staging: chunked what arrives is written over the live version: sample nothing until the next commit.
        Requests wait, but not longer than a version may take to arrive."""
        if not self._chunked or self.closed is not None or self._still_since_s is not None:
            return
        self.entrance.close()
        if self._limit is None:
            self._limit = asyncio.create_task(self._end_stillness(), name="limit of standing still")
        since_s = time.monotonic()
        self.version = self._traffic.label = None
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        self._traffic.paused(since_s)
        self._still_since_s = since_s  # not before the engine has confirmed it

    async def _end_stillness(self) -> None:
        """Where no version is committed in time: hand back what is in flight, which may go on elsewhere; refuse the rest."""
        await asyncio.sleep(self._stillness_s)
        async with self._lock:  # behind a commit that is under way, which has its own deadline
            self._limit = None
            try:
                async with asyncio.timeout(self._update_s):
                    await self._shut(f"this sampler stood still for {self._stillness_s:g} s, and no version was committed")
            except TimeoutError:
                say(f"prl: vLLM's engine did not abort what is in flight within {self._update_s:g} s: it stands still")

    async def _swap(self, version: Version, digest: int, clear_cache: bool) -> float:
        """The length of the pause, in seconds."""
        core = self._engine.engine_core  # AsyncLLM.pause_generation would sleep 20 ms on top
        began = self._still_since_s or time.monotonic()
        self._traffic.label = None
        await core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        if self._still_since_s is None:
            self._traffic.paused(began)
        results = await self._engine.collective_rpc("prl_commit")
        still_s = self._traffic.still_s(began)
        wrong = [f"worker {worker}: {result['error']}" for worker, result in enumerate(results) if "error" in result] or [
            f"the live parameters of {where} have digest {value}, not {digest}"
            for where, value in _digests(results).items()
            if value != digest
        ]
        if wrong:
            await self._close(f"version {version} is not what was sent: {'; '.join(wrong)}")
        # One call behind the other without waiting in between: the engine takes them in this order.
        await asyncio.gather(core.set_weight_version_async(str(version)), core.resume_scheduler_async())
        pause_s = time.monotonic() - still_s
        self._traffic.label = str(version)
        self.version, self.closed = version, None
        self._goes_on()
        return pause_s

    async def _close(self, reason: str) -> None:
        await self._shut(reason)
        raise CommitRefused(reason)

    async def _shut(self, reason: str) -> None:
        """Refuse generation from now on and abort what is in flight: no further token may come from these weights."""
        self._refuse(reason)
        await self._engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)

    def _refuse(self, reason: str) -> None:
        """Those who wait at the entrance, too, are told."""
        self.closed = reason
        self._goes_on()
        self.entrance.open()

    def _goes_on(self) -> None:
        """It does not stand still for a version any more."""
        self._still_since_s = None
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


def _digests(reports: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """By who holds it: of the whole version. The workers' shares of it add up."""
    if reports[0]["share"]:
        return {"all workers": sum(int(report["digest"]) for report in reports) % MODULUS}
    return {f"worker {worker}": int(report["digest"]) for worker, report in enumerate(reports)}
