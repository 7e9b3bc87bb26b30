"""A run by its folder: what its job is doing, and its end."""

import json
import os
import pickle
import signal
import subprocess
import sys

import pytest
from stand_ins import stand_in
from submitting import processes_of, wait_for, with_function

from prl.cli import report, submit
from prl.cli.job_end import follow_job
from prl.cluster import claims
from prl.cluster.begin import begin
from prl.cluster.script import submitit_folder
from prl.cluster.submission import reopen
from prl.config.load import load
from prl.config.paths import resolve_paths
from prl.runfolder.outcome import Outcome
from prl.runfolder.paths import RunFolder

HEADER = "JobID|State|ExitCode|Start|End|NodeList"
GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def run(config, monkeypatch):
    """A run whose second attempt is a heterogeneous job."""
    monkeypatch.setattr(claims, "snapshot_code", lambda *_: None)
    loaded = resolve_paths(load("c.yaml"), config)
    folder = RunFolder(loaded.run.folder)
    for attempt in (1, 2):
        with claims.undone_on_error(loaded, folder, attempt, resume=attempt > 1):
            facts = {"kind": "het", "job_id": f"6{attempt + 1}", "nodes": [1, 2], "submitted": 1.0, "host": "login"}
            facts["folder"] = str(submitit_folder(folder, attempt))
            folder.submission(attempt).write_text(json.dumps(facts))
    return folder


