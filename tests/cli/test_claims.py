"""One attempt at a time: who claims it, who is told that another has, and when a resume is refused since a run goes on."""

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from prl.cli import report, submit
from prl.cluster import claims
from prl.cluster.claims import SubmissionError, check_not_running, next_attempt, undone_on_error
from prl.config.load import ConfigError, load, replace
from prl.config.schema import Config
from prl.control.token import read_token
from prl.orchestrator.replay import replay_problems
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import StorageFull


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose first attempt has ended."""
    monkeypatch.setattr(claims, "snapshot_code", lambda *_: None)
    config, folder = of(tmp_path)
    with undone_on_error(config, folder, 1, resume=False):
        submitted(folder, 1)
    folder.exit(1).write_text("{}")
    return config, folder


def of(tmp_path):
    model = {"init": "random", "architecture": "qwen2"}
    config = replace(Config(), run={"name": "one", "folder": str(tmp_path / "runs/one")}, model=model)
    return config, RunFolder(config.run.folder)


def submitted(folder, attempt, host=None):
    facts = {"kind": "local", "job_id": "1", "nodes": [1], "submitted": 0.0, "host": host or os.uname().nodename, "folder": ""}
    (folder.attempt(attempt) / "submission.json").write_text(json.dumps(facts))


def test_of_two_resumes_in_one_moment_one_is_told_that_the_attempt_is_taken(run):
    config, folder = run
    numbers = []
    for _ in range(2):  # both look before either claims
        numbers.append(next_attempt(folder))
        check_not_running(folder)
    assert numbers == [2, 2]
    with undone_on_error(config, folder, 2, resume=True):
        other = replace(config, run={"steps": 7})
        claim = undone_on_error(other, folder, 2, resume=True)
        with pytest.raises(SubmissionError, match="another prl-submit has just begun attempt 2"):
            claim.__enter__()
        with pytest.raises(ConfigError, match=f"attempt 2 is being submitted by another prl-submit .process {os.getpid()}"):
            check_not_running(folder)  # a third one comes later
    assert folder.attempts() == [1, 2]
    assert "steps: 7\n" not in folder.config.read_text()
    assert folder.latest.readlink() == Path("attempt_002")


def test_a_failed_submission_removes_its_own_attempt_alone(run):
    config, folder = run
    folder.attempt(3).mkdir()
    with pytest.raises(ValueError, match="no"), undone_on_error(config, folder, 2, resume=True):
        raise ValueError("no")
    assert folder.attempts() == [1, 3]


def test_a_resume_makes_a_token_where_there_is_none(run):
    config, folder = run
    before = read_token(folder.token)
    with undone_on_error(config, folder, 2, resume=True):
        assert read_token(folder.token) == before
    folder.token.unlink()
    with undone_on_error(config, folder, 3, resume=True):
        assert read_token(folder.token) != before
        assert folder.token.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kib", [4, 8, 12, 16])
def test_a_full_filesystem_is_named_and_nothing_is_left_there(tmp_path, kib):
    """A real one, whose room ends at one or the other of the first files; where root may mount it."""
    (tmp_path / "runs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", tmp_path / "runs"]
    if subprocess.run(mount, check=False, capture_output=True, timeout=30).returncode:
        pytest.skip("needs the right to mount a filesystem")
    try:
        config, folder = of(tmp_path)
        with pytest.raises(StorageFull, match=r"no space is left") as full, undone_on_error(config, folder, 1, resume=False):
            pass
        assert str(full.value.filename).startswith(str(folder))
        assert os.listdir(tmp_path / "runs") == []
    finally:
        subprocess.run(["umount", tmp_path / "runs"], check=True, timeout=30)


def test_of_two_submissions_of_a_new_run_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "snapshot_code", lambda *_: time.sleep(0.05))
    for made_before in (False, True):
        config, folder = of(tmp_path / str(made_before))
        if made_before:
            folder.path.mkdir(parents=True)
        told, claimed, both = [], [], threading.Barrier(2)

        def begin(config=config, folder=folder, told=told, claimed=claimed, both=both):
            both.wait()
            try:
                with undone_on_error(config, folder, 1, resume=False):
                    claimed.append(1)
            except SubmissionError as error:
                told.append(str(error))

        threads = [threading.Thread(target=begin) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert (claimed, folder.attempts()) == ([1], [1])
        (words,) = told
        assert words.startswith(f"{folder}: another prl-submit has just begun a run there; choose another run.folder")


def test_a_claim_whose_command_was_killed_is_no_obstacle_but_one_that_may_have_sent_a_job_is(run):
    _, folder = run
    folder.attempt(2).mkdir()
    with pytest.raises(ConfigError, match="where that was killed remove"):
        check_not_running(folder)
    folder.submitting(2).write_text(json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "created": 1.0}))
    check_not_running(folder)
    folder.submitting(2).write_text(json.dumps({"host": "elsewhere", "pid": 1, "created": 1.0}))
    with pytest.raises(ConfigError, match="process 1 on elsewhere"):
        check_not_running(folder)
    (folder.attempt(2) / "submission.sh").touch()
    with pytest.raises(ConfigError, match="squeue --me"):
        check_not_running(folder)


def test_a_run_on_another_machine_is_taken_for_running_until_somebody_says_otherwise(run):
    _, folder = run
    folder.attempt(2).mkdir()
    submitted(folder, 2, host="elsewhere")
    metrics = folder.metrics / "agent-0.jsonl"
    metrics.touch()
    for gone in (False, True):
        with pytest.raises(
            ConfigError, match=r"was started on elsewhere .* wrote metrics . s ago, so that it still runs there"
        ):
            check_not_running(folder, host_is_gone=gone)
    os.utime(metrics, (1.0, 1.0))
    with pytest.raises(ConfigError, match=f"from here .{socket.gethostname()}. nobody can see .* add --host-is-gone"):
        check_not_running(folder)
    check_not_running(folder, host_is_gone=True)
    folder.exit(2).write_text("{}")
    check_not_running(folder)


def test_a_run_that_goes_on_is_told_before_its_missing_checkpoint(run, capsys):
    _, folder = run
    folder.attempt(2).mkdir()
    submitted(folder, 2, host="elsewhere")
    (folder.metrics / "agent-0.jsonl").touch()
    assert submit.main(["--resume", str(folder)]) == 2
    assert "still runs there" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["latest", "attempt_001", "latest/"])
def test_who_is_given_an_attempts_folder_names_the_run(run, capsys, part):
    _, folder = run
    wanted = "is one attempt of a run, and a run folder is wanted"
    assert submit.main(["--resume", f"{folder}/{part}"]) == 2
    assert f"{wanted}: --resume {folder}\n" in capsys.readouterr().err
    for options in ([], ["--json"], ["--audit"]):
        assert report.main([f"{folder}/{part}", *options]) == 1
        assert f"{wanted}: prl-report {folder}\n" in capsys.readouterr().err
    assert list(replay_problems(load(folder.config, [f"run.replay={folder}/{part}"]))) == [
        f"run.replay = {RunFolder(f'{folder}/{part}')}: {wanted}: {folder}"
    ]
