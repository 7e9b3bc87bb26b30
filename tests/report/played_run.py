"""A run played in one process without engines: the real dispatcher, ledger, streams, step maker and resume, a sampler that
answers by a rule, a trainer that does nothing, and a crash wherever the test wants one: of everything, or of the trainer."""

import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from prl.config.load import dump
from prl.config.schema import Config
from prl.domains.options import DomainOptions
from prl.flow.ids import Lease
from prl.flow.versions import Version
from prl.orchestrator.options import RunOptions
from prl.orchestrator.reclaim import Reclaimer
from prl.orchestrator.resume import Start, find_remains, find_start, go_back
from prl.preprocess.assemble import Moment, build_step
from prl.preprocess.options import PreprocessOptions
from prl.preprocess.steps import Arrival, StepMaker
from prl.runfolder.manifest import Manifest, part_of, write_manifest
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.streams.files import next_sequence
from prl.streams.folder import FolderAppender
from prl.streams.ledger import LedgerWriter, ledger_events, read_ledger
from prl.streams.options import StreamsOptions
from prl.streams.records import Group, Rollout, Turn, VersionSpan
from prl.streams.steps import write_step
from prl.streams.writer import RolloutWriter
from prl.trainer.options import ModelOptions

ROLLOUTS = 3
MODEL = ModelOptions(init="random", architecture="qwen2", tokenizer="bytes")  # of 260 tokens


def config(folder: Path, steps: int = 8, order: str = "dispatch", keep: str = "all") -> Config:
    return Config(
        run=RunOptions(
            name="played",
            folder=str(folder),
            steps=steps,
            groups_per_step=2,
            rollouts_per_group=ROLLOUTS,
            max_lag=2,
            order=order,
        ),
        domains=(DomainOptions(name="digits"),),
        preprocess=PreprocessOptions(drop_equal_groups=True, pack_tokens=32),
        streams=StreamsOptions(roll_groups=2, keep=keep),
    )


class Crash(Exception):
    pass


