"""A child that dies ends the run quickly, with its cause on the terminal, in exit.json and as the exit code."""

import json
import signal
import subprocess
import time

import psutil
import pytest
from whole_runs import ROOT, Ended, command

from prl.runfolder.paths import RunFolder

SHORT = ["configs/quickstart.yaml", "--set", "run.evaluate_every_steps=0", "run.stop_at_reward=null", "verifier.processes=1"]


def children_of(pid: int, folder: RunFolder) -> dict[str, psutil.Process]:
    """The run's child processes by their role and index."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        environment = process.environ()
        line = process.cmdline()
        if environment.get("PRL_RUN") == str(folder) and line[1:2] == ["-m"] and line[2].startswith("prl."):
            found.setdefault(f"{environment['PRL_ROLE']} {environment['PRL_INDEX']}", process)
    return found


def start(folder: RunFolder) -> subprocess.Popen:
    return subprocess.Popen(
        command(*SHORT, folder=folder.path), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_steps(process: subprocess.Popen, folder: RunFolder, steps: int) -> None:
    running, end = Ended(folder, 0, ""), time.monotonic() + 240
    while not any(event.step >= steps for event in running.events("step")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"no {steps} steps within 240 s"
        time.sleep(0.2)


@pytest.mark.parametrize(
    "victim",
    [
        "trainer 1",
        *(pytest.param(v, marks=pytest.mark.slow) for v in ("trainer 0", "sampler 0", "preprocess 0", "actor 0", "verifier 0")),
    ],
)
@pytest.mark.deadline(360)
def test_a_killed_child_ends_the_run_with_its_name(tmp_path, victim):
    folder = RunFolder(tmp_path / "run")
    process = start(folder)
    wait_for_steps(process, folder, 2)
    children = children_of(process.pid, folder)
    assert victim in children, sorted(children)
    killed = time.monotonic()
    children[victim].send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    took_s = time.monotonic() - killed
    assert process.returncode == 1
    assert took_s < 10
    ended = json.loads(folder.exit(1).read_text())
    assert ended["outcome"] == "failed"
    assert f"{victim} was ended by SIGKILL" in ended["cause"]
    assert ended["code"] == 1
    assert f"{victim} was ended by SIGKILL" in output
    assert not [name for name, child in children.items() if child.is_running()]


@pytest.mark.slow
@pytest.mark.deadline(360)
def test_ctrl_c_ends_the_run_in_order(tmp_path):
    folder = RunFolder(tmp_path / "run")
    process = start(folder)
    wait_for_steps(process, folder, 2)
    children = children_of(process.pid, folder)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Ctrl-C" in output
    assert json.loads(folder.exit(1).read_text())["outcome"] == "cancelled"
    assert not [name for name, child in children.items() if child.is_running()]
