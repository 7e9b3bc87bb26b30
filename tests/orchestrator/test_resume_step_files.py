"""Which step files behind its checkpoint an attempt trains again, and what becomes of the others."""

import shutil
from dataclasses import replace

import pytest
from first_attempt import CONFIG, Attempt, flip, one_checkpoint
from left_behind import step_file

from prl.flow.versions import Version
from prl.orchestrator.resume import ResumeError, find_start
from prl.streams.steps import find_steps


def test_a_step_file_of_discarded_rollouts_is_not_trained(tmp_path):
    """At a run's clean end, what was written ahead is discarded; going on with more steps must not train on it."""
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    step_file(first.run, 2, first.ids(2, 3), 2)
    first.checkpoint(1)
    first.ledger.append(first.dispatcher.close("run ended"))
    start = find_start(first.run, CONFIG)
    assert not start.waiting
    assert not start.reissued


def test_a_lost_step_file_behind_the_checkpoint_is_told(tmp_path):
    """Its rollouts have ended by being trained, in a lineage that is abandoned now: nothing else can train them again."""
    first = one_checkpoint(tmp_path)
    first.train(2, 2, 3)
    first.train(3, 4, 5)
    find_steps(first.run.steps)[2].path.unlink()
    with pytest.raises(ResumeError, match=r"step 2 was trained behind the checkpoint of step 1, and its file is not in"):
        find_start(first.run, CONFIG)


@pytest.mark.parametrize("loss", ["lost", "damaged", "of other rollouts"])
def test_a_step_that_only_an_earlier_lineage_had_come_to_is_trained_again_from_its_file_or_that_is_told(tmp_path, loss):
    """Steps 2 and 3 were trained behind the checkpoint of step 1; after a rollback to it step 2 was again, and saved."""
    first = one_checkpoint(tmp_path)
    first.train(2, 2, 3)
    first.train(3, 4, 5)
    first.ledger.append(first.dispatcher.went_back(Version(1, 1), "trainer ended", range(6)))
    first.ledger.append(first.dispatcher.trained(2, first.ids(2, 3)))
    first.checkpoint(2)
    start = find_start(first.run, CONFIG)
    assert [(entry.file["step"], entry.trained) for entry in start.waiting] == [(3, sorted(first.ids(4, 5)))]
    path = find_steps(first.run.steps)[3].path
    if loss == "damaged":
        flip(path, 100)
    else:
        path.unlink()
    if loss == "of other rollouts":
        first.dispatcher.committed(Version(1, 2))
        first.lease(2)
        step_file(first.run, 3, first.ids(6, 7), 9)
    with pytest.raises(ResumeError, match=r"step 3 was trained behind the checkpoint .*restore it, or submit the run anew"):
        find_start(first.run, CONFIG)


def test_rollouts_that_a_durable_step_file_left_out_are_discarded(tmp_path):
    """The preprocessor died between the file and its announcement: what it had dropped from the groups has no end yet."""
    first = one_checkpoint(tmp_path)
    step_file(first.run, 2, first.ids(2, 3)[:-2], 2)
    start = find_start(first.run, CONFIG)
    discarded = [event for event in start.reissued if event.kind == "discarded"]
    assert [event.rollout for event in discarded] == first.ids(2, 3)[-2:]
    assert {event.reason for event in discarded} == {"left out of a step file"}
    assert sorted({event.rollout.group for event in start.reissued if event.kind == "issued_again"}) == [4, 5]


def test_a_damaged_step_file_blocks_a_resume_only_where_it_is_needed(tmp_path, caplog):
    first = one_checkpoint(tmp_path)
    first.train(2, 2, 3)
    step_file(first.run, 3, first.ids(4, 5), 3)
    files = find_steps(first.run.steps)
    flip(files[3].path, 100)
    start = find_start(first.run, CONFIG)
    assert [entry.file["step"] for entry in start.waiting] == [2]
    assert "step 3 is made anew, since nothing was trained from its file; set aside as of no use" in caplog.text
    assert sorted({event.rollout.group for event in start.reissued if event.kind == "issued_again"}) == [4, 5]
    flip(files[2].path, 100)
    with pytest.raises(ResumeError, match=r"step 2 was trained behind the checkpoint .* of no use: .*; restore it, or submit"):
        find_start(first.run, CONFIG)