class Attempt:
    """One attempt. `crash_at` counts the operations until everything is gone; `seed` decides who is quick, and at which moments
    the trainer, with the preprocessor, dies `deaths` times and begins again."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        *,
        seed: int,
        crash_at: int | None = None,
        every: int = 3,
        deaths: int = 0,
    ) -> None:
        self.run, self.config = run, config
        self._left = crash_at
        self._every = every  # steps between checkpoints
        self._deaths = deaths
        self._random = random.Random(seed)
        self.number = max(run.attempts(), default=0) + 1
        start = find_start(run, config)
        run.attempt(self.number).mkdir()
        run.attempt_config(self.number).write_text(dump(config))
        self._dispatcher = start.dispatcher
        self._ledger = LedgerWriter(run.ledger(self.number))
        self._begin(start)
        self._writers = [
            RolloutWriter(FolderAppender(run, f"actor-{k}"), f"actor-{k}", "played", self.number, config.streams)
            for k in range(2)
        ]
        self._held: list[tuple[int, Lease, Version]] = []  # (actor, lease, version that samples it)
        self._unannounced: dict[tuple[int, int], Group] = {}
        self._reclaimer = Reclaimer(run, "played", self.number)
        self.operations = 0

    def _begin(self, start: Start) -> None:
        """What a lineage begins with."""
        self._start, self._step, self._lineage = start, start.resume.step, start.resume.lineage
        plan = {"lineage": self._lineage, "forks": start.forks, "refused": []}
        self.run.plan(self.number).write_text(json.dumps(plan))
        self._maker = StepMaker(self.config.preprocess, self.config.run.groups_per_step, self.config.run.order, 2**20)
        self._entries = {int(entry.file["step"]): list(entry.trained) for entry in start.waiting}
        self._sequence = next_sequence(self.run.steps)

    def _maybe_die(self) -> bool:
        """The trainer dies, with the preprocessor; what actors hold goes on, and comes late. Others begin at the checkpoint;
        they may train before the samplers have its version."""
        if not self._deaths or self._random.random() > 0.05:
            return False
        self._deaths -= 1
        remains = find_remains(self.run, self.config, self._lineage + 1)
        self._begin(go_back(remains, self._dispatcher, "trainer ended"))
        self._record(self._start.reissued)
        begins = Version(self._lineage, self._step)
        if self._random.random() < 0.5 and self._step + 1 in self._entries:
            self._dispatcher.committed(Version(self._lineage - 1, self._dispatcher.version.step))  # was on its way
            self._train_next()
        self._dispatcher.committed(begins)
        return True

    def play(self) -> None:
        """To the end of the run, or until it crashes."""
        self._record(self._start.reissued)
        self._dispatcher.problems({"digits": 50}, {})
        self._commit()
        while self._step < self.config.run.steps:
            for part in self._random.sample([self._lease, self._sample, self._sample, self._make, self._train], 5):
                part()
                self._maybe_die()
        self._record(self._dispatcher.close("run ended"))
        self._ledger.close()
        self.run.exit(self.number).write_text(json.dumps({"outcome": "done"}))

    def _record(self, events) -> None:
        self._tick()
        self._ledger.append(events)
        self._tick()

    def _tick(self) -> None:
        self.operations += 1
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Crash

    def _commit(self) -> None:
        self._dispatcher.committed(Version(self._lineage, self._step))

    def _lease(self) -> None:
        actor = self._random.randrange(2)
        leased = self._dispatcher.lease(actor, 3, 0.0)
        self._record(leased.events)
        self._held += [(actor, lease, self._dispatcher.version) for lease in leased.leases]

    def _sample(self) -> None:
        if not self._held:
            return
        actor, lease, version = self._held.pop(self._random.randrange(len(self._held)))
        group = answer(lease, version)
        self._unannounced[group.group, group.issue] = group
        published = self._writers[actor].append(group)
        if not self._held:
            published += [entry for writer in self._writers for entry in writer.flush()]
        self._tick()
        for entry in published:
            self._reclaimer.announced(entry.announcement())
            for facts in entry.groups:
                group = self._unannounced.pop((facts.group, facts.issue))
                if self._dispatcher.result(group.group, group.issue):
                    self._maker.add(group, entry, Arrival(0.0, 0.0, 0.0))
        self._tick()

    def _make(self) -> None:
        step = max([self._step, *self._entries]) + 1
        moment = Moment(step, self._lineage, self._start.forks, self.config.run.max_lag)
        chosen = self._maker.choose(moment, self._dispatcher.awaited_from)
        if chosen is not None and self._step >= step - 2 and step <= self.config.run.steps:
            members = [member.prepared for member in self._maker.take(chosen, moment).members]
            made = build_step(members, moment, self.config.preprocess, 1)
            write_step(
                self.run.steps, made.microbatches, made.facts, run="played", attempt=self.number, sequence=self._sequence
            )
            self._sequence += 1
            self._tick()
            if self._maybe_die():  # before it could announce the file
                return
            self._discard(made.discarded)
            self._entries[step] = made.trained
        self._discard(self._maker.take_discarded())

    def _discard(self, ends) -> None:
        for rollout, reason in ends:
            self._record(self._dispatcher.discarded([rollout], reason))

    def _train(self) -> None:
        if self._step + 1 not in self._entries:
            return
        self._train_next()
        self._commit()
        if self._step % self._every == 0:
            self.checkpoint()

    def _train_next(self) -> None:
        self._step += 1
        self._record(self._dispatcher.trained(self._step, self._entries.pop(self._step)))
        self._maker.trained(self._step)

    def checkpoint(self) -> None:
        self._tick()
        folder = self.run.checkpoint(self._step)
        (folder / "trainer").mkdir(parents=True, exist_ok=True)
        (folder / "trainer/weights").write_text(f"version {self._step}")
        state = self._dispatcher.state()
        manifest = Manifest(
            step=self._step,
            attempt=self.number,
            lineage=self._lineage,
            forks=self._start.forks,
            dispatcher=state,
            streams={},
            evaluations_reached=0,
            parts=[part_of(folder, folder / "trainer/weights")],
        )
        write_manifest(self.run, manifest)
        self._tick()
        if self.config.streams.keep == "needed":
            self._reclaimer.reclaim(self._step, state)
            assert not self._reclaimer.failures
            self._tick()


def answer(lease: Lease, version: Version) -> Group:
    """The sampler: what it says depends on the problem and the rollout's number alone. Every fourth problem's rewards are
    all equal."""

    def rollout(number: int) -> Rollout:
        draw = zlib.crc32(f"{lease.problem} {number}".encode())
        output = np.array([1 + draw % 7, number, lease.index], np.int32)
        spans = (VersionSpan(version, 0, 3),)
        turn = Turn(np.array([lease.index, 9], np.int32), output, np.full(3, -0.5, np.float32), spans, "stop", 0, 1.0, 2.0)
        return Rollout((turn,), 0.0 if lease.index % 4 == 0 else float(number == lease.index % lease.rollouts))

    rollouts = tuple(rollout(number) for number in range(lease.rollouts))
    return Group(lease.epoch, lease.domain, "", lease.problem, lease.group, lease.issue, rollouts)


def new_run(folder: Path, **options) -> tuple[RunFolder, Config]:
    run, settings = RunFolder(folder), config(folder, **options)
    run.create()
    write_model_folder(MODEL, run.model)
    run.config.write_text(dump(settings))
    return run, settings


def play(folder: Path, crashes: Iterator[int] | list[int] = (), *, seed: int = 99, deaths: int = 0, **options) -> RunFolder:
    """A whole run, interrupted after so many operations of each attempt, in each of which the trainer dies `deaths` times."""
    run, settings = new_run(folder, **options)
    for number, crash_at in enumerate(crashes):
        attempt = Attempt(run, settings, seed=number, crash_at=crash_at, deaths=deaths)
        try:
            attempt.play()
        except Crash:
            if not run.manifests():  # nothing to go on from: this start does not count
                raise AssertionError("the first crash must come after the first checkpoint") from None
        else:
            return run
    Attempt(run, settings, seed=seed, deaths=deaths).play()
    return run


def trained_sequence(run: RunFolder) -> list[tuple[int, list[tuple[int, str, int, int]]]]:
    """(step, the set of its rollouts, without their issues) of the surviving lineage, in order."""
    steps: dict[int, tuple[int, list]] = {}
    for event in ledger_events(read_ledger(run.ledgers)):
        if event.kind == "trained":
            lineage, ids = steps.get(event.step, (-1, []))
            if event.version.lineage > lineage:
                ids = []
            i = event.rollout
            steps[event.step] = event.version.lineage, [*ids, (i.epoch, i.problem, i.group, i.rollout)]
    return [(step, sorted(ids)) for step, (_, ids) in sorted(steps.items())]
