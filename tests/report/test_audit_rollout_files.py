"""The audit of runs whose rollout files were changed, damaged or lost."""

from dataclasses import replace

import pyarrow as pa
import pytest
from damaged_run import FAR, edit_ledger, edit_rollouts, names, take, words, write_rollouts
from played_run import play

from prl.report.audit import audit, render
from prl.streams import rollouts
from prl.streams.contract import GroupFacts, Published
from prl.streams.files import list_published, open_arrow, read_checked
from prl.streams.folder import FolderSource, rollout_files
from prl.streams.ledger import ledger_events, read_ledger
from prl.streams.reader import read_rollouts


def test_one_row_deleted_from_a_rollout_file(run):
    rollout = edit_rollouts(run, lambda batch: take(batch, [n for n in range(batch.num_rows) if n != 1]))
    assert names(run, rollout)
    assert "lies in no rollout file, but issued, trained in step" in render(audit(run.path))


@pytest.mark.parametrize("kind", ["discarded", "issued_again"])
def test_one_row_of_a_rollout_that_was_not_trained_deleted_from_a_rollout_file(tmp_path, kind):
    """Groups are published whole, unless partial ones are trained."""
    run = play(tmp_path / "run", [80])  # with groups that had been published when it crashed, and were issued again
    rollout = edit_rollouts(run, lambda batch: take(batch, [n for n in range(batch.num_rows) if n != 1]), kind)
    (found,) = audit(run.path).named
    assert found["what"] == words(rollout)
    assert found["wrong"].startswith("lies in no rollout file, others of its group do; it was issued, ")
    for config in (run.config, *map(run.attempt_config, run.attempts())):
        config.write_text(config.read_text().replace("min_rollouts_per_group: null", "min_rollouts_per_group: 2"))
    assert audit(run.path).passed


def test_one_row_doubled_in_a_rollout_file(run):
    rollout = edit_rollouts(run, lambda batch: take(batch, [0, 1, *range(1, batch.num_rows)]))
    assert names(run, rollout)
    assert "lies in rollout files more than once: streams/rollouts/" in render(audit(run.path))


def test_one_row_renumbered_in_a_rollout_file(run):
    def edit(batch):
        numbers = batch.column("rollout").to_numpy().copy()
        numbers[1] += FAR
        at = rollouts.SCHEMA.names.index("rollout")
        return pa.record_batch([*batch.columns[:at], pa.array(numbers), *batch.columns[at + 1 :]], schema=batch.schema)

    rollout = edit_rollouts(run, edit)
    assert names(run, rollout)
    assert names(run, replace(rollout, rollout=rollout.rollout + FAR))


def test_another_version_in_a_rollout_file(run):
    """The lags that the step file has are not those of this version."""

    def edit(batch):
        at = rollouts.SCHEMA.names.index("versions")
        spans = batch.column("versions").to_pylist()
        spans[1][0]["step"] += 1
        column = pa.array(spans, rollouts.SCHEMA.field("versions").type)
        return pa.record_batch([*batch.columns[:at], column, *batch.columns[at + 1 :]], schema=batch.schema)

    rollout = edit_rollouts(run, edit)
    assert f"{words(rollout)}: its lags in step" in render(audit(run.path))


def test_a_missing_rollout_file(run):
    _, file = list_published(run.rollouts / "actor-0")[1]
    file.path.unlink()
    assert f"actor-0 file {file.sequence}: missing" in render(audit(run.path))


