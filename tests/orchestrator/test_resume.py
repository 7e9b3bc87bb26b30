"""Where an attempt starts, from real ledgers, step files and manifests; no process runs."""

import json
from dataclasses import replace

import pytest
from first_attempt import CONFIG, Attempt, two_checkpoints
from left_behind import step_file

from prl.flow.events import LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.orchestrator.resume import ResumeError, find_start
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import LedgerWriter


def test_without_a_checkpoint_a_run_starts_afresh(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    start = find_start(run, CONFIG)
    assert (start.resume.step, start.resume.lineage, start.resume.checkpoint) == (0, 0, None)
    assert not start.waiting
    assert not start.reissued


def test_a_crash_behind_a_checkpoint_trains_the_durable_steps_again_and_issues_the_rest_again(tmp_path):
    """Checkpoint after step 1; step 2 was trained, step 3's file was durable, groups 6 and 7 were under way."""
    first = Attempt(tmp_path)
    assert first.lease(6) == [0, 1, 2, 3, 4, 5]
    first.train(1, 0, 1)
    first.checkpoint(1)
    assert first.lease(2) == [6, 7]
    first.train(2, 2, 3)
    step_file(first.run, 3, first.ids(4, 5), 3)

    start = find_start(first.run, CONFIG)
    assert (start.resume.step, start.resume.lineage) == (1, 1)
    assert start.resume.checkpoint == str(first.run.checkpoint(1))
    assert start.forks == {1: 1}
    assert start.evaluations_reached == 1
    assert [entry.file["step"] for entry in start.waiting] == [2, 3]
    assert start.waiting[0].trained == sorted(first.ids(2, 3))
    assert start.waiting[1].trained == sorted(first.ids(4, 5))
    assert sorted({event.rollout.group for event in start.reissued}) == [6, 7]
    assert {event.kind for event in start.reissued} == {"issued_again"}

    dispatcher = start.dispatcher
    dispatcher.problems({"digits": 100}, {})
    dispatcher.committed(Version(1, 1))
    again = dispatcher.lease(0, 10, 0.0).leases
    # 3 steps of 2 groups may be in flight; 2 of step 3 are, and step 2's two count until its version is committed.
    assert [(lease.group, lease.issue) for lease in again[:2]] == [(6, 1), (7, 1)]
    assert {lease.problem for lease in again[:2]} == {first.leases[6].problem, first.leases[7].problem}
    assert all(lease.group >= 8 for lease in again[2:])
    trained = dispatcher.trained(2, start.waiting[0].trained)
    assert [(event.kind, event.version) for event in trained] == [("trained", Version(1, 2))] * 6


def test_the_lineage_rises_also_over_attempts_that_left_no_checkpoint(tmp_path):
    first = Attempt(tmp_path)
    first.lease(2)
    first.train(1, 0, 1)
    first.checkpoint(1)
    first.run.attempt(2).mkdir()
    first.run.plan(2).write_text(json.dumps({"lineage": 1, "forks": {"1": 1}, "refused": []}))
    start = find_start(first.run, CONFIG)
    assert start.resume.lineage == 2
    assert start.forks == {1: 1, 2: 1}


def test_a_run_that_began_and_left_no_checkpoint_is_not_begun_again(tmp_path):
    first = Attempt(tmp_path)
    first.lease(2)
    with pytest.raises(ResumeError, match="submit it anew"):
        find_start(first.run, CONFIG)


def test_a_manifest_that_counts_on_rows_that_are_not_there_is_refused(tmp_path):
    first = Attempt(tmp_path)
    first.lease(2)
    first.checkpoint(1)
    first.dispatcher.lease(0, 4, 0.0)  # told, and never written
    first.checkpoint(2)
    with pytest.raises(ResumeError, match=r"counts on 18 rows .* which has 6"):
        find_start(first.run, CONFIG)


def test_a_checkpoint_that_the_run_has_gone_back_behind_does_not_come_back(tmp_path):
    """It could not be read for a while, and the trainers began again before it: what they have trained since counts."""
    first = two_checkpoints(tmp_path)
    assert find_start(first.run, CONFIG).resume.step == 2
    first.run.attempt(2).mkdir()
    first.run.plan(2).write_text(json.dumps({"lineage": 1, "forks": {"1": 1}, "refused": []}))
    start = find_start(first.run, CONFIG)
    assert (start.resume.step, start.resume.lineage, start.forks) == (1, 2, {1: 1, 2: 1})
    assert not start.refused
    first.run.plan(2).write_text(json.dumps({"lineage": 1, "forks": {}, "refused": []}))
    with pytest.raises(ResumeError, match=r"no plan\.json says where lineages 1 to 1 left the ones before"):
        find_start(first.run, CONFIG)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"lineage": 1}', '{"lineage": [], "forks": {}, "refused": []}'])
def test_a_damaged_plan_is_named(tmp_path, text):
    first = two_checkpoints(tmp_path)
    first.run.plan(1).write_text(text)
    with pytest.raises(ResumeError, match=r"attempt_001/plan.json: is no plan of an attempt .*; restore it"):
        find_start(first.run, CONFIG)


def test_ledger_rows_of_something_else_are_told(tmp_path):
    first = two_checkpoints(tmp_path)
    stranger = LedgerEvent(RolloutId(0, "digits/7", 10**6, 0, 0), "issued", Version(0, 0), -1, "")
    for event in (stranger, replace(stranger, kind="blessed")):
        with LedgerWriter(first.run.ledger(2)) as ledger:
            ledger.append([event])
        with pytest.raises(ResumeError, match=r"step_000002/manifest.json: its state and the ledger .* do not fit together"):
            find_start(first.run, CONFIG)
        ledger.path.unlink()
