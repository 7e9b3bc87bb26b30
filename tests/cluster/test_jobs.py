"""Real jobs: on this machine, and on the lab cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

from prl.cluster import claims, submission
from prl.cluster.claims import SubmissionError, check_not_running
from prl.cluster.requests import requests
from prl.cluster.slurm import SlurmError, check_slurm
from prl.cluster.split import make_split
from prl.config.load import ConfigError, load, replace
from prl.config.schema import Config
from prl.runfolder.paths import RunFolder

sys.path.insert(0, str(Path(__file__).parent))
import jobs

cloudpickle.register_pickle_by_value(jobs)


@pytest.fixture(autouse=True)
def private_imports(monkeypatch):
    """The job may find prl only where the submission puts it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    monkeypatch.setattr(submission, "SLURM_POLL_S", 0.3)


def start(tmp_path, function, nodes=None, **cluster):
    config = replace(
        Config(),
        run={"name": "test", "folder": str(tmp_path / "run")},
        model={"init": "random", "architecture": "qwen2"},
        cluster={"nodes": nodes, "time_min": 2, **cluster},
    )
    folder = RunFolder(config.run.folder)
    attempt = claims.next_attempt(folder)
    with claims.undone_on_error(config, folder, attempt, resume=attempt > 1):
        return submission.submit(config, make_split(config), folder, attempt, function, str(folder))


def wait(job, limit_s=60):
    end = time.monotonic() + limit_s
    while not job.ended(0.2):
        assert time.monotonic() < end, f"job {job.job_id} is still {job.state()}"


def wait_for(path, limit_s=30):
    end = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.05)


def alive_in_group(group):
    """Processes of a group; those that have ended and wait to be reaped do not count."""
    alive = [p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE]
    return [pid for pid in alive if _group(pid) == group]


