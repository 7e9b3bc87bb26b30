"""A signal that comes before the orchestrator could hear it is not lost, and Slurm is asked what it is for."""

import os
import subprocess
import sys

import pytest
from stand_ins import stand_in

from prl.cluster import claims
from prl.config.load import load, replace
from prl.runfolder.outcome import read_outcome
from prl.runfolder.paths import RunFolder

SIGNALLED_MEANWHILE = """
import os, signal, sys
from prl.orchestrator import agent, resume

def find_start(*arguments, find_start=resume.find_start, **options):
    os.kill(os.getpid(), signal.Signals[sys.argv[2]])
    return find_start(*arguments, **options)

resume.find_start = find_start
agent.run_node(sys.argv[1])
"""
IN_A_JOB = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "PRL_NODES_0": "n1=127.0.0.1"}
PREEMPTED = "echo JobId=77 JobState=PREEMPTED Reason=None EndTime=2026-11-29T16:11:36"


@pytest.mark.parametrize(
    ("number", "environment", "words", "reason"),
    [
        ("SIGUSR1", {}, "warned by SIGUSR1: the time limit is near", "time limit"),
        ("SIGTERM", IN_A_JOB, "Slurm ends the job with SIGTERM: preempted", "preempted"),
    ],
)
def test_a_run_that_is_signalled_while_its_start_is_looked_for_leaves_at_once(
    tmp_path, monkeypatch, number, environment, words, reason
):
    monkeypatch.setattr(claims, "snapshot_code", lambda *_: None)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    stand_in(tmp_path, monkeypatch, scontrol=PREEMPTED, scancel=":")
    (tmp_path / "c.yaml").write_text(
        "model: {init: random, architecture: qwen2}\ndomains: [{name: digits}]\nverifier: {processes: 0}\n"
    )
    config = replace(load(tmp_path / "c.yaml"), run={"folder": str(tmp_path / "run")})
    run = RunFolder(config.run.folder)
    with claims.undone_on_error(config, run, 1, resume=False):
        program = [sys.executable, "-c", SIGNALLED_MEANWHILE, str(run), number]
        environment = {**os.environ, "PRL_RUN": str(run), "PRL_ATTEMPT": "1", **environment}
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert f"prl: left: {words}" in ended.stderr + ended.stdout
    outcome = read_outcome(run.exit(1))
    assert (outcome.outcome, outcome.reason, outcome.steps) == ("left", reason, 0)
