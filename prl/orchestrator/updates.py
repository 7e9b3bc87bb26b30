"""One version of the weights on its way to all samplers: arm, send, verify, commit.

The trainer offers a version; every sampler arms a receiver; the trainer sends while tokens go on being sampled; every worker
reports the digest of what it staged; the samplers whose digests are the trainer's commit. Updates follow one another: an
offer waits until the one before it has ended.

A sampler that dies, stands still or does not answer in time is fenced, and so is one that holds up transfers again and again
(prl/orchestrator/lateness.py): whatever waits for it here goes on without it. Where that breaks the transfer, everyone leaves
the group, another one is built and the version is sent again: at once where the trainer is still at it, with its next version
otherwise, or as soon as it has nothing else to do.

By lanes every trainer rank sends, and every worker reports the digest of its own part. By files the trainer writes a version
first, and the samplers are asked to read it then. All else is the same.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prl.flow.versions import Version
from prl.metrics import names
from prl.orchestrator.lateness import blame
from prl.orchestrator.replicas import Replica, ReplicaDesk
from prl.orchestrator.sampler_calls import Refused, SamplerCalls
from prl.orchestrator.update import Update
from prl.weights.options import WeightsOptions

POLL_S = 5.0  # the trainer asks again after so long whether the group it sends over is broken
PATIENCE_S = 0.5  # an update that ends so soon is waited for: that costs less than data that are a step older
SETTLE_S = 5.0  # at least, that the others have to report a version after a replica was fenced
log = logging.getLogger(__name__)


class UpdateError(Exception):
    """A version did not reach the samplers, and the run cannot go on; says why."""


@dataclass(frozen=True)
class Committed:
    """A version that the samplers serve, and what it took."""

    version: Version
    digest: str
    values: Mapping[str, float]  # weights/* metrics
    tensors: Sequence[Any]  # what it consists of, as on the wire


class WeightUpdater:
    def __init__(
        self,
        calls: SamplerCalls,
        options: WeightsOptions,
        desk: ReplicaDesk,
        *,
        start_s: float,
        on_committed: Callable[[Committed], None],
        on_error: Callable[[UpdateError], None],
    ) -> None:
        self.current: Committed | None = None
        self._desk = desk
        self._changed = desk.changed
        self._options = options
        self._start_s = start_s  # how long the first offer waits for the samplers to be there
        self._on_committed = on_committed
        self._on_error = on_error
        self._calls = calls
        self._connected_epoch = 0
        self._passed_over = 0  # versions since the last one that was committed
        self._update: Update | None = None
        self._held: str | None = None  # the digest of what all of the connected group have committed last
        self._manned = False
        self._left = -1  # the newest lineage whose trainer is gone
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> Version | None:
        """The version that was offered and has not ended yet."""
        return None if self._update is None else self._update.version

    def begin(self) -> None:
        """All samplers are there: the first offer need not wait any longer."""
        self._manned = True
        self._changed.ring()

    def leave(self, lineage: int) -> None:
        """The trainer of this lineage is gone: what it was sending does not arrive, and another one is met in another group."""
        self._left = lineage
        self._desk.membership.regroup()
        if self._update is not None:
            self._update.failed = self._update.failed or f"the trainer ended while it sent version {self._update.version}"
        self._changed.ring()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What the trainer says

    async def offer(self, body: Mapping[str, Any], *, newer_comes: bool = False) -> Mapping[str, Any]:
        """The trainer has a version: arm the receivers of the whole group. Answers once all are armed that are in it then; or
        that there is nobody to send to, after `group_s` and `update_s` at the latest. Where the update before has not ended,
        and `newer_comes`, it is passed over: the next one takes its place. `held` of the answer: the digest of the version that
        the whole group holds already, null where some may not: only of that one a difference may be sent.

        `whole` of the body: whether the trainer can put tensors together now. Where the version can only go so, and it cannot,
        nothing is sent, and `later` says that it is to be offered again when it can."""
        version = Version(int(body["lineage"]), int(body["step"]))
        if not await self._changed.until(lambda: self._manned, self._start_s):
            raise ValueError(f"version {version} waits for the samplers to start, for {self._start_s:.0f} s already")
        end = time.monotonic() + self._options.update_s + self._options.group_s
        nobody = {"epoch": self._desk.membership.epoch, "world_size": 0, "send": False}
        ends_soon = self._update is not None and bool(self._update.failed)
        patience_s = min(PATIENCE_S, self._options.update_s) if newer_comes and not ends_soon else self._options.update_s
        if not await self._changed.until(lambda: self._update is None, patience_s):
            self._passed_over += 1
            log.warning("version %s is not sent: %s is still under way", version, self.under_way)
            return nobody
        armed = False
        try:
            while (group := self._desk.group) and time.monotonic() < end and version.lineage > self._left:
                membership = self._desk.membership
                transport = "filesystem" if membership.by_files else self._options.transport
                if transport != "lanes" and not body["whole"]:
                    return nobody | {"later": True}
                what = transport, int(body["senders"]), body["tensors"]
                update = Update(version, membership.epoch, group, time.monotonic(), *what)
                self._update = update
                self._changed.ring()  # whoever seeds a sampler gives that up
                held = None if update.by_files or self._connected_epoch != update.epoch else self._held
                self._held = None  # until this version is committed
                armed = (update.by_files or await self._arm(update, body)) and version.lineage > self._left
                if armed:
                    update.sending_s = time.monotonic()
                    self._start(self._finish(update), f"commit {version}")
                    whom = {"world_size": update.world_size, "samplers": [replica.index for replica in group]}
                    return {"epoch": update.epoch, **whom, "send": True, "transport": transport, "held": held}
        except UpdateError as error:
            self._on_error(error)
            raise ValueError(str(error)) from error
        finally:
            if not armed:
                self._update = None
                self._changed.ring()
        if version.lineage <= self._left:
            raise ValueError(f"version {version} is not sent: its trainer has ended")
        log.warning("version %s is not sent: there is no sampler to send it to", version)
        return nobody

    async def sending(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The trainer is sending. Answers as soon as it need not go on, with the reason."""
        update = self._of(body)
        if update is None:
            return {"broken": "this update was given up"}
        await self._changed.until(lambda: bool(update.broken()) or update.digest is not None, POLL_S)
        return {"broken": "" if update.digest is not None else update.broken()}

    async def sent(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The trainer has sent everything, and this is the digest of what it sent."""
        update = self._of(body)
        if update is not None:  # else it was given up just before
            update.sent(body, time.monotonic())
            self._changed.ring()
        return {}

    async def unsent(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The trainer could not send everything, and has left the group. `missing`: ranks that did not come to its building;
        `overdue`: its deadline had passed."""
        membership, epoch = self._desk.membership, int(body["epoch"])
        update = self._of(body)
        if update is not None:
            update.failed = update.failed or f"the trainer could not send version {update.version}: {body['error']}"
            update.overdue = update.overdue or bool(body["overdue"])
            self._fence_missing(update, body["missing"])
            self._changed.ring()
        elif epoch == membership.epoch:
            self._broke(str(body["error"]))
        return {}

    # What samplers say

    async def staged(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A sampler's worker has received everything, and this is the digest of what it holds; or it has failed to. `missing`:
        as of the trainer; `halt`: where it left the transfer, if it was in it."""
        update = self._of(body)
        if update is None:
            version = Version(int(body["lineage"]), int(body["step"]))
            raise ValueError(f"version {version} of epoch {body['epoch']} is not under way (but {self.under_way})")
        if body.get("error") and update.by_files:
            update.refused[int(body["replica"])] = f"sampler {body['replica']} did not read the weights: {body['error']}"
        elif body.get("error"):
            update.failed = update.failed or f"sampler {body['replica']} did not receive the weights: {body['error']}"
            update.leaves(int(body["replica"]), int(body["worker"]), body["halt"])
            self._fence_missing(update, body["missing"])
        else:
            update.staged[int(body["replica"]), int(body["worker"])] = str(body["digest"])
            update.receive_s = max(update.receive_s, float(body["receive_s"]))
            update.direct_share = min(update.direct_share, float(body["direct_share"]))
        self._changed.ring()
        return {}

    # Within

    def _of(self, body: Mapping[str, Any]) -> Update | None:
        """The update that is spoken of, if it is under way."""
        version, update = Version(int(body["lineage"]), int(body["step"])), self._update
        return update if update is not None and (update.version, update.epoch) == (version, int(body["epoch"])) else None

    def _fence_missing(self, update: Update, ranks: Sequence[int]) -> None:
        for replica in update.of_ranks(ranks):
            self._calls.fence(replica, "late", f"{replica.name} did not come to the group of epoch {update.epoch}")

    def _start(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _arm(self, update: Update, body: Mapping[str, Any]) -> bool:
        """Whether every replica of the group is armed. Those that are not have been fenced."""
        if self._connected_epoch != update.epoch:
            places = update.places(body, self._options.group_s)
            if len(await self._ask_all(update.replicas, "connect", places, self._options.group_s)) < len(update.replicas):
                return False
            self._connected_epoch = update.epoch
        receive = {
            "lineage": update.version.lineage,
            "step": update.version.step,
            "epoch": update.epoch,
            "tensors": body["tensors"],
            "bucket_bytes": self._options.bucket_mib * 2**20,
        }
        armed = await self._ask_all(update.replicas, "receive", [receive] * len(update.replicas), self._options.group_s)
        return len(armed) == len(update.replicas)

    async def _load(self, update: Update) -> None:
        """Have all that are left read what the trainer wrote. Those that cannot be asked have been fenced."""
        self._connected_epoch = 0  # they leave the group for it
        load = {
            "lineage": update.version.lineage,
            "step": update.version.step,
            "epoch": update.epoch,
            "seed": 0,
            "tensors": update.tensors,
        }
        await self._ask_all(update.alive, "load", [load] * len(update.alive), self._options.update_s)

    async def _ask_all(
        self, replicas: Sequence[Replica], verb: str, bodies: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> dict[Replica, dict[str, Any]]:
        try:
            return await self._calls.all(replicas, verb, bodies, timeout_s)
        except Refused as refusal:
            raise UpdateError(str(refusal)) from None

    def _broke(self, words: str) -> bool:
        """The group broke, and nobody is known to be at fault. False: that has happened too often."""
        membership = self._desk.membership
        by_files = membership.by_files
        goes_on = membership.broke(words)
        if membership.by_files and not by_files and self._options.transport != "filesystem":
            self._desk.note(f"versions go through files until a sampler comes or goes, as the group for them broke: {words}")
        return goes_on

    async def _finish(self, update: Update) -> None:
        """Wait for every digest, compare, commit."""
        try:
            await self._wait_for_all(update)
            if update.overdue:
                await blame(update, self._desk, self._options.update_s)
            holders = self._verified(update) if update.arrived() and not update.failed else []
            if holders:
                await self._commit(update, holders)
            elif update.version.lineage <= self._left:
                log.warning("version %s is given up: %s", update.version, update.failed)
            elif (not update.crippled or (update.failed and update.by_files)) and not self._broke(update.failed):
                raise UpdateError(
                    f"version {update.version} did not reach the samplers, in one group after another: {update.failed}"
                )
        except UpdateError as error:
            self._on_error(error)
        except Exception as error:  # nobody awaits this task: whatever it was has to reach the run
            log.exception("the update to version %s", update.version)
            self._on_error(UpdateError(f"the update to version {update.version} failed: {error!r}"))
        finally:
            self._update = None
            self._changed.ring()

    async def _wait_for_all(self, update: Update) -> None:
        """Until all that are left hold the version, or the update has failed; each within its deadline."""
        group_s, update_s = self._options.group_s, self._options.update_s
        trainer_s = group_s + 2 * update_s  # longer than its own deadlines
        if not await self._changed.until(lambda: update.digest is not None or bool(update.broken()), trainer_s):
            raise UpdateError(
                f"version {update.version} was not sent within {trainer_s:.0f} s: waited for the trainer's digest"
            )
        if update.digest is None:
            update.failed = update.broken()
            return
        if update.by_files:
            await self._load(update)
        left_s = update.sent_s + update_s - time.monotonic()
        settled = await self._changed.until(
            lambda: update.arrived() or bool(update.failed) or (update.crippled and not update.by_files), left_s
        )
        if not settled:
            for replica in update.alive:
                if missing := update.missing(replica):
                    workers = ", ".join(f"worker {worker}" for worker in missing)
                    words = f"{replica.name} did not stage version {update.version} within {update_s:.0f} s: waited for"
                    self._calls.fence(replica, "late", f"{words} {workers}")
        elif update.crippled and not update.failed and not update.by_files:
            # The others have what the trainer sent, or will never get it: it came to them through the one that is gone.
            grace_s = max(SETTLE_S, time.monotonic() - update.armed_s)
            await self._changed.until(lambda: update.arrived() or bool(update.failed), min(grace_s, max(left_s, 0.0)))
        if not update.arrived():
            update.failed = update.failed or update.broken()
        elif update.alive and all(replica.index in update.refused for replica in update.alive):
            update.failed = update.failed or update.refused[update.alive[0].index]

    def _verified(self, update: Update) -> list[Replica]:
        """The replicas that hold what the trainer sent. Raises UpdateError where none does: then the sender is wrong."""
        wrong = {replica: update.refused[replica.index] for replica in update.alive if replica.index in update.refused}
        for replica in update.alive:
            if replica not in wrong and (words := update.wrong(replica)):
                wrong[replica] = words
        holders = [replica for replica in update.alive if replica not in wrong]
        if wrong and not holders:
            raise UpdateError(f"{next(iter(wrong.values()))}; so did all the others, and nothing was committed")
        for replica, words in wrong.items():
            self._desk.mismatched(replica, words)
        return holders

    async def _commit(self, update: Update, holders: Sequence[Replica]) -> None:
        began = time.monotonic()
        # What was computed with weights of an abandoned past is used by nobody, whatever the option.
        new_lineage = self.current is not None and update.version.lineage > self.current.version.lineage
        commit = {
            "lineage": update.version.lineage,
            "step": update.version.step,
            "digest": update.digest,
            "clear_cache": self._options.prefix_cache == "recompute" or new_lineage,
        }
        answers = await self._ask_all(holders, "commit", [commit] * len(holders), self._options.update_s)
        if not answers or update.digest is None:
            return  # all of them are gone
        self._desk.admitted(list(answers))
        whole = len(answers) == len(update.replicas) and not update.by_files  # whose readers have left the group
        self._held = update.digest if whole else None
        now = time.monotonic()
        values = {
            "weights/transfer_s": update.send_s + (update.receive_s if update.by_files else 0.0),
            "weights/pause_s": max(float(answer["pause_s"]) for answer in answers.values()),
            "weights/gap_s": max(float(answer.get("gap_s", answer["pause_s"])) for answer in answers.values()),
            "weights/receive_s": update.receive_s,
            "weights/send_s": update.send_s,
            "weights/commit_s": now - began,
            "weights/update_s": now - update.armed_s,
            names.SENT_BYTES: float(update.sent_bytes),
            "weights/gathered_bytes": float(update.gathered_bytes),
            "weights/by_files": float(update.by_files),
            "weights/direct_share": update.direct_share,
            "weights/passed_over": float(self._passed_over),
        }
        if update.changed_share is not None:
            values[names.CHANGED_SHARE] = update.changed_share
        self._passed_over = 0
        self.current = Committed(update.version, update.digest, values, update.tensors)
        self._update = None
        self._on_committed(self.current)
