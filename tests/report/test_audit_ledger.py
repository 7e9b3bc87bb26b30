"""The audit of runs with one row of the ledger deleted, doubled or changed, of which it has to name the id."""

import json
import shutil
from dataclasses import replace

import pytest
from damaged_run import FAR, edit_ledger, names, play_until_crash, words

from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import ledger_events, read_ledger


def rows_of(run: RunFolder, kind: str) -> list[int]:
    """The first, a middle and the last row of a kind, and the same of the second lineage."""
    events = list(ledger_events(read_ledger(run.ledgers)))
    found = [n for n, e in enumerate(events) if e.kind == kind]
    later = [n for n in found if events[n].version.lineage == 1] or found
    return sorted({found[0], found[len(found) // 2], found[-1], later[0]})


@pytest.mark.parametrize("kind", ["issued", "trained", "discarded", "issued_again"])
@pytest.mark.parametrize("damage", ["deleted", "doubled", "renumbered"])
def test_one_row_of_the_ledger(good, tmp_path, kind, damage):
    for row in rows_of(good, kind):
        folder = tmp_path / str(row)
        shutil.copytree(good.path, folder)
        run = RunFolder(folder)
        ids: list[RolloutId] = []

        def edit(events, row=row, ids=ids):
            event = events[row]
            ids.append(event.rollout)
            if damage == "deleted":
                return events[:row] + events[row + 1 :]
            if damage == "doubled":
                return events[: row + 1] + events[row:]
            other = replace(event, rollout=replace(event.rollout, rollout=event.rollout.rollout + FAR))
            ids.append(other.rollout)
            return [*events[:row], other, *events[row + 1 :]]

        edit_ledger(run, edit)
        assert names(run, *ids), (row, render(audit(folder)))


def test_an_end_of_another_kind_beside_the_first(run):
    def edit(events):
        first = next(event for event in events if event.kind == "trained")
        return [*events, replace(first, kind="discarded", step=-1, reason="too old")]

    edit_ledger(run, edit)
    text = render(audit(run.path))
    assert "has more than one end: issued, trained in step 1 of lineage 0, discarded (too old)" in text


def test_another_problem_and_another_step(run):
    def edit(events):
        at = next(n for n, e in enumerate(events) if e.kind == "trained")
        ids.append(events[at].rollout)
        events[at] = replace(events[at], rollout=replace(events[at].rollout, problem="digits/999"))
        return events

    ids: list[RolloutId] = []
    edit_ledger(run, edit)
    assert f"{words(ids[0])}: is of another problem or epoch" in render(audit(run.path))


def test_ids_that_an_abandoned_lineage_trained_last_are_lost(run):
    """A step that was trained before and after the rollback, without its second time."""

    def edit(events):
        trained = {e.version for e in events if e.kind == "trained"}
        twice = next(v for v in sorted(trained) if v.lineage == 1 and Version(0, v.step) in trained)
        return [e for e in events if not (e.kind == "trained" and e.version == twice)]

    edit_ledger(run, edit)
    assert "lost with its lineage" in render(audit(run.path))


def test_open_ids_are_a_fault_only_where_the_run_says_that_it_ended_well(good, tmp_path):
    crashed = play_until_crash(tmp_path / "crashed")
    result = audit(crashed.path)
    assert result.passed, render(result)
    assert result.open
    assert result.ended is None
    crashed.exit(1).write_text(json.dumps({"outcome": "done"}))
    assert "has no end, and the run says that it ended well" in render(audit(crashed.path))


@pytest.mark.parametrize("rollout", [0, 2])
@pytest.mark.parametrize("damage", ["deleted", "renumbered"])
def test_one_issued_row_of_a_group_that_was_under_way(tmp_path, rollout, damage):
    """Nothing else speaks of these rollouts; the last of the last group leaves no gap in any numbers."""
    run, ids = play_until_crash(tmp_path / "crashed"), []

    def edit(events):
        ended = {event.rollout for event in events if event.kind != "issued"}
        group = max(event.rollout.group for event in events if event.rollout not in ended)
        row = next(n for n, e in enumerate(events) if (e.rollout.group, e.rollout.rollout) == (group, rollout))
        ids.append(events[row].rollout)
        other = replace(events[row], rollout=replace(ids[0], rollout=rollout + FAR))
        return [*events[:row], *([other] if damage == "renumbered" else []), *events[row + 1 :]]

    edit_ledger(run, edit)
    assert names(run, *ids), render(audit(run.path))


def test_groups_of_several_sizes_where_a_resume_has_changed_it(run):
    """Which of the two a group has is not known: it has to be one of them."""
    text = run.config.read_text()
    run.config.write_text(text.replace("rollouts_per_group: 3", "rollouts_per_group: 5"))
    assert audit(run.path).passed, render(audit(run.path))
    for attempt in (1, 2):
        run.attempt_config(attempt).unlink()
    assert "rollout 3: was never issued, but others of its group were" in render(audit(run.path))
    run.config.write_text(text.replace("rollouts_per_group: 3", "rollouts_per_group: 2"))
    assert "rollout 2: was issued, but its group has 2 rollouts" in render(audit(run.path))
