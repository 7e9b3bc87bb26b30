"""The audit of runs whose step files were changed, damaged or lost."""

import shutil
from dataclasses import replace

import pytest
from damaged_run import FAR, edit_step, names

from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder
from prl.runfolder.reclaim import move_aside
from prl.streams.steps import find_steps, read_step, write_step


@pytest.mark.parametrize("step", [1, 4, 8])
def test_one_row_deleted_from_a_step_file(run, step):
    rollout = edit_step(run, step, [(0, None), (2, None), (3, None), (4, None), (5, None)])
    assert names(run, rollout)
    assert f"was trained in step {step}, but is not in its file" in render(audit(run.path))


@pytest.mark.parametrize("step", [1, 4, 8])
def test_one_row_doubled_in_a_step_file(run, step):
    rollout = edit_step(run, step, [(0, None), (1, None), (1, None), (2, None), (3, None), (4, None), (5, None)])
    assert names(run, rollout)


@pytest.mark.parametrize("step", [1, 4, 8])
def test_one_row_renumbered_in_a_step_file(run, step):
    rollout = edit_step(run, step, [(0, None), (1, FAR), (2, None), (3, None), (4, None), (5, None)])
    assert names(run, rollout)
    assert f"rollout {FAR}: lies in the file of step {step}; the ledger says: nothing" in render(audit(run.path))


def test_a_step_keeps_to_the_limits_of_the_attempt_that_made_it(run):
    """A resume may come with others."""
    run.config.write_text(run.config.read_text().replace("max_lag: 2", "max_lag: 0"))
    result = audit(run.path)
    assert (result.passed, result.lag_max) == (True, 2), render(result)
    shutil.copy(run.config, run.attempt_config(2))
    assert "with a lag above 0" in render(audit(run.path))
    run.attempt_config(2).unlink()
    assert "its limit of the lag is not known: " in render(audit(run.path))


def test_a_missing_step_file(run):
    find_steps(run.steps)[5].path.unlink()
    assert "step 5: its file is not there; 6 rollouts were trained in it" in render(audit(run.path))


def test_a_step_file_without_anything_is_a_finding_where_there_is_no_other(run):
    file = find_steps(run.steps)[5]
    facts = replace(read_step(file.path, file.bytes, file.checksum).facts, microbatches=0)
    write_step(run.steps, [], facts, run="played", attempt=file.attempt, sequence=file.sequence + 100)
    result = audit(run.path)
    assert result.passed, render(result)
    assert ["microbatches=0" in words for words in result.passed_over] == [True]
    file.path.unlink()
    text = render(audit(run.path))
    assert "step 5: " in text
    assert "microbatches=0" in text
    assert text.endswith("audit: failed, 1 finding")


def copy_step(run: RunFolder, step: int, name: str, attempt: int, to_step: int | None = None) -> None:
    """The run's own file of a step once more, as if a run of this name had written it in this attempt."""
    file = find_steps(run.steps)[step]
    found = read_step(file.path, file.bytes, file.checksum)
    facts = replace(found.facts, step=to_step or step)
    write_step(run.steps, found.microbatches(), facts, run=name, attempt=attempt, sequence=10_000)


def test_a_foreign_step_file_beside_the_runs_own_is_told_and_no_finding(run):
    """As a resume does, which sets it aside: another run's, and one of an attempt that this run never had."""
    copy_step(run, 2, "another", 999)
    copy_step(run, 4, "played", 999)
    before = audit(run.path)
    assert before.passed, render(before)
    assert before.step_files == len(find_steps(run.steps))
    newest = f"of attempt 999, the run's newest is attempt {before.attempts}"
    assert [newest in words for words in before.passed_over] == [True] * 2
    text = render(before)
    assert "0 quarantined, 2 passed over" in text
    assert "passed over, the run does not need it: " in text
    for file in find_steps(run.steps).values():
        if file.attempt == 999:
            move_aside(run, file.path, ())
    after = audit(run.path)
    assert after.passed
    assert (after.quarantined_files, after.passed_over) == (2, [])


def test_a_foreign_step_file_of_a_step_that_was_not_trained_is_no_finding(run):
    copy_step(run, 2, "played", 999, to_step=10**6)
    result = audit(run.path)
    assert result.passed, render(result)
    assert len(result.passed_over) == 1


def test_a_foreign_step_file_in_place_of_the_runs_own_is_a_finding(run):
    own = find_steps(run.steps)[2].path
    copy_step(run, 2, "another", 2)
    own.unlink()
    text = render(audit(run.path))
    assert "step 2: " in text
    assert "of run 'another', this is run 'played'" in text
    assert text.endswith("audit: failed, 1 finding")