@pytest.mark.parametrize("foreign", ["of another run", "of another step", "of another model", "never issued"])
def test_a_step_file_that_is_not_this_runs_own_is_not_trained(tmp_path, caplog, foreign):
    first = one_checkpoint(tmp_path)
    first.train(2, 2, 3)
    if foreign == "of another run":
        step_file(first.run, 3, first.ids(4, 5), 3, writer="r-2")  # of the same name
        words = "of run 'r-2', this is run 'r-1'"
    elif foreign == "of another step":
        second = find_steps(first.run.steps)[2].path
        shutil.copy(second, second.with_name(second.name.replace("step_00000002", "step_00000003")))
        words = "holds step 2, wanted step 3"
    elif foreign == "of another model":
        step_file(first.run, 3, first.ids(4, 5), 3, token=16)
        words = "holds the token 16, the model's are 0 to 15"
    else:
        step_file(first.run, 3, [replace(i, issue=1) for i in first.ids(4, 5)], 3)
        words = "holds 6 rollouts that were never issued, RolloutId(epoch=0, problem="
    start = find_start(first.run, CONFIG)
    assert [entry.file["step"] for entry in start.waiting] == [2]
    assert "step 3 is made anew" in caplog.text
    assert words in caplog.text
    assert words in "".join(start.refused)
    assert find_start(first.run, CONFIG).refused == []  # it is told once: the file lies in quarantine
    assert len(list(first.run.quarantine.glob("*.arrow"))) == 1
    assert sorted({event.rollout.group for event in start.reissued if event.kind == "issued_again"}) == [4, 5]


def test_a_trained_step_is_trained_again_from_the_file_that_it_was_trained_from(tmp_path):
    """Beside it lies another one, of rollouts that are in the next step's: a preprocessor died before it announced it."""
    first = one_checkpoint(tmp_path)
    first.train(2, 2, 3)
    first.train(3, 4, 5)
    step_file(first.run, 2, first.ids(2, 4), 8)
    start = find_start(first.run, CONFIG)
    assert [sorted(entry.trained) for entry in start.waiting] == [sorted(first.ids(2, 3)), sorted(first.ids(4, 5))]
    (told,) = start.refused
    assert "other rollouts than the ledger says" in told


def test_a_foreign_file_of_a_trained_step_hides_none_of_the_runs_own(tmp_path, caplog):
    """It has a higher sequence, so has a damaged one; and one of an attempt that the run never had says that it is the run's.
    All are set aside, and told once."""
    first = one_checkpoint(tmp_path)
    first.train(2, 2, 3)
    own = find_steps(first.run.steps)[2]
    step_file(first.run, 2, first.ids(2, 3), 7)
    flip(find_steps(first.run.steps)[2].path, 100)
    step_file(first.run, 2, first.ids(4, 5), 8, writer="r-2")
    step_file(first.run, 2, first.ids(4, 5), 9, attempt=999)
    start = find_start(first.run, CONFIG)
    assert [entry.file["path"] for entry in start.waiting] == [str(own.path.relative_to(first.run.path))]
    assert start.waiting[0].trained == sorted(first.ids(2, 3))
    assert [words.partition(": ")[0] for words in start.refused] == [
        "step 2 is trained from another file; set aside as of no use"
    ] * 3
    assert "of attempt 999, the run's newest is attempt 1" in start.refused[0]
    assert "of run 'r-2', this is run 'r-1'" in start.refused[1]
    assert "checksum" in start.refused[2]
    assert all(words in caplog.text for words in start.refused)
    assert {path.name[:18] for path in first.run.quarantine.glob("*.arrow")} == {"steps_step_0000000"}
    assert len(list(first.run.quarantine.glob("*.arrow"))) == 3
    again = find_start(first.run, CONFIG)
    assert (again.refused, again.waiting) == ([], start.waiting)
