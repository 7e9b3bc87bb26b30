"""A warning that comes before the orchestrator could hear it is not lost."""

import os
import subprocess
import sys

from prl.cluster import claims
from prl.config.load import load, replace
from prl.runfolder.outcome import read_outcome
from prl.runfolder.paths import RunFolder

WARNED_MEANWHILE = """
import os, signal, sys
from prl.orchestrator import agent, resume

def find_start(*arguments, find_start=resume.find_start, **options):
    os.kill(os.getpid(), signal.SIGUSR1)
    return find_start(*arguments, **options)

resume.find_start = find_start
agent.run_node(sys.argv[1])
"""


def test_a_run_that_is_warned_while_its_start_is_looked_for_leaves_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "snapshot_code", lambda *_: None)
    (tmp_path / "c.yaml").write_text(
        "model: {init: random, architecture: qwen2}\ndomains: [{name: digits}]\nverifier: {processes: 0}\n"
    )
    config = replace(load(tmp_path / "c.yaml"), run={"folder": str(tmp_path / "run")})
    run = RunFolder(config.run.folder)
    with claims.undone_on_error(config, run, 1, resume=False):
        program = [sys.executable, "-c", WARNED_MEANWHILE, str(run)]
        environment = {**os.environ, "PRL_RUN": str(run), "PRL_ATTEMPT": "1"}
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert "prl: left: warned by SIGUSR1: the time limit is near" in ended.stderr + ended.stdout
    outcome = read_outcome(run.exit(1))
    assert (outcome.outcome, outcome.reason, outcome.steps) == ("left", "time limit", 0)
