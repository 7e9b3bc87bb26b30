"""What prl-submit writes for a job that ended without a word, on filesystems that are full, too."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from prl.cli import console
from prl.cli.ending import explain, full_filesystem
from prl.cli.interrupts import Cancelled, Interrupts
from prl.cli.job_end import report_end
from prl.metrics.events import MetricsWriter
from prl.report.read import read_run
from prl.report.summary import summarize
from prl.runfolder.outcome import Outcome, OutcomeError, read_outcome
from prl.runfolder.paths import RunFolder


@pytest.fixture
def job(tmp_path):
    run = RunFolder(tmp_path / "my run")
    run.create()
    run.logs(1).mkdir(parents=True)
    paths = SimpleNamespace(stderr=tmp_path / "never_written.err")
    return SimpleNamespace(
        run=run, attempt=1, submitted=time.time(), kind="het", job_id="9", traceback=lambda: None, state=lambda: "FAILED",
        job=SimpleNamespace(paths=paths),
    )  # fmt: skip


@pytest.mark.parametrize(("code", "outcome"), [(130, "cancelled"), (1, "failed")])
def test_an_end_without_a_word_is_written_once_and_reported(job, code, outcome):
    for attempt, step in ((1, 6), (1, 7), (2, 8)):
        with MetricsWriter(job.run.metrics, "orchestrator", 0, attempt) as metrics:
            metrics.write({}, step, kind="step")
    explain(job, code, "the cause")
    explain(job, 1, "another cause")
    said = json.loads(job.run.exit(1).read_text())
    assert said.pop("started") <= said.pop("ended")
    reason = {"cancelled": "cancelled", "failed": "error"}[outcome]
    assert said == {
        "outcome": outcome, "cause": "the cause", "reason": reason, "next": "stop", "next_words": reason, "role": None,
        "host": None, "code": code, "detail": "", "log_end": "", "steps": 7,
    }  # fmt: skip
    summary = summarize(read_run(job.run.path), time.time())
    assert (summary.outcome, summary.cause, summary.code) == (outcome, "the cause", code)


def test_a_full_filesystem_is_told(tmp_path, monkeypatch):
    assert full_filesystem(tmp_path) == ""
    for free_bytes, free_names in ((0, 100), (2**30, 0)):
        full = SimpleNamespace(f_files=1000, f_favail=free_names, f_bavail=free_bytes // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda _path, full=full: full)
        assert full_filesystem(tmp_path) == f"the filesystem of {tmp_path} is full"


def test_an_exit_file_of_another_kind(job):
    assert read_outcome(job.run.exit(1)) is None
    job.run.exit(1).write_text("[]")
    with pytest.raises(OutcomeError, match="does not say how the attempt ended"):
        read_outcome(job.run.exit(1))


def test_a_batch_script_that_failed_is_quoted(job, capsys):
    """Nobody else knows why there is no first process."""
    job.run.batch_log(1).write_text("Loading cuda\nbatch script: line 12 ended with code 1: false\n")
    assert report_end(job, None) == 1
    said = capsys.readouterr().err
    assert "(job 9 is FAILED): the job ended before its first process began; its batch script said" in said
    assert "\nLoading cuda\nbatch script: line 12 ended with code 1: false\n" in said
    assert "never_written" not in said
    assert "killed" not in said
    assert "go on with" not in said
    summary = summarize(read_run(job.run.path), time.time())
    assert summary.outcome == "failed"
    assert "batch script: line 12 ended with code 1: false" in summary.cause
    job.run.plan(1).write_text('{"lineage": 0, "forks": {}}')  # it began all the same
    assert report_end(job, None) == 1
    assert "the job's first process was killed" in capsys.readouterr().err
    summary = summarize(read_run(job.run.path), time.time())
    assert summary.outcome == "unknown"
    assert "its batch log ends: Loading cuda\nbatch script: line 12 ended with code 1: false" in summary.cause


def test_a_failed_run_says_why_and_how_to_go_on(job, capsys):
    killed = Outcome("failed", "sampler 0 was ended by SIGKILL", role="sampler", code=3)
    assert report_end(job, killed) == 3
    where = f"logs: {job.run.logs(1)}\nrun folder: {job.run}\n"
    assert capsys.readouterr().err == f"failed: sampler 0 was ended by SIGKILL (exit code 3)\n{where}"
    job.run.checkpoint(5).mkdir()
    job.run.manifest(5).touch()
    silent = replace(killed, cause="sampler 0 ended with code 3", log_end="the end of sampler-0.log:\nno\x1b memory")
    assert report_end(job, silent) == 3
    assert capsys.readouterr().err == (
        f"failed: sampler 0 ended with code 3 (exit code 3)\nthe end of sampler-0.log:\nno\\x1b memory\n{where}"
        f"go on with: prl-submit --resume '{job.run}'\n"
    )


def test_a_signal_is_raised_once_and_not_while_held():
    with Interrupts() as interrupts:
        with interrupts.held():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Cancelled, match="SIGTERM"):
            interrupts.check()
        signal.raise_signal(signal.SIGINT)  # the second
        interrupts.heed()
        interrupts.check()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_whose_exception_is_lost_is_raised_by_the_next_check():
    """As in a finaliser: Python says there that it ignores the exception."""
    with Interrupts() as interrupts:
        interrupts.check()
        with contextlib.suppress(Cancelled):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Cancelled, match="SIGTERM"):
            interrupts.check()


def test_a_hang_up_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_control_characters_are_escaped():
    assert console.printable("a\x1b[2J\r\tb\nc ▁é") == "a\\x1b[2J\\r\\tb\nc ▁é"


@pytest.mark.parametrize("command", ["submit", "plan", "report"])
def test_streams_that_are_closed(command, tmp_path):
    program = [sys.executable, "-m", f"prl.cli.{command}", str(tmp_path / "none")]
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        shell = ["sh", "-c", f'"$@" {closed}', "sh", *program]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode in (1, 2)
        assert "Traceback" not in done.stdout + done.stderr