def test_two_files_of_one_sequence_number(run):
    (_, first), (_, second), *_ = list_published(run.rollouts / "actor-0")
    data = read_checked(first.path, first.bytes, first.checksum)
    opened = open_arrow(first.path, data, rollouts.KIND, rollouts.SCHEMA, None)
    first.path.unlink()
    write_rollouts(run.rollouts / "actor-0", replace(opened.header, sequence=second.sequence), opened.batches[0])
    assert f"actor-0 file {second.sequence}: two files have this sequence number" in render(audit(run.path))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_file_that_was_trained_from_before_it_was_found_damaged(run, recorded):
    """Of its two groups one was trained; the other was read again later, found unreadable, and that is its end."""
    events = list(ledger_events(read_ledger(run.ledgers)))
    kinds = {(e.rollout.group, e.rollout.issue): e.kind for e in events if e.kind != "issued"}
    for file in (file for listed in rollout_files(run).values() for file in listed):
        groups = [(g.group, g.issue) for g in read_rollouts(file.path, file.bytes, file.checksum)]
        if sorted(kinds[pair] for pair in groups) == ["discarded", "trained"]:
            break
    lost = next(pair for pair in groups if kinds[pair] == "discarded")

    def edit(events):
        return [
            replace(e, reason="rollout file unreadable")
            if (e.rollout.group, e.rollout.issue) == lost and e.kind == "discarded"
            else e
            for e in events
        ]

    edit_ledger(run, edit)
    name, writer = file.path.relative_to(run.path).as_posix(), file.path.parent.name
    facts = tuple(GroupFacts(*pair, 3) for pair in groups) if recorded else ()
    FolderSource(run).set_aside(Published(name, writer, file.attempt, file.sequence, file.bytes, file.checksum, facts))
    result = audit(run.path)
    assert result.quarantined_files == 1
    assert result.passed == recorded, render(result)
    if not recorded:
        assert "lies in no rollout file, but issued, trained in step" in render(result)
    for torn in ("[[1", "[5]", "5"):
        next(run.quarantine.glob("*.json")).write_text(torn)
        assert "no record of a file in quarantine" in render(audit(run.path))


def test_another_damaged_file_is_told_beside_one_that_was_set_aside(run):
    """A group of the one was told as unreadable by the run. Nobody has told of the other, from which nothing was trained."""
    events = list(ledger_events(read_ledger(run.ledgers)))
    kinds = {(e.rollout.group, e.rollout.issue): e.kind for e in events if e.kind != "issued"}
    groups = {
        file: [(g.group, g.issue) for g in read_rollouts(file.path, file.bytes, file.checksum)]
        for files in rollout_files(run).values()
        for file in files
    }
    ends = {file: {kinds[pair] for pair in pairs} for file, pairs in groups.items()}
    damaged = next(file for file in groups if "trained" not in ends[file])
    aside = next(file for file in groups if file != damaged and ends[file] > {"trained"})
    pairs = groups[aside]

    def edit(events):
        ends = {"discarded", "issued_again"}
        return [
            replace(e, reason="rollout file unreadable")
            if e.kind in ends and (e.rollout.group, e.rollout.issue) in pairs
            else e
            for e in events
        ]

    edit_ledger(run, edit)
    name, facts = aside.path.relative_to(run.path).as_posix(), tuple(GroupFacts(*pair, 3) for pair in pairs)
    entry = Published(name, aside.path.parent.name, aside.attempt, aside.sequence, aside.bytes, aside.checksum, facts)
    FolderSource(run).set_aside(entry)
    assert audit(run.path).passed, render(audit(run.path))
    damaged.path.write_bytes(bytes(damaged.bytes))
    text = render(audit(run.path))
    assert f"{damaged.path}: checksum" in text
    assert text.endswith("audit: failed, 1 finding")


@pytest.mark.parametrize("column", ["group_id", "turn", "problem_id", "versions", "prompt_ids"])
def test_a_missing_value_in_a_rollout_file_is_a_finding(run, column):
    def edit(batch):
        at = rollouts.SCHEMA.names.index(column)
        values = [None, *batch.column(column).to_pylist()[1:]]
        return pa.record_batch(
            [*batch.columns[:at], pa.array(values, rollouts.SCHEMA.field(column).type), *batch.columns[at + 1 :]],
            schema=batch.schema,
        )

    edit_rollouts(run, edit)
    assert "values are missing" in render(audit(run.path))
