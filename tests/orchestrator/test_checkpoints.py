"""The orchestrator's part in checkpoints: of which moment a manifest speaks, what a failure does, and what is deleted."""

import asyncio
import dataclasses
from functools import partial

import numpy as np
import pytest

from prl.config.load import replace
from prl.config.schema import Config
from prl.control.server import Member
from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.ids import RolloutId
from prl.metrics import names
from prl.metrics.events import read_events
from prl.orchestrator.checkpoints import Checkpoints, Moment
from prl.orchestrator.journal import Journal
from prl.orchestrator.resume import Resume, Start
from prl.runfolder.manifest import newest_manifest, part_of, read_manifest
from prl.runfolder.paths import RunFolder
from prl.streams.records import MicroBatch, StepFacts
from prl.streams.steps import find_steps, write_step

TRAINER = Member("trainer", 0)


class Desk:
    """A run whose steps are trained one after the other, with a trainer that writes a file a checkpoint."""

    def __init__(self, path, *, streams=None, **options):
        self.run = RunFolder(path)
        self.run.create()
        config = replace(Config(), run={"folder": str(path), "steps": 100}, train=options, metrics={"tensorboard": False})
        config = replace(config, streams=streams or {})
        start = Start(
            Resume(0, 3, None),
            {3: 0},
            Dispatcher(DispatcherSettings(weights={"digits": 1.0}, steps=100, groups_per_step=1, rollouts_per_group=2)),
            (),
            0,
            (),
        )
        self.journal = Journal(self.run, 1, config.metrics)
        self.step = 0
        self.settled = 0
        self.make = partial(Checkpoints, self.run, config, 1, start, self.journal, now=self.moment, settled=self.note_settled)
        self.checkpoints = self.make()

    def moment(self):
        state = {"events": 10 * self.step, "groups": {}, "next_group": self.step}
        return Moment(self.step, state, {"steps": self.step + 1}, 0)

    async def note_settled(self):
        self.settled += 1

    def train(self):
        self.step += 1
        return self.checkpoints.due(self.step)

    def written(self, step, *, last=False):
        folder = self.run.checkpoint(step)
        (folder / "trainer").mkdir(parents=True, exist_ok=True)
        (folder / "trainer/weights").write_text(str(step))
        parts = [dataclasses.asdict(part_of(folder, folder / "trainer/weights"))]
        body = {"step": step, "parts": parts, "last": last, "metrics": {names.CHECKPOINT_WRITE_S: 1.5}}
        return asyncio.run(self.checkpoints.handlers()["checkpoint"](TRAINER, body))

    def failed(self, step, words):
        body = {"step": step, "error": words}
        asyncio.run(self.checkpoints.handlers()["checkpoint_failed"](TRAINER, body))

    def steps(self):
        return [step for step, _ in self.run.manifests()]

    def events(self):
        self.journal._metrics.flush()
        return read_events(self.run.metrics / "orchestrator-0.jsonl")[0]


def test_a_manifest_speaks_of_the_moment_when_its_step_had_been_trained(tmp_path):
    desk = Desk(tmp_path, checkpoint_every_steps=2)
    assert [desk.train() for _ in range(5)] == [False, True, False, True, False]
    assert desk.written(2) == {"saved": True}
    manifest = read_manifest(desk.run.manifest(2))
    assert (manifest.events, manifest.streams["steps"], manifest.lineage, manifest.forks) == (20, 3, 3, {3: 0})
    assert desk.settled == 1
    event = desk.events()[-1]
    assert (event.kind, event.step, event.values[names.CHECKPOINT_WRITE_S]) == (names.CHECKPOINT, 2, 1.5)
    assert event.values[names.CHECKPOINT_BYTES] == 1
    desk.written(4)
    assert read_manifest(desk.run.manifest(4)).events == 40
    assert newest_manifest(desk.run, parts=True)[0].step == 4


