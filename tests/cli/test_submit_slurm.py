"""prl-submit under Slurm."""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_ins import stand_in
from submitit.core.utils import pickle_load
from submitting import files, wait_for, with_function

from prl.cli import submit
from prl.cli.job_end import tell_next_steps
from prl.runfolder.paths import RunFolder


def test_slurm_without_a_controller_is_an_error_and_writes_nothing(config, capsys, monkeypatch):
    (config / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\n"
        "NodeName=n1\nPartitionName=p Nodes=n1\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(config / "slurm.conf"))
    assert submit.main(["c.yaml", "--nodes", "2"]) == 2
    assert re.search(
        "asks for 2 Slurm nodes, but (no Slurm controller answers|scontrol: no such program)", capsys.readouterr().err
    )
    assert files(config) == ["c.yaml", "slurm.conf"]


def test_a_bad_sbatch_option_writes_nothing(config, capsys):
    options = ["cluster.sbatch.array=1-3", "cluster.sbatch.constrain=h100"]
    assert submit.main(["c.yaml", "--nodes", "2", "--set", *options]) == 2
    array, constraint = capsys.readouterr().err.splitlines()
    assert "cluster.sbatch.array: is set by prl-submit" in array
    assert "cluster.sbatch.constrain: sbatch has no such option; did you mean constraint?" in constraint
    assert files(config) == ["c.yaml"]


UP = "echo 'Slurmctld(primary) at login is UP'"
NODES = "printf 'main*|n1|8|4000|(null)|infinite\\nmain*|n2|8|4000|(null)|infinite\\nmain*|n3|8|4000|(null)|infinite\\n'"


def test_the_expected_start_of_a_job_and_of_each_component(config, capsys, monkeypatch):
    """As Slurm 22.05 answers: on its standard error, in another form for a heterogeneous job, with a start in another century
    where jobs without a time limit are in the way."""
    sbatch = """
script=$(cat)
case $script in
*hetjob*) echo 'sbatch: Job 20 to start at 2154-07-05T01:24:36 using 3 processors on n[1-3]' >&2 ;;
*nodes=1*) echo 'sbatch: Job 21 to start at 2026-11-29T16:11:36 using 1 processors on nodes n1 in partition main' >&2 ;;
*) echo 'allocation failure: Requested node configuration is not available' >&2; exit 1 ;;
esac"""
    calls = stand_in(config, monkeypatch, scontrol=UP, sinfo=NODES, sbatch=sbatch)
    assert submit.main(["c.yaml", "--nodes", "3", "--test-only"]) == 0
    first, job, train, sample = capsys.readouterr().out.splitlines()
    assert first.startswith("expected starts, as the scheduler estimates them now")
    assert job == "  the job      not to be foreseen: jobs without a time limit, or held ones, are in the way"
    assert train == "  train alone  2026-11-29 16:11:36 on n1"
    assert sample == "  sample alone not to be had: Requested node configuration is not available"
    assert calls.read_text().splitlines()[2:] == ["sbatch --test-only"] * 3
    assert not (config / "runs").exists()


def test_a_job_that_slurm_would_refuse(config, capsys, monkeypatch):
    refuse = "echo 'sbatch: error: Batch job submission failed: Requested operation not supported on this system' >&2; exit 1"
    stand_in(config, monkeypatch, scontrol=UP, sinfo=NODES, sbatch=refuse, srun=":", squeue=":")
    said = "Requested operation not supported on this system; this site starts no heterogeneous jobs: set cluster.mode: plain"
    assert submit.main(["c.yaml", "--nodes", "3", "--test-only"]) == 2
    assert f"prl-submit: error: Slurm would refuse the job: {said}" in capsys.readouterr().err
    assert submit.main(["c.yaml", "--nodes", "3"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("prl-submit: error: the job was not accepted: sbatch: exit code 1")
    assert said.partition("; ")[2] in error
    assert list((config / "runs").iterdir()) == []
    assert submit.main(["c.yaml", "--test-only"]) == 2
    assert "--test-only asks Slurm, and this run does without; ask for nodes with --nodes N" in capsys.readouterr().err


@pytest.mark.slurm
def test_slurm_returns_after_submission_with_what_to_do_next(config):
    process = with_function("tell", "c.yaml", "--nodes", "3", "--set", "cluster.time_min=2")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    job = re.search(r"job (\d+) submitted", out)[1]
    assert f"prl-submit --cancel {config}/runs/one " in out
    record = json.loads((config / "runs/one/attempt_001/submission.json").read_text())
    assert (record["kind"], record["job_id"], record["nodes"]) == ("het", job, [1, 2])
    results = [config / f"runs/one/attempt_001/submitit/{job}_{task}_result.pkl" for task in range(3)]
    end = time.monotonic() + 60
    while not all(path.exists() for path in results):
        assert time.monotonic() < end, (config / "runs/one/attempt_001/logs/batch.log").read_text()
        time.sleep(0.1)


@pytest.mark.slurm
def test_slurm_with_follow_shows_the_job_to_its_end(config):
    process = with_function("fail", "c.yaml", "--nodes", "2", "--follow", "--set", "cluster.time_min=2")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert re.search(r"the run failed \(job \d+ is FAILED\): ValueError: the cause of it all", out)


@pytest.mark.slurm
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_batch_script_that_fails_is_told(config, nodes):
    overrides = ["cluster.time_min=2", 'cluster.setup=["false"]']
    process = with_function("tell", "c.yaml", "--nodes", nodes, "--follow", "--set", *overrides)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert re.search(
        r"the run failed \(job \d+ is FAILED\): the job ended before its first process began; its batch script", out
    )
    assert re.search(r"\nbatch script: line \d+ ended with code 1: false\nlogs: ", out)


@pytest.mark.slurm
def test_ctrl_c_leaves_a_followed_job_running_and_the_run_folder_is_enough_to_end_it(config, capsys):
    process = with_function("wait_for_term", "c.yaml", "--nodes", "3", "--follow", "--set", "cluster.time_min=2")
    wait_for(config / "runs/one/started", process)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "Ctrl-C: the job goes on" in out
    assert f"prl-submit --status {config}/runs/one --follow" in out
    assert submit.main(["--status", "runs/one"]) == 0
    train, sample = capsys.readouterr().out.splitlines()[1:]
    assert re.match(r"  train  RUNNING on n\d+ since 2\d{3}-", train)
    assert re.match(r"  sample RUNNING on n", sample)
    assert submit.main(["--cancel", "runs/one"]) == 0
    job = re.match(r"job (\d+ of cluster \w+), attempt 1, is cancelled", capsys.readouterr().out)[1]
    end = time.monotonic() + 60
    while "CANCELLED" not in capsys.readouterr().out:
        assert time.monotonic() < end
        time.sleep(0.3)
        assert submit.main(["--status", "runs/one"]) == 0
    while not capsys.readouterr().out.startswith(f"job {job} has ended: "):  # one component may end after the other
        assert time.monotonic() < end
        time.sleep(0.3)
        assert submit.main(["--cancel", "runs/one"]) == 0


@pytest.mark.slurm
def test_several_nodes_of_a_homogeneous_job_run_the_same(config):
    process = with_function("tell", "c.yaml", "--nodes", "3", "--follow", "--set", "cluster.mode=plain", "cluster.time_min=2")
    process.communicate(timeout=60)
    record = json.loads((config / "runs/one/attempt_001/submission.json").read_text())
    assert (record["kind"], record["nodes"], record["component_job_ids"]) == ("plain", [1, 2], [record["job_id"]])
    results = sorted((config / "runs/one/attempt_001/submitit").glob("*_result.pkl"))
    told = [pickle_load(path)[1] for path in results]
    assert [one["place"] for one in told] == [(0, 0), (1, 0), (1, 1)]
    assert len({one["host"] for one in told}) == 3
    assert {tuple(one["master"]) for one in told} == {(told[0]["hosts"][0][0][1],) * 2}


@pytest.mark.slurm
def test_the_scheduler_estimates_a_start(config, capsys):
    assert submit.main(["c.yaml", "--nodes", "3", "--test-only"]) == 0
    job, train, sample = capsys.readouterr().out.splitlines()[1:]
    for line, name in ((job, "the job"), (train, "train alone"), (sample, "sample alone")):
        assert re.fullmatch(rf"  {name} +2\d{{3}}-\d\d-\d\d \d\d:\d\d:\d\d on \S+", line)
    assert not (config / "runs").exists()


def _took(folder):
    """How long a submission took, and how much of that it stood in line for a processor, as others use this machine, too: the
    rest is its own work and its waits for files and for Slurm, whose programs' time in line counts as theirs."""
    began = time.monotonic()
    process = with_function("tell", "c.yaml", "--nodes", "3", "--set", "cluster.time_min=2", f"run.folder={folder}")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    took_s = time.monotonic() - began
    in_line_s = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    return took_s, in_line_s


@pytest.mark.slurm
def test_a_submission_takes_less_than_two_seconds(config):
    """The best of three, the first that does ending it."""
    taken = []
    while len(taken) < 3 and not any(took_s - in_line_s < 2.0 for took_s, in_line_s in taken):
        taken.append(_took(f"runs/{len(taken)}"))
    assert any(took_s - in_line_s < 2.0 for took_s, in_line_s in taken), taken


def test_commands_to_go_on_with_can_be_copied(tmp_path, capsys):
    run = tmp_path / "my run"
    tell_next_steps(SimpleNamespace(job_id="7", attempt=1, run=RunFolder(run), followers=()))
    words = [shlex.split(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert words[0][:3] == ["prl-submit", "--status", str(run)]
    assert words[1][:4] == ["prl-submit", "--status", str(run), "--follow"]
    assert words[2][:2] == ["prl-report", str(run)]
    assert words[3] == ["tail", "-F", f"{run}/attempt_001/logs/*.log"]
    assert words[4][:2] == ["touch", str(RunFolder(run).save)]
    assert words[5][:2] == ["touch", str(RunFolder(run).stop)]
    assert words[6][:3] == ["prl-submit", "--cancel", str(run)]
