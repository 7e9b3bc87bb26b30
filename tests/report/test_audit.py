"""The audit of runs that were played with the real dispatcher, ledger, streams and resume, as a whole."""

import errno
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from played_run import Attempt, Crash, new_run, play, trained_sequence

from prl.cli.report import main
from prl.report.audit import audit, render
from prl.report.audit_ids import gaps
from prl.report.read import ReportError
from prl.streams.files import list_published
from prl.streams.steps import find_steps


def test_a_flipped_bit(run):
    for file in (list_published(run.rollouts / "actor-0")[0][1], find_steps(run.steps)[2]):
        data = bytearray(file.path.read_bytes())
        data[len(data) // 2] ^= 4
        file.path.write_bytes(data)
    text = render(audit(run.path))
    assert text.count("checksum") == 2


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
    run.config.write_text("".join(run.config.read_text().splitlines(keepends=True)[:20]))
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


def test_gaps():
    assert gaps(np.array([7, 3, 0, 1, 3])) == [(2, 2), (4, 6)]
    assert gaps(np.array([-5, 0, 3, 10**15]), 1) == [(1, 2), (4, 10**15 - 1)]
    assert gaps(np.array([], np.int64)) == gaps(np.array([0])) == []
