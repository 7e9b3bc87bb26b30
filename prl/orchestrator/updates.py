"""One version of the weights on its way to all samplers: arm, send, verify, commit.

The trainer offers a version; every sampler arms a receiver; the trainer sends while tokens go on being sampled; every worker
reports the digest of what it staged; when all of them agree with the trainer's, every sampler commits at once. Updates
follow one another: an offer waits until the one before it is committed.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from prl.control.token import authorization
from prl.flow.versions import Version
from prl.weights.options import WeightsOptions


class UpdateError(Exception):
    """A version did not reach the samplers; says which replica and why."""


@dataclass(frozen=True)
class Replica:
    replica: int
    url: str
    workers: int  # ranks of it in the transfer group


@dataclass
class Update:
    """A version that is under way."""

    version: Version
    armed_s: float
    staged: dict[tuple[int, int], str] = field(default_factory=dict)  # (replica, worker) -> digest
    receive_s: float = 0.0
    digest: str | None = None
    send_s: float = 0.0
    sent_bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Committed:
    """A version that all samplers serve, and what it took."""

    version: Version
    digest: str
    values: Mapping[str, float]  # weights/* metrics


class WeightUpdater:
    def __init__(
        self,
        token: str,
        options: WeightsOptions,
        *,
        start_s: float,
        on_committed: Callable[[Committed], None],
        on_error: Callable[[UpdateError], None],
    ) -> None:
        self.current: Committed | None = None
        self._options = options
        self._start_s = start_s  # how long the first offer waits for the samplers to be there
        self._on_committed = on_committed
        self._on_error = on_error
        self._session = aiohttp.ClientSession(headers=authorization(token))
        self._replicas: Sequence[Replica] = ()
        self._epoch = 0  # of the membership; every change builds a new transfer group
        self._connected_epoch = 0
        self._update: Update | None = None
        self._free = asyncio.Event()
        self._free.set()
        self._manned = asyncio.Event()  # there are samplers to update
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> Version | None:
        """The version that was offered and is not committed yet."""
        return None if self._update is None else self._update.version

    def set_replicas(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._epoch += 1
        self._manned.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def offer(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The trainer has a version: arm every sampler's receiver. Answers once all are armed."""
        version = Version(int(body["lineage"]), int(body["step"]))
        await self._wait_for(self._manned, self._start_s, f"version {version} waits for the samplers to start")
        under_way = self._update.version if self._update else "?"
        await self._wait_for(self._free, self._options.update_s, f"version {version} waits for {under_way} to be committed")
        self._free.clear()
        self._update = Update(version, time.monotonic())
        world_size = 1 + sum(replica.workers for replica in self._replicas)
        try:
            if self._connected_epoch != self._epoch:
                await self._connect(body, world_size)
                self._connected_epoch = self._epoch
            receive = {"lineage": version.lineage, "step": version.step, "epoch": self._epoch, "tensors": body["tensors"]}
            receive["bucket_bytes"] = self._options.bucket_mib * 2**20
            await self._all("receive", [receive] * len(self._replicas), self._options.group_s)
        except UpdateError as error:
            self._on_error(error)
            raise ValueError(str(error)) from error
        task = asyncio.create_task(self._finish(self._update), name=f"commit {version}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return {"epoch": self._epoch, "world_size": world_size, "send": True}

    async def sent(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The trainer has sent everything, and this is the digest of what it sent."""
        update = self._of(body)
        update.digest, update.send_s, update.sent_bytes = str(body["digest"]), float(body["send_s"]), int(body["bytes"])
        update.changed.set()
        return {}

    async def staged(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A sampler's worker has received everything, and this is the digest of what it holds."""
        if body.get("error"):
            self._on_error(UpdateError(f"sampler {body['replica']} did not receive the weights: {body['error']}"))
            return {}
        update = self._of(body)
        update.staged[int(body["replica"]), int(body["worker"])] = str(body["digest"])
        update.receive_s = max(update.receive_s, float(body["receive_s"]))
        update.changed.set()
        return {}

    async def _wait_for(self, event: asyncio.Event, timeout_s: float, reason: str) -> None:
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            raise ValueError(f"{reason}, for {timeout_s:.0f} s already") from None

    def _of(self, body: Mapping[str, Any]) -> Update:
        version = Version(int(body["lineage"]), int(body["step"]))
        if self._update is None or self._update.version != version:
            under_way = self._update.version if self._update else "none"
            raise ValueError(f"version {version} is not under way (but {under_way})")
        return self._update

    async def _connect(self, body: Mapping[str, Any], world_size: int) -> None:
        offset, bodies = 1, []  # rank 0 of the group is the trainer
        for replica in self._replicas:
            bodies.append(
                {
                    "master_address": body["master_address"],
                    "master_port": body["master_port"],
                    "rank_offset": offset,
                    "world_size": world_size,
                    "epoch": self._epoch,
                    "timeout_s": self._options.group_s,
                }
            )
            offset += replica.workers
        await self._all("connect", bodies, self._options.group_s)

    async def _finish(self, update: Update) -> None:
        """Wait for every digest, compare, commit."""
        try:
            digest = await self._verified(update)
            began = time.monotonic()
            commit = {
                "lineage": update.version.lineage,
                "step": update.version.step,
                "digest": digest,
                "clear_cache": self._options.clear_cache,
            }
            answers = await self._all("commit", [commit] * len(self._replicas), self._options.update_s)
            now = time.monotonic()
            values = {
                "weights/pause_s": max(float(answer["pause_s"]) for answer in answers),
                "weights/gap_s": max(float(answer.get("gap_s", answer["pause_s"])) for answer in answers),
                "weights/receive_s": update.receive_s,
                "weights/send_s": update.send_s,
                "weights/commit_s": now - began,
                "weights/update_s": now - update.armed_s,
                "weights/bytes": float(update.sent_bytes),
            }
            self.current = Committed(update.version, digest, values)
            self._update = None
            self._free.set()
            self._on_committed(self.current)
        except UpdateError as error:
            self._on_error(error)
        except Exception as error:  # nobody awaits this task: whatever it was has to reach the run
            self._on_error(UpdateError(f"the commit of version {update.version} failed: {error!r}"))

    async def _verified(self, update: Update) -> str:
        """The digest on which the trainer and every worker of every sampler agree."""
        expected = {(replica.replica, worker) for replica in self._replicas for worker in range(replica.workers)}
        end = update.armed_s + self._options.update_s
        while update.digest is None or not expected <= update.staged.keys():
            update.changed.clear()
            try:
                await asyncio.wait_for(update.changed.wait(), max(end - time.monotonic(), 0.0))
            except TimeoutError:
                missing = [f"sampler {r} worker {w}" for r, w in sorted(expected - update.staged.keys())]
                waited_for = ", ".join(missing) if update.digest is not None else "the trainer's digest"
                raise UpdateError(
                    f"version {update.version} was not staged within {self._options.update_s:.0f} s: waited for {waited_for}"
                ) from None
        for (replica, worker), digest in sorted(update.staged.items()):
            if digest != update.digest:
                raise UpdateError(
                    f"sampler {replica} worker {worker} staged other weights than the trainer sent for version "
                    f"{update.version}: digest {digest}, not {update.digest}; nothing was committed"
                )
        return update.digest

    async def _all(self, verb: str, bodies: Sequence[Mapping[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
        """POST to every sampler at once."""
        return await asyncio.gather(
            *(self._post(replica, verb, body, timeout_s) for replica, body in zip(self._replicas, bodies, strict=True))
        )

    async def _post(self, replica: Replica, verb: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        url = f"{replica.url}/prl/weights/{verb}"
        try:
            async with self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                if response.status != 200:
                    raise UpdateError(f"sampler {replica.replica} refused {verb}: {response.status} {await response.text()}")
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UpdateError(
                f"sampler {replica.replica} at {url} did not answer within {timeout_s:.0f} s: {error!r}"
            ) from error
