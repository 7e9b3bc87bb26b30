"""run.share: who may do what in a run folder that is not theirs."""

import os
import stat

import pytest
from submitting import checkpoint, wait_for, with_function
from unprivileged import unprivileged

from prl.cli import report, submit
from prl.flow.events import LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.metrics.events import MetricsWriter
from prl.runfolder.outcome import Outcome
from prl.runfolder.paths import RunFolder
from prl.runfolder.sharing import file_modes
from prl.streams.ledger import LedgerWriter

SHARE = ["--set", "run.share=group"]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def shared(config):
    """A run of a user whose umask lets nobody in, with what its processes leave."""
    process = with_function("tell", "c.yaml", *SHARE, umask=0o077)
    assert process.wait(60) in (0, 1), process.communicate()[0]
    run = RunFolder(config / "runs/one")
    with file_modes("group"):
        Outcome("done", "all steps are trained", code=0).write(run.exit(1))
        with MetricsWriter(run.metrics, "agent", 0, 1) as writer:
            writer.write({"usage/cpu_s": 1.0}, kind="usage", labels={"process": "agent", "role": "agent"})
        ledger = LedgerWriter(run.ledger(1))
        ledger.append([LedgerEvent(RolloutId(0, "digits/0", 1, 0, 0), "issued", Version(0, 0), -1, "")])
        ledger.close()
    return run


def test_a_shared_run_lets_its_group_in_and_nobody_else(shared):
    assert (mode(shared.path) & 0o777, mode(shared.control), mode(shared.token)) == (0o750, 0o3770, 0o600)
    closed = [path for path in shared.path.rglob("*") if not mode(path) & 0o040]
    assert closed == [shared.token]
    written = [path for path in shared.path.rglob("*") if shared.code not in path.parents and not path.is_symlink()]
    assert [path for path in written if mode(path) & 0o007] == []
    assert [path for path in written if mode(path) & 0o020] == [shared.control]


def test_any_other_run_is_its_owners_alone(config):
    process = with_function("tell", "c.yaml")
    assert process.wait(60) in (0, 1), process.communicate()[0]
    run = RunFolder(config / "runs/one")
    assert (mode(run.path) & 0o777, mode(run.token)) == (0o700, 0o600)


def test_who_may_look_in_is_fixed_when_a_run_begins(shared, capsys):
    assert submit.main(["--resume", str(shared), "--set", "run.share=owner"]) == 2
    assert "no finished checkpoint" in capsys.readouterr().err
    shared.checkpoint(5).mkdir()
    checkpoint(shared.path, 5)
    assert submit.main(["--resume", str(shared), "--set", "run.share=owner"]) == 2
    assert "run.share cannot be changed in a run that has begun" in capsys.readouterr().err


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@needs_root
def test_a_colleague_reads_the_report_and_asks_for_save_and_stop_and_no_more(shared, tmp_path, capsys):
    with unprivileged(tmp_path):
        assert report.main([str(shared)]) == 0
        assert "all steps are trained" in capsys.readouterr().out
        assert report.main([str(shared), "--json"]) == 0
        shared.save.touch()
        shared.stop.touch()
        shared.save.unlink()  # changes its mind
        for forbidden in (
            shared.token.read_text,
            shared.token.unlink,
            lambda: shared.token.rename(shared.control / "other"),
            shared.config.unlink,
            lambda: shared.config.write_text("run: {steps: 1}"),
            (shared.path / "new").touch,
            (shared.attempt(1) / "new").touch,
            shared.control.rmdir,
            lambda: shared.control.chmod(0o777),
        ):
            with pytest.raises(PermissionError):
                forbidden()
    assert shared.stop.exists()
    assert shared.stop.stat().st_gid == shared.path.stat().st_gid


@needs_root
def test_a_stranger_sees_nothing(shared, tmp_path):
    with unprivileged(tmp_path, stranger=True):
        for forbidden in (lambda: os.listdir(shared.path), shared.stop.touch, shared.config.read_text):
            with pytest.raises(PermissionError):
                forbidden()
        assert report.main([str(shared)]) == 1


@needs_root
def test_the_group_is_that_which_the_folder_above_hands_on(config):
    other = 65533
    (config / "runs").mkdir()
    os.chown(config / "runs", -1, other)
    (config / "runs").chmod(0o2770)
    process = with_function("tell", "c.yaml", *SHARE, umask=0o077)
    assert process.wait(60) in (0, 1), process.communicate()[0]
    run = RunFolder(config / "runs/one")
    assert {path.lstat().st_gid for path in (run.path, *run.path.rglob("*"))} == {other}


@pytest.mark.slurm
def test_what_a_slurm_job_writes_can_be_read_by_the_group(config):
    process = with_function("wait_for_term", "c.yaml", "--nodes", "3", *SHARE, "cluster.time_min=2", umask=0o077)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    run = RunFolder(config / "runs/one")
    wait_for(run.path / "started")
    assert submit.main(["--cancel", str(run)]) == 0
    assert run.batch_log(1).exists()
    assert list((run.attempt(1) / "submitit").glob("*_log.out"))
    assert [path for path in run.path.rglob("*") if not mode(path) & 0o040] == [run.token]