def test_the_last_one_is_of_the_last_step_whatever_was_due(tmp_path):
    desk = Desk(tmp_path, checkpoint_every_steps=0)
    assert [desk.train() for _ in range(3)] == [False] * 3
    with pytest.raises(ValueError, match="checkpoint of step 2 announced, the run is at step 3"):
        desk.written(2)
    desk.written(3, last=True)
    assert read_manifest(desk.run.manifest(3)).events == 30


def test_a_failed_save_is_an_alarm_and_leaves_what_counted(tmp_path):
    desk = Desk(tmp_path, checkpoint_every_steps=1)
    desk.train()
    desk.written(1)
    desk.train()
    desk.failed(2, "disk: no space is left")
    event = desk.events()[-1]
    assert (event.kind, event.step, event.labels) == (names.SAVE_FAILED, 2, {"error": "disk: no space is left"})
    assert event.values[names.CHECKPOINT_FAILURES] == 1
    assert desk.steps() == [1]
    desk.train()
    desk.written(3)
    assert desk.events()[-1].values[names.CHECKPOINT_FAILURES] == 1
    assert desk.steps() == [1, 3]


def test_a_manifest_that_cannot_be_written_is_an_alarm_but_at_the_end(tmp_path):
    desk = Desk(tmp_path, checkpoint_every_steps=1)
    desk.train()
    desk.run.manifest(1).mkdir(parents=True)
    assert desk.written(1) == {"saved": False}
    event = desk.events()[-1]
    assert event.kind == names.SAVE_FAILED
    assert "manifest.json" in event.labels["error"]
    with pytest.raises(OSError, match=r"manifest\.json"):
        desk.written(1, last=True)


@pytest.mark.parametrize("how", ["counts", "fails", "is lost"])
def test_a_save_that_was_asked_for_is_on_its_way_until_it_counts_or_fails_also_by_later_trainers(tmp_path, how):
    desk = Desk(tmp_path, checkpoint_every_steps=2)
    assert not desk.checkpoints.asked
    desk.checkpoints.ask()
    assert desk.train()
    assert desk.train()  # it is due by itself, after the one that was asked for
    assert desk.checkpoints.asked
    if how == "counts":
        desk.written(1)
    elif how == "fails":
        desk.failed(1, "disk: no space is left")
    desk.checkpoints = desk.make(before=desk.checkpoints)
    lost = how == "is lost"
    assert desk.checkpoints.asked == lost
    assert desk.train() == lost
    if lost:
        desk.written(3)
        assert not desk.checkpoints.asked


def test_old_ones_go_once_a_new_one_counts(tmp_path):
    desk = Desk(tmp_path, checkpoint_every_steps=1, checkpoint_keep_last=2, checkpoint_keep_every_steps=3)
    for step in range(1, 7):
        desk.train()
        desk.written(step)
    assert desk.steps() == [3, 5, 6]
    assert desk.events()[-1].values[names.CHECKPOINTS_RETIRED] == 3


@pytest.mark.parametrize("backend", ["folder", "redis"])
def test_step_files_behind_the_last_checkpoint_but_one_go_wherever_rollouts_lie(tmp_path, backend):
    desk = Desk(tmp_path, streams={"backend": backend}, checkpoint_every_steps=2)
    for step in range(1, 7):
        ones, tokens = np.ones(2, np.float32), np.arange(2, dtype=np.int32)
        ids = (RolloutId(0, "digits/1", step, 0, 0),)
        batch = MicroBatch(tokens, tokens, np.array([0, 2], np.int32), ones, ones, ones, None, tokens, ids)
        write_step(desk.run.steps, [batch], StepFacts(step, 2.0, 2, 1, 1), run="r", attempt=1, sequence=step)
        announced = {"path": f"actor-000/{step}", "groups": [{"group": step, "issue": 0, "rollouts": 2}]}
        desk.checkpoints.announced(announced)
        if desk.train():
            desk.written(step)
    assert list(find_steps(desk.run.steps)) == [5, 6]
    assert not (backend == "redis" and desk.checkpoints._reclaimer._groups)  # nobody would ever take them out