def test_the_state_of_each_component_of_a_job_that_waits_or_runs(run, capsys, monkeypatch):
    rows = "63+0|RUNNING|2026-11-29T16:13:27|n1|None\\n63+1|PENDING|2026-11-29T16:21:32||Resources\\n"
    stand_in(run.path, monkeypatch, squeue=f"printf '{rows}'")
    assert submit.main(["--status", "runs/one"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"run {run}, attempt 2, job 63",
        "  train  RUNNING on n1 since 2026-11-29 16:13:27",
        "  sample PENDING (Resources), start estimated for 2026-11-29 16:21:32",
    ]


def test_the_cause_of_the_end_of_a_job_that_has_ended(run, capsys, monkeypatch):
    rows = f"printf '{HEADER}\\n63+0|NODE_FAIL|0:0|None|None|n1\\n63+1|NODE_FAIL|0:0|None|None|n[2-3]\\n'"
    stand_in(run.path, monkeypatch, squeue=GONE, sacct=rows)
    assert submit.main(["--status", "runs/one"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  train  NODE_FAIL on n1",
        "  sample NODE_FAIL on n[2-3]",
        "  it wrote no exit.json: node failure: the first process ended without a word; Slurm says of the job: "
        f"NODE_FAIL on n1, NODE_FAIL on n[2-3]; see {run.logs(2)}",
    ]
    Outcome("failed", "sampler 3 is gone", code=1).write(run.exit(2))
    assert submit.main(["--status", "runs/one", "--follow"]) == 1
    said = capsys.readouterr()
    assert "failed: sampler 3 is gone (exit code 1)" in said.out
    assert "failed: sampler 3 is gone (exit code 1)" in said.err


def test_a_job_that_slurm_starts_again_is_followed_to_the_end_of_its_last_attempt(run, capsys, monkeypatch):
    rows = f"printf '{HEADER}\n63+0|COMPLETED|0:0|None|None|n1\n63+1|COMPLETED|0:0|None|None|n[2-3]\n'"
    stand_in(run.path, monkeypatch, squeue=GONE, sacct=rows)
    first, config = reopen(run, 2), load(run.config)
    Outcome("left", "the time limit is near", code=75, steps=3).write(run.exit(2))
    for attempt in (3, 4):
        run.plan(attempt - 1).write_text("{}")
        assert begin(run, "63")[0] == attempt
    Outcome("done", "all steps are trained", code=0).write(run.exit(4))
    assert follow_job(first, config, lambda: None) == 0
    said = capsys.readouterr()
    assert "attempt 2 left: the time limit is near; job 63 goes on as attempt 3\n" in said.out
    assert "attempt 3 failed: error: the first process ended without a word; " in said.out
    assert "; job 63 goes on as attempt 4\n" in said.out
    assert "done: all steps are trained (exit code 0)\n" in said.out
    assert said.err == ""
    (submitit_folder(run, 2) / "63_0_result.pkl").write_bytes(pickle.dumps(("error", "ValueError: the cause")))
    assert reopen(run, 4).traceback() == "task 0:\nValueError: the cause"  # submitit's files stay where the job began
    run.exit(4).unlink()
    facts = json.loads(run.submission(4).read_text())
    run.submission(4).write_text(json.dumps(facts | {"job_id": "70"}))  # somebody has gone on with the run by another job
    Outcome("failed", "sampler 3 is gone", code=1).write(run.exit(3))
    assert follow_job(first, config, lambda: None) == 1
    assert "failed: sampler 3 is gone (exit code 1)" in capsys.readouterr().err


def test_a_job_is_ended_by_its_leader(run, capsys, monkeypatch):
    rows = "63+0|RUNNING|2026-11-29T16:13:27|n1|None\\n63+1|RUNNING|2026-11-29T16:13:27|n[2-3]|None\\n"
    calls = stand_in(run.path, monkeypatch, squeue=f"printf '{rows}'", scancel=":")
    assert submit.main(["--cancel", "runs/one"]) == 0
    assert calls.read_text().splitlines()[1:] == ["scancel 63"]
    assert capsys.readouterr().out.startswith("job 63, attempt 2, is cancelled; see prl-submit --status")
    stand_in(run.path, monkeypatch, squeue=GONE, sacct=f"echo '{HEADER}'")
    assert submit.main(["--cancel", "runs/one"]) == 0
    assert capsys.readouterr().out.startswith("job 63 has ended: it wrote no exit.json")
    assert calls.read_text().count("scancel") == 1


def test_a_run_on_this_machine_is_seen_and_ended_by_its_folder(config, capsys):
    process = with_function("wait_for_term", "c.yaml", "--set", "control.stop_s=20", start_new_session=True)
    run = config / "runs/one"
    wait_for(run / "started", process)
    job = json.loads((run / "attempt_001/submission.json").read_text())["job_id"]
    assert submit.main(["--status", "runs/one"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"  runs here, process {job}"]
    assert submit.main(["--status", "runs/one", "--follow"]) == 2
    assert "a run without Slurm is followed where it was started" in capsys.readouterr().err
    assert submit.main(["--cancel", "runs/one"]) == 0
    assert capsys.readouterr().out.startswith("attempt 1: ")
    assert (run / "ended in order").exists()
    assert processes_of(run) == []
    process.communicate(timeout=60)
    assert submit.main(["--cancel", "runs/one"]) == 0
    assert capsys.readouterr().out == "attempt 1: nothing of it runs here\n"


def test_what_cannot_be_seen_or_ended_from_here_is_told(run, capsys):
    facts = {"kind": "local", "job_id": "63", "nodes": [1], "submitted": 1.0, "host": "elsewhere", "folder": ""}
    run.submission(2).write_text(json.dumps(facts))
    assert submit.main(["--cancel", "runs/one"]) == 2
    assert "the run was started on elsewhere without Slurm; end it there" in capsys.readouterr().err
    run.exit(2).write_text('{"outcome": ')
    assert submit.main(["--status", "runs/one"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"run {run}, attempt 2, process 63 on elsewhere"
    assert told[1].startswith(f"  {run.exit(2)}: cannot be read, and does not say how the attempt ended: ")
    assert told[1].endswith(f"; restore it, or remove it: the attempt then counts as one that was killed; see {run.logs(2)}")
    run.exit(2).unlink()
    assert submit.main(["--status", "runs/none"]) == 2
    assert "runs/none: no run lies there" in capsys.readouterr().err
    assert submit.main(["--status", "runs/one/attempt_001"]) == 2
    assert f"is one attempt of a run, and a run folder is wanted: {run}" in capsys.readouterr().err
    run.submission(2).unlink()
    assert submit.main(["--cancel", "runs/one"]) == 2
    told = capsys.readouterr().err
    assert f"{run.submission(2)}: no record of a submission: prl-submit is still sending attempt 2, or was killed" in told
    assert f"prl-submit --resume {run}, which looks for what may still run" in told


def test_ctrl_c_while_a_job_is_followed_leaves_it_running(run, monkeypatch):
    rows = "63+0|RUNNING|2026-11-29T16:13:27|n1|None\\n63+1|RUNNING|2026-11-29T16:13:27|n[2-3]|None\\n"
    calls = stand_in(run.path, monkeypatch, squeue=f"printf '{rows}'", scancel=":")
    program = [sys.executable, "-m", "prl.cli.submit", "--status", "runs/one", "--follow"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ.copy())
    lines = [process.stdout.readline() for _ in range(4)]
    assert lines[-1].startswith("step 0/20")
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert "Ctrl-C: the job goes on" in out
    assert f"prl-submit --cancel {run}" in out
    assert "scancel" not in calls.read_text()


@pytest.mark.parametrize("argument", ["--resume", "--status", "--cancel", "--replay"])
def test_no_run_is_named_by_an_empty_text_even_in_a_runs_folder(run, capsys, monkeypatch, argument):
    monkeypatch.chdir(run.path)
    assert submit.main([argument, "", *(["../../c.yaml"] if argument == "--replay" else [])]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert (
        said.err
        == f"prl-submit: error: {argument} '': no run folder is named; where a variable was to name it, that one is not set\n"
    )


def test_no_report_of_a_run_that_an_empty_text_names(run, capsys, monkeypatch):
    monkeypatch.chdir(run.path)
    assert report.main([""]) == 1
    assert capsys.readouterr().err.startswith("prl-report: error: prl-report '': no run folder is named")
