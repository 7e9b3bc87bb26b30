"""What a killed node agent has left is ended and removed, and nothing of others: neither processes that were given a number of
its own, nor what a living agent has."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from prl.orchestrator import clean_up
from prl.orchestrator.process_groups import group_of, is_there, members, signal_group

LEADER = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('lives', flush=True); time.sleep(600)"


def wait_until(condition, limit_s=20):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def begin(tmp_path):
    """Starts a process with a worker as a group of its own; what is left of all of them is killed afterwards."""
    started = []

    def start(log):
        with (tmp_path / log).open("ab") as output:
            process = subprocess.Popen([sys.executable, "-c", LEADER], stdout=output, stderr=output, start_new_session=True)
        started.append(process)
        wait_until(lambda: "lives" in (tmp_path / log).read_text())
        return process, group_of(process.pid, tmp_path / log)

    yield start
    for process in started:
        for pid in members(group_of(process.pid, tmp_path)):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_a_group_that_lives_is_signalled_with_its_workers(begin):
    process, group = begin("a.log")
    workers = [psutil.Process(pid) for pid in members(group)]
    assert len(workers) == 2
    signal_group(group, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    wait_until(lambda: not is_there(group))
    assert not psutil.wait_procs(workers, timeout=20)[1]


def test_a_number_that_was_given_to_another_process_is_not_signalled(begin):
    process, group = begin("a.log")
    signal_group(replace(group, started_ticks=group.started_ticks - 1), signal.SIGKILL)
    signal_group(replace(group, started_ticks=None), signal.SIGKILL)
    time.sleep(0.2)
    assert process.poll() is None
    assert len(members(group)) == 2


def test_workers_whose_first_process_has_ended_are_told_by_their_log(begin, tmp_path):
    process, group = begin("a.log")
    (worker,) = set(members(group)) - {process.pid}
    process.kill()
    process.wait(20)
    signal_group(replace(group, log=str(tmp_path / "another.log")), signal.SIGKILL)
    time.sleep(0.2)
    assert members(group) == [worker]
    signal_group(group, signal.SIGKILL)
    wait_until(lambda: not is_there(group))


def test_workers_that_write_elsewhere_are_told_by_the_run_that_their_environment_names(tmp_path):
    """As a program that an actor has started, to read what it prints."""
    program = LEADER.replace("['sleep', '600']", "['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    logs, environment = tmp_path / "run/attempt_001/logs", {**os.environ, "PRL_RUN": str(tmp_path / "link")}
    logs.mkdir(parents=True)
    with (logs / "actor-0.log").open("ab") as output:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=output, start_new_session=True, env=environment)
    try:
        wait_until(lambda: "lives" in (logs / "actor-0.log").read_text())
        group = group_of(process.pid, logs / "actor-0.log")
        assert len(members(group)) == 2
        process.kill()
        process.wait(20)
        signal_group(replace(group, log=str(tmp_path / "run2/attempt_001/logs/actor-0.log")), signal.SIGKILL)
        time.sleep(0.2)
        assert is_there(group)
        signal_group(group, signal.SIGKILL)
        wait_until(lambda: not is_there(group))
    finally:
        for pid in members(group_of(process.pid, tmp_path)):
            os.kill(pid, signal.SIGKILL)


AGENT = """
import os, sys, time
from pathlib import Path
from prl.orchestrator import clean_up
from prl.orchestrator.process_groups import Group
folder, group, segment, beside = sys.argv[1:]
number, ticks, log = group.split("|")
clean_up.record(Path(folder), [Group(int(number), int(ticks), log)], [Path(segment)], [Path(beside)])
print("recorded", flush=True)
time.sleep(600)
"""


@pytest.fixture
def agent(tmp_path, begin, monkeypatch):
    """A process that has written down what it has, and the paths of that: its folder, shared memory, another folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, group = begin("a.log")
    paths = [tmp_path / "prl-77-0-abc", Path(f"/dev/shm/prl-test-{os.getpid()}-left"), tmp_path / "disk"]
    for path in (paths[0], paths[2] / "model"):
        path.mkdir(parents=True)
        (path / "file").touch()
    paths[1].touch()
    facts = f"{group.number}|{group.started_ticks}|{group.log}"
    process = subprocess.Popen([sys.executable, "-c", AGENT, paths[0], facts, *paths[1:]], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "recorded\n"
    yield process, group, paths
    process.kill()
    process.wait()
    process.stdout.close()
    paths[1].unlink(missing_ok=True)


def test_what_a_killed_agent_left_is_removed_at_the_start_of_the_next_one(agent, tmp_path):
    process, group, paths = agent
    (tmp_path / "prl-made-by-another-program").mkdir()
    assert clean_up.clean_dead() == []
    assert is_there(group)
    assert all(path.exists() for path in paths)
    process.kill()
    process.wait()
    assert clean_up.clean_dead() == [paths[0]]
    assert not is_there(group)
    assert not any(path.exists() for path in paths)
    assert (tmp_path / "prl-made-by-another-program").exists()


@pytest.mark.parametrize("elsewhere", [{"namespace": "pid:[1]"}, {"host": "another", "boot": "another"}])
def test_process_ids_of_another_container_or_node_say_nothing(agent, elsewhere):
    process, group, paths = agent
    process.kill()
    process.wait()
    facts = json.loads((paths[0] / clean_up.RECORD).read_text())
    (paths[0] / clean_up.RECORD).write_text(json.dumps(facts | elsewhere))
    assert clean_up.clean_dead() == []
    assert is_there(group)


def test_of_a_time_before_the_systems_last_start_only_files_are_left(agent):
    _, group, paths = agent
    facts = json.loads((paths[0] / clean_up.RECORD).read_text())
    (paths[0] / clean_up.RECORD).write_text(json.dumps(facts | {"boot": "another"}))
    assert clean_up.clean_dead() == [paths[0]]
    assert is_there(group)
    assert [path.exists() for path in paths] == [False, True, False]


def test_a_failed_job_cleans_up_after_its_own_agents_alone(agent, tmp_path):
    """Another cluster's nodes may be this one's, too, and its job 77 another run's."""
    _, group, paths = agent

    def run(job, task, folder=tmp_path):
        command = [sys.executable, "-m", "prl.orchestrator.clean_up"]
        environment = {**os.environ, "SLURM_JOB_ID": job, "SLURM_PROCID": task, "PRL_RUN": str(folder)}
        subprocess.run(command, env=environment, check=True, timeout=60)

    run("7", "0")
    run("77", "1")
    run("77", "0", tmp_path / "another")
    assert is_there(group)
    run("77", "0")
    assert not is_there(group)
    assert not any(path.exists() for path in paths)


def test_a_folder_of_another_user_is_not_looked_at(agent, monkeypatch):
    process, group, paths = agent
    process.kill()
    process.wait()
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    assert clean_up.clean_dead() == []
    assert is_there(group)
    assert all(path.exists() for path in paths)
