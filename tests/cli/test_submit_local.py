"""prl-submit without Slurm: whatever ends the command or the job, nothing goes on unseen."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submitting import files, processes_of, wait_for, with_function

from prl.metrics import names
from prl.metrics.events import MetricsWriter


def test_a_run_whose_reader_is_gone_is_ended(config):
    process = with_function("wait_for_term", "c.yaml")
    started, end = config / "runs/one/started", time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.stdout.close()
    with MetricsWriter(config / "runs/one/metrics", "orchestrator", 0, 1) as writer:
        writer.write({}, step=1, kind=names.STEP)
    assert process.wait(30) == 1
    assert (config / "runs/one/ended in order").exists()


def test_a_local_run_that_fails_ends_with_its_cause_and_a_code(config):
    process = with_function("fail", "c.yaml")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "the run failed" in out
    assert "ValueError: the cause of it all" in out
    said = json.loads((config / "runs/one/attempt_001/exit.json").read_text())
    assert (said["outcome"], said["cause"], said["code"]) == ("failed", "ValueError: the cause of it all", 1)
    second = with_function("fail", "c.yaml")
    assert "already holds another run, which has no checkpoint to go on from" in second.communicate(timeout=60)[0]
    assert second.returncode == 2


def test_an_output_that_takes_nothing_is_an_error_before_anything_is_written(config):
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, str(Path(__file__).parent / "run_submit.py"), "wait_for_term", "c.yaml"]
    for stream in (writing, os.open("/dev/full", os.O_WRONLY)):
        done = subprocess.run(program, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert re.fullmatch("prl-submit: error: .*(Broken pipe|No space left on device)\n", done.stderr)
        assert files(config) == ["c.yaml"]
        os.close(stream)


@pytest.mark.parametrize("made_before", [False, True])
def test_a_copy_of_the_code_that_fails_is_told_in_one_line_and_leaves_nothing(config, made_before):
    if made_before:
        (config / "runs/one").mkdir(parents=True)
    process = with_function("tell", "c.yaml", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000)))
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert re.search(
        r"^prl-submit: error: the code cannot be copied to \S+/code.new/\S+: .*File too large.* MiB are free", out, re.MULTILINE
    )
    assert "Traceback" not in out
    assert files(config) == (["c.yaml", "runs", "runs/one"] if made_before else ["c.yaml", "runs"])
    assert with_function("fail", "c.yaml").wait(60) == 1  # the folder can be used


@pytest.mark.parametrize("seen", ["code", "attempt_001/submitit", "attempt_001/submission.json", "metrics/submit-0.jsonl"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_job_is_started_leaves_nothing_running(config, number, seen):
    process = with_function(
        "wait_for_term",
        *("c.yaml", "--set", "control.stop_s=2"),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests that run under nohup ignore SIGHUP
    )
    run = config / "runs/one"
    wait_for(run / seen, process)
    process.send_signal(number)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130, out
    assert "cancelled" in out
    assert "Traceback" not in out
    assert processes_of(run) == []
    if run.exists():
        assert json.loads((run / "attempt_001/exit.json").read_text())["outcome"] == "cancelled"


def test_a_killed_controller_is_told_and_what_it_left_is_ended(config):
    process = with_function("wait_for_term", "c.yaml", start_new_session=True)
    run = config / "runs/one"
    wait_for(run / "started", process)
    os.kill(int(json.loads((run / "attempt_001/submission.json").read_text())["job_id"]), signal.SIGKILL)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "COMPLETED" not in out
    assert re.search("it left [1-9] processes, which were ended", out)
    assert "the run failed" in out
    assert processes_of(run) == []
    assert (run / "ended in order").exists()
    said = json.loads((run / "attempt_001/exit.json").read_text())
    assert (said["outcome"], said["role"], said["steps"]) == ("failed", None, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_run_in_order(config, number):
    process = with_function("wait_for_term", "c.yaml", start_new_session=True)
    started, end = config / "runs/one/started", time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, number)  # what a terminal does
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert "Ctrl-C: ending the run" in out if number == signal.SIGINT else "SIGTERM: ending the run" in out
    assert f"cancelled\nrun folder: {config}/runs/one\n" in out
    assert "go on with" not in out  # there is no checkpoint
    assert (config / "runs/one/ended in order").exists()
