"""A local job does not outlive the command that submitted it, not even when that is killed without a word."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CONFIG = """
run: {name: one, steps: 20}
model: {init: random, architecture: qwen2}
domains: [{name: digits}]
sample: {dtype: float32, max_model_len: 64, kv_cache_mib: 64}
actor: {max_tokens: 5}
verifier: {processes: 0}
control: {stop_s: 4}
"""
TESTS = Path(__file__).parents[1]


@pytest.fixture
def submit(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)

    def start(*program):
        arguments = [sys.executable, *program, "c.yaml"]
        return subprocess.Popen(arguments, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL)

    return start


def processes_of(run):
    found = []
    for process in psutil.process_iter():
        try:
            found += [process] if process.environ().get("PRL_RUN") == str(run) else []
        except psutil.Error:
            continue
    return found


def wait_for(condition, limit_s=40.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("function", "in_order"), [("wait_for_term", True), ("ignore_term", False)])
def test_a_killed_submission_ends_its_job(submit, tmp_path, function, in_order):
    run = tmp_path / "runs/one"
    process = submit(str(TESTS / "cli/run_submit.py"), function)
    wait_for((run / "started").exists)
    process.kill()
    process.wait(10)
    wait_for(lambda: not processes_of(run), 15)  # control.stop_s and a little more
    assert (run / "ended in order").exists() == in_order


@pytest.mark.parametrize("seen", ["code", "attempt_001/submission.json", "metrics/submit-0.jsonl"])
def test_a_submission_that_is_killed_while_its_job_starts_leaves_nothing_running(submit, tmp_path, seen):
    run = tmp_path / "runs/one"
    process = submit("-m", "prl.cli.submit")
    wait_for((run / seen).exists)
    process.kill()
    process.wait(10)
    wait_for(lambda: not processes_of(run), 15)
    exit_file = run / "attempt_001/exit.json"
    assert not exit_file.exists() or json.loads(exit_file.read_text())["outcome"] == "cancelled"


def test_a_task_that_starts_after_its_submission_was_killed_ends_at_once(tmp_path):
    """submitit lets SIGTERM pass by until the task has taken it over."""
    program = f"""
import prl.orchestrator.agent as agent
from prl.cluster.allocation import read_allocation
from prl.runfolder.paths import RunFolder
run = RunFolder({str(tmp_path)!r})
run.attempt(1).mkdir()
print(agent._lead(run, 1, read_allocation(), []).cause)
"""
    environment = {**os.environ, "PRL_SUBMITTER": "999999999", "PRL_RUN": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "cancelled: prl-submit is gone\n"
    assert json.loads((tmp_path / "attempt_001/exit.json").read_text())["outcome"] == "cancelled"


def test_a_controller_whose_submission_is_gone_already_ends_its_task(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    command = f"{sys.executable} -c 'import time; time.sleep(60)'"
    environment = {
        "SUBMITIT_LOCAL_NTASKS": "1",
        "SUBMITIT_LOCAL_COMMAND": command,
        "SUBMITIT_LOCAL_TIMEOUT_S": "1000",
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
        "SUBMITIT_STDERR_TO_STDOUT": "",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
        "PRL_RUN": str(tmp_path),
    }
    arguments = [sys.executable, "-m", "prl.cluster.controller", str(tmp_path / "submitit"), "999999999"]
    process = subprocess.Popen(arguments, env={**os.environ, **environment}, start_new_session=True)
    assert process.wait(20) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


class Stuck:
    """A process that no signal ends, as one in a filesystem that hangs."""

    pid = 7
    kill = send_signal = lambda *_: None

    def poll(self):
        return None


def test_a_process_that_outlives_its_death_is_told_and_not_waited_for(tmp_path, monkeypatch, capsys):
    from prl.cluster import controller

    (tmp_path / "config.yaml").write_text(CONFIG.replace("stop_s: 4", "stop_s: 0.1"))
    monkeypatch.setenv("PRL_RUN", str(tmp_path))
    monkeypatch.setattr(controller, "KILLED_S", 0.1)
    stuck = object.__new__(controller.Controller)
    stuck.tasks, stuck._asked = [Stuck()], (signal.SIGTERM, time.monotonic())
    assert stuck.wait() == [None]
    assert "process 7 was killed and has not ended in 0.1 s: its storage hangs" in capsys.readouterr().out
