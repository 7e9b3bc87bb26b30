"""What is deleted behind a checkpoint, and what never is; runs from which files were deleted go on, and pass the audit."""

import importlib
import json
import shutil

import pytest
from played_run import Attempt, Crash, new_run, trained_sequence

from prl.orchestrator.reclaim import Reclaimer
from prl.orchestrator.resume import find_start
from prl.report import audit_files
from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder
from prl.runfolder.reclaim import Reclaimed, read_reclaimed, record_reclaimed
from prl.streams.contract import GroupFacts, Published
from prl.streams.files import Header, StreamFile, list_published, publish_arrow
from prl.streams.folder import FolderSource
from prl.streams.ledger import ledger_events, read_ledger
from prl.streams.reader import read_rollouts
from prl.streams.records import Group
from prl.streams.rollouts import to_arrow
from prl.streams.steps import find_steps


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """A run that died behind its checkpoint of step 3."""
    run, settings = new_run(tmp_path_factory.mktemp("crashed") / "run")
    with pytest.raises(Crash):
        Attempt(run, settings, seed=0, crash_at=70).play()
    assert [step for step, _ in run.manifests()] == [3]
    return run, settings


@pytest.fixture
def run(crashed, tmp_path):
    shutil.copytree(crashed[0].path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def state_of(run: RunFolder) -> dict:
    return json.loads(run.manifests()[-1][1].read_text())["dispatcher"]


def rollout_files(run: RunFolder) -> dict[str, set[tuple[int, int]]]:
    """Path to its groups."""
    files = [file for writer in run.rollouts.iterdir() for _, file in list_published(writer)]
    return {
        file.path.relative_to(run.path).as_posix(): {
            (group.group, group.issue) for group in read_rollouts(file.path, file.bytes, file.checksum)
        }
        for file in files
    }


def read_all(file: StreamFile) -> list[Group]:
    return read_rollouts(file.path, file.bytes, file.checksum)


def ended_by(run: RunFolder, rows: int) -> set[tuple[int, int]]:
    """(group, issue) of what had come to its end in the first rows of the ledger."""
    issued, ended = set(), set()
    for event in list(ledger_events(read_ledger(run.ledgers)))[:rows]:
        (issued if event.kind == "issued" else ended).add(event.rollout)
    alive = {(rollout.group, rollout.issue) for rollout in issued - ended}
    return {(rollout.group, rollout.issue) for rollout in issued} - alive


def test_what_the_checkpoint_needs_stays_and_the_rest_goes(run):
    before, steps = rollout_files(run), find_steps(run.steps)
    ended = ended_by(run, state_of(run)["events"])
    assert any(group not in ended for groups in before.values() for group in groups if group[0] >= state_of(run)["next_group"])
    last = {max(p for p in before if p.startswith(f"streams/rollouts/{w.name}/")) for w in run.rollouts.iterdir()}
    reclaimer = Reclaimer(run, "played", attempt=2)
    reclaimer.reclaim(3, state_of(run))

    assert set(find_steps(run.steps)) == {step for step in steps if step > 3}
    needed = {path for path, groups in before.items() if groups - ended} | last
    assert set(rollout_files(run)) == needed
    gone = set(before) - needed
    assert gone
    assert reclaimer.files == len(gone) + 3
    assert reclaimer.metrics()["streams/reclaim_failures"] == 0
    assert {file.path for file in read_reclaimed(run)} == gone | {
        steps[step].path.relative_to(run.path).as_posix() for step in (1, 2, 3)
    }
    assert sum(file.bytes for file in read_reclaimed(run)) == reclaimer.bytes
    result = audit(run.path)
    assert result.passed, render(result)
    assert result.reclaimed_files == reclaimer.files
    reclaimer.reclaim(3, state_of(run))
    assert reclaimer.files == len(gone) + 3


def test_the_run_goes_on_as_if_nothing_had_been_deleted(run, crashed):
    original, settings = crashed
    wanted = RunFolder(run.path.with_name("whole"))
    shutil.copytree(original.path, wanted.path)
    Attempt(wanted, settings, seed=5).play()
    Reclaimer(run, "played", attempt=2).reclaim(3, state_of(run))
    assert [entry.file["step"] for entry in find_start(run, settings).waiting] == [
        entry.file["step"] for entry in find_start(original, settings).waiting
    ]
    Attempt(run, settings, seed=5).play()
    assert trained_sequence(run) == trained_sequence(wanted)
    result = audit(run.path)
    assert result.passed, render(result)
    sequences = [file.sequence for _, file in list_published(run.rollouts / "actor-0")]
    assert len(set(sequences)) == len(sequences)


def test_this_attempts_files_go_only_once_they_were_announced(run):
    names = set(rollout_files(run))
    reclaimer = Reclaimer(run, "played", attempt=1)
    reclaimer.reclaim(3, {"groups": {}, "next_group": 10**6})
    assert set(rollout_files(run)) == names
    first = min(names)
    groups = [{"group": group, "issue": issue, "rollouts": 3} for group, issue in rollout_files(run)[first]]
    reclaimer.announced({"path": first, "groups": groups})
    reclaimer.reclaim(3, {"groups": {}, "next_group": 10**6})
    assert set(rollout_files(run)) == names - {first}


def test_what_cannot_be_deleted_is_counted_and_ends_nothing(run):
    file = find_steps(run.steps)[1]
    file.path.unlink()
    file.path.mkdir()
    reclaimer = Reclaimer(run, "played", attempt=2)
    reclaimer.reclaim(3, state_of(run))
    assert reclaimer.failures == 1
    assert reclaimer.files


def test_a_record_that_cannot_be_written_deletes_nothing(run):
    names = set(rollout_files(run))
    run.reclaimed.mkdir()
    reclaimer = Reclaimer(run, "played", attempt=2)
    reclaimer.reclaim(3, state_of(run))
    assert (reclaimer.failures, reclaimer.files) == (1, 0)
    assert set(rollout_files(run)) == names


def test_a_file_that_was_lost_is_told_from_one_that_was_deleted(run):
    Reclaimer(run, "played", attempt=2).reclaim(3, state_of(run))
    lines = run.reclaimed.read_text().splitlines(keepends=True)
    step = next(line for line in lines if '"step": 2' in line)
    run.reclaimed.write_text("".join(line for line in lines if line != step))
    assert "step 2: its file is not there" in render(audit(run.path))
    run.reclaimed.write_text("".join(line for line in lines if '"kind": "step"' in line))
    text = render(audit(run.path))
    assert "missing: neither there nor in quarantine nor deleted on purpose" in text
    assert "lies in no rollout file" in text


def test_a_torn_line_of_the_record_spoils_no_other(tmp_path):
    run = RunFolder(tmp_path)
    run.create()
    first, second = Reclaimed("step", "a", 1, "00000000", step=1), Reclaimed("rollouts", "b", 2, "00000001", ((3, 0),))
    record_reclaimed(run, [first])
    with run.reclaimed.open("a") as record:
        record.write('{"kind": "st')
    record_reclaimed(run, [second])
    assert read_reclaimed(run) == [first, second]
    sound = run.reclaimed.read_text().splitlines()[-1]
    changes = ('"bytes": 2', '"bytes": Infinity'), ('"b"', "[]"), ("[3, 0]", f"[{10**30}, 0]"), ('"rollouts"', '"steps"')
    for damaged in ('{"kind": "step"}', "[" * 100_000, *(sound.replace(*change) for change in changes)):
        run.reclaimed.write_text(f"{damaged}\n")
        with pytest.raises(ValueError, match="no record of a deleted file"):
            read_reclaimed(run)


@pytest.mark.parametrize("listing", ["audit.read_ledger", "audit_files.rollout_files", "audit.all_steps"])
def test_what_a_run_deletes_while_it_is_audited_is_no_finding(run, monkeypatch, listing):
    module, _, name = listing.partition(".")
    module = importlib.import_module(f"prl.report.{module}")
    look, reclaimer = getattr(module, name), Reclaimer(run, "played", attempt=2)

    def then_delete(*arguments):
        found = look(*arguments)
        reclaimer.reclaim(3, state_of(run))
        return found

    monkeypatch.setattr(module, name, then_delete)
    result = audit(run.path)
    assert reclaimer.files
    assert result.passed, render(result)
    assert not result.passed_over
    assert result.reclaimed_files == reclaimer.files


def test_what_a_run_sets_aside_while_it_is_audited_is_no_damage(run, monkeypatch):
    look = audit_files.rollout_files

    def then_set_aside(*arguments):
        found = look(*arguments)
        file = found["actor-0"][0]
        groups = tuple(GroupFacts(g.group, g.issue, len(g.rollouts)) for g in read_all(file))
        name = file.path.relative_to(run.path).as_posix()
        entry = Published(name, "actor-0", file.attempt, file.sequence, file.bytes, file.checksum, groups)
        FolderSource(run).set_aside(entry)
        return found

    monkeypatch.setattr(audit_files, "rollout_files", then_set_aside)
    result = audit(run.path)
    assert result.passed, render(result)
    assert result.quarantined_files == 1


@pytest.mark.parametrize("record", ["[[Infinity, 0]]", f"[[{10**30}, 0]]", "[[1.5, 0]]", '"ab"', "[[1]]"])
def test_a_damaged_record_of_what_was_set_aside_is_a_finding(run, record):
    run.quarantine.mkdir()
    (run.quarantine / "actor-0_some.arrow").touch()
    (run.quarantine / "actor-0_some.arrow.json").write_text(record)
    assert "actor-0_some.arrow.json: no record of a file in quarantine" in render(audit(run.path))


def test_a_damaged_file_of_an_earlier_attempt_stays_and_stops_nothing_else(run):
    whole = RunFolder(run.path.with_name("whole"))
    shutil.copytree(run.path, whole.path)
    Reclaimer(whole, "played", attempt=2).reclaim(3, state_of(run))
    gone = set(rollout_files(run)) - set(rollout_files(whole))
    damaged = min(gone)
    (run.path / damaged).write_bytes(b"hello")
    reclaimer = Reclaimer(run, "played", attempt=2)
    for _ in range(2):  # it is looked into once
        reclaimer.reclaim(3, state_of(run))
        assert (reclaimer.failures, reclaimer.files) == (1, len(gone) - 1 + 3)
    assert (run.path / damaged).exists()
    assert {path for path in gone if not (run.path / path).exists()} == gone - {damaged}


def test_another_runs_file_is_none_to_delete(run):
    """Its groups have the numbers of groups of this run: in the record, it would excuse that a file of theirs is lost."""
    ended = ended_by(run, state_of(run)["events"])
    files = (file for writer in run.rollouts.iterdir() for _, file in list_published(writer))
    groups = [group for file in files for group in read_all(file) if (group.group, group.issue) in ended]
    foreign = run.rollouts / "actor-9"
    foreign.mkdir()
    for sequence in (0, 1):
        header = Header("rollouts", "another", 1, "actor-9", sequence)
        publish_arrow(foreign, "rollouts", header, to_arrow(groups, header))
    reclaimer = Reclaimer(run, "played", attempt=2)
    reclaimer.reclaim(3, state_of(run))
    assert reclaimer.files
    assert reclaimer.failures == 1  # the last file of a folder is not looked into
    assert len(list(foreign.iterdir())) == 2
    assert not any("actor-9" in file.path for file in read_reclaimed(run))