def _group(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_a_local_job_runs_the_runs_own_code(tmp_path, monkeypatch):
    other = tmp_path / "elsewhere" / "prl"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('the current folder is no place to import from')")
    monkeypatch.chdir(other.parent)
    monkeypatch.setenv("PRL_NODES_0", "n1=10.0.0.1")  # left over from a Slurm job
    job = start(tmp_path, jobs.tell)
    wait(job)
    (told,) = job.job.results()
    assert told["prl"] == str(job.run.code / "prl" / "__init__.py")
    assert told["hosts"] == [[("localhost", "127.0.0.1")]]
    assert (told["place"], told["job"], told["attempt"]) == ((0, 0), None, "1")
    assert job.state() == "COMPLETED"


def test_the_run_folder_holds_what_the_run_needs_for_its_owner_alone(tmp_path):
    job = start(tmp_path, jobs.tell)
    wait(job)
    run = job.run
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.token.stat().st_mode & 0o777 == 0o600
    assert len(run.token.read_text()) >= 32
    assert load(run.config) == load(run.attempt(1) / "config.yaml")
    assert (run.code / "slurm" / "het.sbatch").is_file()
    assert not list(run.code.rglob("__pycache__/*.pyc.*"))
    assert run.latest.resolve() == run.attempt(1).resolve()
    record = json.loads((run.attempt(1) / "submission.json").read_text())
    assert (record["kind"], record["job_id"], record["nodes"]) == ("local", job.job_id, [1])


def test_a_second_attempt_goes_beside_the_first(tmp_path):
    wait(start(tmp_path, jobs.tell))
    stop = RunFolder(tmp_path / "run").stop
    stop.touch()  # left over: it asked the first attempt to end
    job = start(tmp_path, jobs.tell)
    assert not stop.exists()
    wait(job)
    assert job.attempt == 2
    assert job.job.results()[0]["attempt"] == "2"
    assert job.run.latest.readlink() == Path("attempt_002")


def test_a_local_failure_keeps_its_traceback(tmp_path):
    job = start(tmp_path, jobs.fail)
    wait(job)
    assert "ValueError: the cause of it all" in job.traceback()
    assert job.state() == "FAILED"


def test_a_local_job_is_asked_to_end(tmp_path):
    job = start(tmp_path, jobs.wait_for_term)
    wait_for(job.run.path / "started")
    with pytest.raises(ConfigError, match=f"still runs here; end it first: kill {job.job_id}"):
        check_not_running(job.run)
    job.cancel(grace_s=20)
    assert job.ended(0)
    assert (job.run.path / "ended in order").exists()
    check_not_running(job.run)


def test_a_local_job_that_does_not_end_is_killed(tmp_path):
    job = start(tmp_path, jobs.ignore_term)
    wait_for(job.run.path / "started")
    job.cancel(grace_s=0.5)
    assert job.ended(0)
    end = time.monotonic() + 10  # a killed process may need a moment where the machine is busy
    while alive_in_group(int(job.job_id)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_a_killed_controller_leaves_is_found_and_ended(tmp_path):
    job = start(tmp_path, jobs.ignore_term)
    wait_for(job.run.path / "started")
    (task,) = psutil.Process(int(job.job_id)).children()
    os.kill(int(job.job_id), signal.SIGKILL)
    wait(job)
    assert job.state() == "KILLED"
    with pytest.raises(ConfigError, match=f"attempt 1 still runs here; end it first: kill {task.pid}"):
        check_not_running(job.run)
    job.end_rest(grace_s=0.5)
    assert not task.is_running()
    check_not_running(job.run)


def test_a_submission_that_fails_leaves_no_folder_and_of_a_second_attempt_nothing(tmp_path):
    config = replace(Config(), run={"folder": str(tmp_path / "run")}, model={"init": "random", "architecture": "qwen2"})
    folder = RunFolder(config.run.folder)
    for made_before in (False, True):
        if made_before:
            folder.path.mkdir()
        with pytest.raises(ValueError, match="full"), claims.undone_on_error(config, folder, 1, resume=False):
            raise ValueError("full")
        assert folder.path.exists() == made_before
        assert not made_before or not list(folder.path.iterdir())
    wait(start(tmp_path / "other", jobs.tell))
    run = RunFolder(tmp_path / "other/run")
    before = run.config.read_bytes()
    with pytest.raises(ValueError, match="full"), claims.undone_on_error(config, run, 2, resume=True):
        raise ValueError("full" if run.config.read_bytes() != before and run.attempts() == [1, 2] else "nothing made")
    assert (run.attempts(), run.config.read_bytes(), run.latest.readlink()) == ([1], before, Path("attempt_001"))


@pytest.mark.slurm
def test_a_heterogeneous_job_on_three_nodes(tmp_path, slurm_cluster):
    of_samplers = {"cpus-per-task": 3}
    job = start(tmp_path, jobs.tell, nodes=3, memory_per_node_gib=0.5, cpus_per_node=2, sbatch_sample=of_samplers)
    wait(job)
    told = job.job.results()
    assert [one["cpus"] for one in told] == [2, 3, 3]  # a task has all that its component was given
    assert [one["place"] for one in told] == [(0, 0), (1, 0), (1, 1)]
    assert [one["task"] for one in told] == [0, 1, 2]
    assert {one["job"] for one in told} == {job.job_id}
    hosts = told[0]["hosts"]
    assert [len(component) for component in hosts] == [1, 2]
    assert all(one["hosts"] == hosts for one in told)
    assert [one["host"] for one in told] == [name for component in hosts for name, _ in component]
    assert len({one["host"] for one in told}) == 3
    assert {one["host"] for one in told} <= set(slurm_cluster)
    assert {one["master"] for one in told} == {(hosts[0][0][1], hosts[0][0][1])}
    assert {one["prl"] for one in told} == {str(job.run.code / "prl" / "__init__.py")}
    assert job.state() == "COMPLETED"
    record = json.loads((job.run.attempt(1) / "submission.json").read_text())
    assert record["component_job_ids"] == [job.job_id, str(int(job.job_id) + 1)]
    assert (job.run.attempt(1) / "submission.sh").read_text().startswith("#!/bin/bash")


@pytest.mark.slurm
@pytest.mark.slurm_netns
def test_nodes_of_the_lab_have_addresses_of_their_own(tmp_path, slurm_cluster):
    nodes = subprocess.run(["scontrol", "-o", "show", "node"], capture_output=True, text=True, check=True, timeout=30).stdout
    job = start(tmp_path, jobs.tell, nodes=2)
    wait(job)
    addresses = [address for component in job.job.results()[0]["hosts"] for _, address in component]
    assert len(set(addresses)) == 2
    assert all(f"NodeAddr={address} " in nodes for address in addresses)


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm_cluster")
def test_several_nodes_of_a_plain_job_choose_their_roles_by_rank(tmp_path):
    job = start(tmp_path, jobs.tell, nodes=3, mode="plain", train_nodes=2, cpus_per_node=3)
    wait(job)
    told = job.job.results()
    assert [one["cpus"] for one in told] == [3, 3, 3]
    assert [one["place"] for one in told] == [(0, 0), (0, 1), (1, 0)]
    hosts = told[0]["hosts"]
    assert [one["host"] for one in told] == [name for component in hosts for name, _ in component]
    assert {one["job"] for one in told} == {job.job_id}
    assert {one["master"] for one in told} == {(hosts[0][0][1],) * 2}
    record = json.loads((job.run.attempt(1) / "submission.json").read_text())
    assert (record["kind"], record["component_job_ids"]) == ("plain", [job.job_id])


@pytest.mark.slurm
def test_a_plain_job_on_one_node(tmp_path, slurm_cluster):
    job = start(tmp_path, jobs.tell, nodes=1)
    wait(job)
    (told,) = job.job.results()
    assert told["place"] == (0, 0)
    assert told["job"] == job.job_id
    assert [name for name, _ in told["hosts"][0]] == [told["host"]]
    assert told["host"] in slurm_cluster
    assert told["master"] == (told["hosts"][0][0][1],) * 2
    assert job.state() == "COMPLETED"


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm_cluster")
def test_one_failing_task_ends_the_job_with_its_traceback(tmp_path):
    job = start(tmp_path, jobs.fail_on_task_1, nodes=3)
    wait(job)
    assert job.traceback().startswith("task 1:\n")
    assert "ValueError: the cause of it all" in job.traceback()
    assert job.state() == "FAILED"
    log = job.job.task(1).paths.stderr
    assert "ValueError: the cause of it all" in log.read_text()


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm_cluster")
def test_cancelling_asks_every_task_to_end(tmp_path):
    job = start(tmp_path, jobs.wait_for_term, nodes=3)
    wait_for(job.run.path / "started")
    with pytest.raises(ConfigError, match=f"job {job.job_id} of attempt 1 is RUNNING; end it first: prl-submit --cancel "):
        check_not_running(job.run)
    job.cancel(grace_s=20)
    wait(job)
    assert job.state() == "CANCELLED"
    assert job.traceback() is None
    check_not_running(job.run)


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm_cluster")
def test_what_sbatch_refuses_is_an_error_with_its_words(tmp_path):
    with pytest.raises(SubmissionError, match=r"(?i)not accepted.*(memory|available)"):
        start(tmp_path, jobs.tell, nodes=2, memory_per_node_gib=100000)
    assert not (tmp_path / "run").exists()


@pytest.mark.slurm
def test_more_nodes_than_the_cluster_has(slurm_cluster):
    nodes = len(slurm_cluster)
    for number, words in (
        (nodes + 10, f"{nodes + 9} nodes that sample, but the cluster has {nodes}"),
        (nodes + 1, f"{nodes + 1} Slurm nodes"),
    ):
        config = replace(Config(), cluster={"nodes": number})
        with pytest.raises(SlurmError, match=f"asks for {words}"):
            check_slurm(requests(config, make_split(config)))
    config = replace(Config(), cluster={"nodes": nodes})
    check_slurm(requests(config, make_split(config)))
