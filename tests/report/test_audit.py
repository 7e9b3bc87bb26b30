"""The audit of runs that were played with the real dispatcher, ledger, streams and resume; good ones, and ones with one row
deleted, doubled or renumbered, of which it has to name the id."""

import errno
import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from played_run import Attempt, Crash, new_run, play, trained_sequence

from prl.cli.report import main
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.report.audit import audit, render
from prl.report.audit_ids import gaps
from prl.report.read import ReportError
from prl.runfolder.paths import RunFolder
from prl.runfolder.reclaim import move_aside
from prl.streams import rollouts
from prl.streams.contract import GroupFacts, Published
from prl.streams.files import Header, encode_file, list_published, open_arrow, publish_arrow, read_checked
from prl.streams.folder import FolderSource, rollout_files
from prl.streams.ledger import LedgerWriter, ledger_events, read_ledger
from prl.streams.reader import read_rollouts
from prl.streams.steps import find_steps, read_step, write_step

FAR = 40  # added to a number, so that no rollout has it


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Two attempts: the first crashed behind a checkpoint, so that steps were trained again and groups issued again."""
    folder = play(tmp_path_factory.mktemp("good") / "run", [70])
    result = audit(folder.path)
    assert result.passed, render(result)
    assert result.attempts == result.lineages == 2
    assert result.trained_again
    assert sum(result.issued_again.values())
    assert sum(result.discarded.values())
    return folder


@pytest.fixture
def run(good, tmp_path):
    shutil.copytree(good.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def words(rollout: RolloutId) -> str:
    return f"group {rollout.group} issue {rollout.issue} rollout {rollout.rollout}"


def names(run: RunFolder, *ids: RolloutId) -> bool:
    """Whether the audit fails, and names one of these ids."""
    result = audit(run.path)
    return not result.passed and any(f"  {words(i)}: " in render(result) for i in ids)


# --- one row of the ledger ---


def edit_ledger(run: RunFolder, edit) -> None:
    events = edit(list(ledger_events(read_ledger(run.ledgers))))
    shutil.rmtree(run.ledgers)
    with LedgerWriter(run.ledger(1)) as ledger:
        ledger.append(events)


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


# --- one row of a rollout file ---


def edit_rollouts(run: RunFolder, edit) -> RolloutId:
    """Change the table of the first rollout file that holds trained rollouts; the id of its row 1."""
    trained = {e.rollout for e in ledger_events(read_ledger(run.ledgers)) if e.kind == "trained"}
    for writer in sorted(run.rollouts.iterdir()):
        for _, file in list_published(writer):
            data = read_checked(file.path, file.bytes, file.checksum)
            opened = open_arrow(file.path, data, rollouts.KIND, rollouts.SCHEMA, None)
            row = opened.batches[0].slice(1, 1).to_pylist()[0]
            found = RolloutId(row["epoch"], row["problem_id"], row["group_id"], row["rollout"], row["issue"])
            if found in trained:
                file.path.unlink()
                write_rollouts(writer, opened.header, edit(opened.batches[0]))
                return found
    raise AssertionError


def write_rollouts(folder, header: Header, batch: pa.RecordBatch) -> None:
    schema = rollouts.SCHEMA.with_metadata(header.metadata())
    data = encode_file(schema, [pa.record_batch(batch.columns, schema=schema)])
    publish_arrow(folder, rollouts.KIND, header, data)


def take(batch: pa.RecordBatch, rows: list[int]) -> pa.RecordBatch:
    return batch.take(pa.array(rows))


def test_one_row_deleted_from_a_rollout_file(run):
    rollout = edit_rollouts(run, lambda batch: take(batch, [n for n in range(batch.num_rows) if n != 1]))
    assert names(run, rollout)
    assert "lies in no rollout file, but issued, trained in step" in render(audit(run.path))


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


# --- one row of a step file ---


def edit_step(run: RunFolder, step: int, members) -> RolloutId:
    """Rewrite a step's file with other sequences of its first micro-batch, in `members` (number, its new rollout number or
    None), and facts that fit; the id of sequence 1."""
    file = find_steps(run.steps)[step]
    found = read_step(file.path, file.bytes, file.checksum)
    batches = [found.microbatch(n) for n in range(found.facts.microbatches)]
    first, ids = batches[0], batches[0].rollouts
    pieces = [slice(first.boundaries[n], first.boundaries[n + 1]) for n, _ in members]
    arrays = {
        name: np.concatenate([getattr(first, name)[piece] for piece in pieces])
        for name in ("tokens", "positions", "loss_weights", "advantages", "old_logprobs", "lags")
    }
    boundaries = np.cumsum([0, *(piece.stop - piece.start for piece in pieces)]).astype(np.int32)
    new = tuple(ids[n] if number is None else replace(ids[n], rollout=number) for n, number in members)
    batches[0] = replace(first, **arrays, boundaries=boundaries, rollouts=new)
    weights = np.concatenate([batch.loss_weights for batch in batches])
    samples = len({i for batch in batches for i in batch.rollouts})
    facts = replace(found.facts, denominator=float(weights.sum()), trained_tokens=int((weights > 0).sum()), samples=samples)
    file.path.unlink()
    write_step(run.steps, batches, facts, run="played", attempt=file.attempt, sequence=file.sequence)
    return ids[1]


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


# --- whole files ---


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


def test_a_flipped_bit(run):
    for file in (list_published(run.rollouts / "actor-0")[0][1], find_steps(run.steps)[2]):
        data = bytearray(file.path.read_bytes())
        data[len(data) // 2] ^= 4
        file.path.write_bytes(data)
    text = render(audit(run.path))
    assert text.count("checksum") == 2


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


def play_until_crash(folder) -> RunFolder:
    run, settings = new_run(folder)
    with pytest.raises(Crash):
        Attempt(run, settings, seed=0, crash_at=70).play()
    return run


@pytest.mark.parametrize("keep", ["all", "needed"])
def test_every_point_of_interruption_leaves_equal_trained_sequences_and_a_run_that_passes(tmp_path, keep):
    """`order: dispatch`: which rollouts each step trains on depends neither on who is quick, nor on crashes, nor on what is
    deleted behind checkpoints."""
    wanted = trained_sequence(play(tmp_path / "whole"))
    assert [step for step, _ in wanted] == list(range(1, 9))
    interrupted = 0
    for crash_at in range(1, 200, 7):
        run, settings = new_run(tmp_path / f"crash_{crash_at}", keep=keep)
        try:
            Attempt(run, settings, seed=crash_at, crash_at=crash_at).play()
            break
        except Crash:
            pass
        assert audit(run.path).passed
        if not run.manifests():
            continue
        interrupted += 1
        for seed in range(2):  # once more on the way, then to the end
            try:
                Attempt(run, settings, seed=seed, crash_at=25 if seed == 0 else None).play()
                break
            except Crash:
                assert audit(run.path).passed
        result = audit(run.path)
        assert result.passed, render(result)
        assert result.ended == "done"
        assert trained_sequence(run) == wanted
        assert bool(result.reclaimed_files) == (keep == "needed")
    assert interrupted > 4


def test_the_command(run, capsys):
    assert main([str(run.path), "--audit"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("audit: passed")
    find_steps(run.steps)[5].path.unlink()
    assert main([str(run.path), "--audit", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["passed"]
    assert told["named"] == [{"what": "step 5", "wrong": "its file is not there; 6 rollouts were trained in it"}]
    with pytest.raises(ReportError):
        audit(run.path / "model")


@pytest.mark.parametrize("damage", ["", "[]", '{"outcome": "do'])
def test_a_damaged_exit_is_a_finding_beside_the_rest(run, damage):
    whole = audit(run.path)
    run.exit(2).write_text(damage)
    found = audit(run.path)
    (finding,) = found.named
    assert finding["what"] == ""
    assert finding["wrong"].startswith(f"{run.exit(2)}: ")
    assert finding["wrong"].endswith("restore it, or remove it: the attempt then counts as one that was killed")
    assert replace(found, ended=whole.ended, findings=0, named=[]) == whole
    assert "ended: unknown" in render(found)


def test_a_configuration_that_was_cut_short_is_refused_with_its_name(run):
    run.config.write_text(run.config.read_text()[:200])
    with pytest.raises(ReportError, match=f"{run.config}: is cut short"):
        audit(run.path)


def test_a_run_over_redis_says_that_no_rollouts_were_checked(run):
    run.config.write_text(run.config.read_text().replace("backend: folder", "backend: redis"))
    shutil.rmtree(run.rollouts)
    result = audit(run.path)
    assert result.passed
    assert "not checked: rollouts, which went through Redis and are not kept" in render(result)


def test_foreign_names_are_told_and_take_no_memory(run):
    actor = run.rollouts / "actor-0"
    last = max(file.sequence for _, file in list_published(actor))
    for folder, stem in ((actor, f"rollouts_a001_{10**20}"), (run.steps, f"step_{10**20}_a001_00000001")):
        (folder / f"{stem}_5_{'0' * 16}.arrow").write_bytes(b"hello")
    (run.rollouts / "loop").symlink_to("loop")
    result = audit(run.path)
    assert result.passed, render(result)
    (actor / f"rollouts_a001_{10**13}_5_{'0' * 16}.arrow").write_bytes(b"hello")
    text = render(audit(run.path))
    assert f"actor-0 files {last + 1} to {10**13 - 1}: missing: neither there nor in quarantine" in text


def test_files_that_the_system_does_not_give_are_findings(run, monkeypatch):
    def refused(*arguments, **named):
        raise PermissionError(errno.EACCES, "Permission denied", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr("prl.report.audit_files.read_checked", refused)
        assert "[Errno 13] Permission denied: 'somewhere'" in render(audit(run.path))
    monkeypatch.setattr("prl.report.audit_files.rollout_files", refused)
    assert "the rollout files cannot be listed: [Errno 13]" in render(audit(run.path))


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


def test_gaps():
    assert gaps(np.array([7, 3, 0, 1, 3])) == [(2, 2), (4, 6)]
    assert gaps(np.array([-5, 0, 3, 10**15]), 1) == [(1, 2), (4, 10**15 - 1)]
    assert gaps(np.array([], np.int64)) == gaps(np.array([0])) == []


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
