"""Which checkpoints are kept, and that none is ever there in part."""

import json

import pytest

from prl.runfolder.paths import RunFolder
from prl.runfolder.retire import Keep, retire, retired


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [
        (None, 0, []),
        (1, 0, [10, 20, 25, 30]),
        (2, 0, [10, 20, 25]),
        (9, 0, []),
        (1, 20, [10, 25, 30]),
        (2, 15, [10, 20, 25]),
        (1, 5, []),
    ],
)
def test_the_last_ones_are_kept_and_those_of_every_so_many_steps(keep_last, keep_every, gone):
    steps = [10, 20, 25, 30, 40]
    assert retired(steps, 40, Keep(keep_last, keep_every)) == gone


def test_later_ones_of_a_lineage_that_was_left_neither_go_nor_count():
    assert retired([10, 20, 30, 40, 50], 30, Keep(2, 0)) == [10]


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path)
    run.create()
    for step in (2, 4, 6, 8):
        (run.checkpoint(step) / "trainer").mkdir(parents=True)
        (run.checkpoint(step) / "trainer/weights").write_text("1")
        if step != 4:
            run.manifest(step).write_text(json.dumps({}))
    (run.checkpoints / "step_00000x").mkdir()
    return run


def test_what_is_not_kept_goes_with_what_never_counted(run):
    assert retire(run, 8, Keep(2, 0)) == 1
    assert [step for step, _ in run.checkpoint_folders()] == [6, 8]
    assert [step for step, _ in run.manifests()] == [6, 8]
    assert (run.checkpoints / "step_00000x").exists()
    assert retire(run, 8, Keep(2, 0)) == 0


def test_where_all_are_kept_nothing_is_touched(run):
    assert retire(run, 8, Keep(None, 0)) == 0
    assert [step for step, _ in run.checkpoint_folders()] == [2, 4, 6, 8]


def test_an_interrupted_one_is_not_touched_while_it_may_be_written(run):
    (run.checkpoint(10) / ".tmp-trainer").mkdir(parents=True)
    retire(run, 8, Keep(1, 0))
    assert [step for step, _ in run.checkpoint_folders()] == [8, 10]
