"""Samplers that come (back) get the present version from one that serves it, through files; the trainer goes on meanwhile.

A serving replica writes its live parameters into weights/ of the run folder, each worker its own part; the parts must add up to
the digest of the version. The newcomers read them, each worker its own part, commit, and serve. Where the version lies in files
already, nobody writes. The trainer's next version comes before all this: a seed that is under way then is given up, for the
newcomers take part in that update. Where a seed fails the newcomers wait for the trainer.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prl.control.tasks import thread_to_its_end
from prl.orchestrator.replicas import Replica, ReplicaDesk
from prl.orchestrator.sampler_calls import Refused, SamplerCalls
from prl.orchestrator.updates import Committed
from prl.runfolder.weights import (
    MODULUS,
    StoredError,
    StoredFile,
    StoredVersion,
    folder_of,
    give_up,
    new_folder,
    publish_version,
    read_version,
    remove_before,
)
from prl.weights.options import WeightsOptions

LOOK_S = 30.0  # at least so often it is looked whether somebody is to be seeded
log = logging.getLogger(__name__)


class SeedError(Exception):
    """The newcomers cannot be seeded; says why."""


class GivenUp(Exception):
    """The seed is not wanted any more, or has to begin anew; says why."""


@dataclass(eq=False)
class Seed:
    """One try to give the present version to those who came."""

    number: int
    current: Committed
    newcomers: tuple[Replica, ...]
    stored: dict[int, list[StoredFile]] = field(default_factory=dict)  # by the giver's worker
    store_error: str = ""
    shares: dict[tuple[int, int], int] = field(default_factory=dict)  # (replica, worker) -> what it adds to the digest
    errors: dict[int, str] = field(default_factory=dict)  # by replica: why it could not read

    def has_read(self, replica: Replica) -> bool:
        """Whether nothing more is to be heard of it."""
        all_there = all((replica.index, worker) in self.shares for worker in range(replica.workers))
        return replica.gone.is_set() or replica.index in self.errors or all_there


class Seeder:
    """Also keeps weights/ clean. `current` is the version that is served; `busy`: whether an update is under way."""

    def __init__(
        self,
        weights: Path,
        calls: SamplerCalls,
        options: WeightsOptions,
        desk: ReplicaDesk,
        *,
        current: Callable[[], Committed | None],
        busy: Callable[[], bool],
    ) -> None:
        self._weights = weights
        self._calls = calls
        self._options = options
        self._desk = desk
        self._current = current
        self._busy = busy
        self._seed: Seed | None = None
        self._number = 0
        self._cleaning: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """What an earlier attempt has left is nobody's."""
        await thread_to_its_end(remove_before, self._weights, None)

    async def run(self) -> None:
        """Seed whoever is to be seeded, until cancelled."""
        while True:
            if await self._desk.changed.until(self._due, LOOK_S):
                await self._give()

    async def close(self) -> None:
        """Nobody reads versions from files any more."""
        if self._cleaning is not None:
            await self._cleaning
        await thread_to_its_end(remove_before, self._weights, None)

    def committed(self, committed: Committed) -> None:
        """Samplers serve this version: earlier ones are of no use in files."""
        if self._cleaning is None or self._cleaning.done():  # else the next one sees to it
            work = thread_to_its_end(remove_before, self._weights, committed.version)
            self._cleaning = asyncio.create_task(work, name="remove old versions")

    # What samplers say

    async def stored(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A worker of the giver has written its part, or has failed to."""
        seed = self._of(body)
        if seed is not None:  # else it was given up
            if body.get("error"):
                seed.store_error = seed.store_error or str(body["error"])
            else:
                seed.stored[int(body["worker"])] = [StoredFile.from_json(file) for file in body["files"]]
            self._desk.changed.ring()
        return {}

    async def staged(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A worker of a newcomer has read its part, or has failed to."""
        seed = self._of(body)
        if seed is not None:
            if body.get("error"):
                seed.errors[int(body["replica"])] = str(body["error"])
            else:
                seed.shares[int(body["replica"]), int(body["worker"])] = int(body["digest"])
            self._desk.changed.ring()
        return {}

    # Within

    def _of(self, body: Mapping[str, Any]) -> Seed | None:
        return self._seed if self._seed is not None and self._seed.number == int(body["seed"]) else None

    def _due(self) -> bool:
        return bool(self._desk.to_seed) and self._current() is not None and not self._busy()

    async def _give(self) -> None:
        current, newcomers = self._current(), self._desk.to_seed
        assert current is not None
        began = time.monotonic()
        self._number += 1
        seed = self._seed = Seed(self._number, current, newcomers)
        try:
            giver = await self._files(seed)
            await self._read(seed)
            await self._admit(seed, giver, began)
        except GivenUp as why:
            log.info("version %s is not given to %s: %s", current.version, _names(newcomers), why)
        except (SeedError, StoredError, OSError) as error:
            for replica in newcomers:
                self._desk.not_seeded(replica, str(error))
        finally:
            self._seed = None
            self._desk.changed.ring()

    async def _files(self, seed: Seed) -> str:
        """Have the version in files; in words, who put it there."""
        current = seed.current
        try:
            stored = await thread_to_its_end(read_version, self._weights, current.version)
            if str(stored.digest) == current.digest:
                return "the files that are there"
        except StoredError as error:
            log.info("version %s is stored for %s: %s", current.version, _names(seed.newcomers), error)
        serving = self._desk.of(self._desk.membership.serving)
        if not serving:
            raise GivenUp("nobody serves it any more")
        giver = serving[0]
        await self._store(seed, giver)
        return giver.name

    async def _store(self, seed: Seed, giver: Replica) -> None:
        current = seed.current
        folder = await thread_to_its_end(new_folder, self._weights, current.version)
        version = {"lineage": current.version.lineage, "step": current.version.step}
        order = {**version, "seed": seed.number, "folder": str(folder), "tensors": current.tensors}
        answer = await self._calls.ask(giver, "store", order, self._options.update_s)
        if isinstance(answer, Refused):
            self._go_on(giver)
            raise SeedError(str(answer))
        words = f"{giver.name} to write version {current.version} to {folder}"
        await self._until(lambda: bool(seed.store_error) or len(seed.stored) == giver.workers, words, giver)
        if seed.store_error:
            raise SeedError(f"{giver.name} did not write version {current.version}: {seed.store_error}")
        files = [file for worker in sorted(seed.stored) for file in seed.stored[worker]]
        found = sum(piece.digest for file in files for piece in file.pieces) % MODULUS
        if str(found) != current.digest:
            words = f"{giver.name} serves other weights than version {current.version}: digest {found}, not {current.digest}"
            self._desk.mismatched(giver, words)
            raise GivenUp(words)
        stored = StoredVersion(current.version, int(current.digest), files)
        await thread_to_its_end(publish_version, folder, stored)

    async def _read(self, seed: Seed) -> None:
        """Have the newcomers read it; those that cannot are left to the trainer."""
        current, newcomers = seed.current, seed.newcomers
        version = {"lineage": current.version.lineage, "step": current.version.step}
        order = {**version, "epoch": self._desk.membership.epoch, "seed": seed.number, "tensors": current.tensors}
        self._go_on()
        asked = [self._calls.ask(replica, "load", order, self._options.update_s) for replica in newcomers]
        for replica, answer in zip(newcomers, await asyncio.gather(*asked), strict=True):
            if isinstance(answer, Refused):
                seed.errors[replica.index] = str(answer)
        words = f"{_names(newcomers)} to read version {current.version}"
        await self._until(lambda: all(seed.has_read(replica) for replica in newcomers), words)
        for replica in newcomers:
            if replica.index in seed.errors:
                self._desk.not_seeded(replica, f"{replica.name} could not be seeded: {seed.errors[replica.index]}")
        if seed.errors:
            await thread_to_its_end(give_up, folder_of(self._weights, current.version))  # whatever is wrong with it

    async def _admit(self, seed: Seed, giver: str, began: float) -> None:
        current = seed.current
        commit = {
            "lineage": current.version.lineage,
            "step": current.version.step,
            "digest": current.digest,
            "clear_cache": self._options.prefix_cache == "recompute",
        }
        for replica in seed.newcomers:
            if replica.gone.is_set() or replica.index in seed.errors:
                continue
            held = sum(seed.shares[replica.index, worker] for worker in range(replica.workers)) % MODULUS
            if str(held) != current.digest:
                self._desk.mismatched(
                    replica,
                    f"{replica.name} read other weights than version {current.version}: digest {held}, not {current.digest}",
                )
                continue
            answer = await self._calls.ask(replica, "commit", commit, self._options.update_s)
            self._go_on()
            if replica.gone.is_set():
                continue
            if isinstance(answer, Refused):
                self._desk.mismatched(replica, str(answer))
            elif self._desk.membership.state(replica.index) == "joined":
                took_s = time.monotonic() - began
                self._desk.seeded(replica, f"it has version {current.version} from {giver}, {took_s:.1f} s after it asked")

    def _go_on(self, giver: Replica | None = None) -> None:
        """Raises GivenUp where the seed is not wanted any more."""
        if self._busy():
            raise GivenUp("a newer version comes")
        if giver is not None and giver.gone.is_set():
            raise GivenUp(f"{giver.name} is gone")

    async def _until(self, condition: Callable[[], bool], what: str, giver: Replica | None = None) -> None:
        """Raises GivenUp, or SeedError at the deadline."""

        def over() -> bool:
            return condition() or self._busy() or (giver is not None and giver.gone.is_set())

        there = await self._desk.changed.until(over, self._options.update_s)
        self._go_on(giver)
        if not there:
            raise SeedError(f"waited {self._options.update_s:g} s for {what}")


def _names(replicas: Sequence[Replica]) -> str:
    return ", ".join(replica.name for replica in replicas)
