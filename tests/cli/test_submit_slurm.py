"""prl-submit under Slurm."""

import json
import re
import shlex
import time
from types import SimpleNamespace

import pytest
from submitting import files, with_function

from prl.cli import submit
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
    assert submit.main(["c.yaml", "--nodes", "2", "--set", "cluster.sbatch.array=1-3"]) == 2
    assert "cluster.sbatch.array: is set by prl-submit" in capsys.readouterr().err
    assert files(config) == ["c.yaml"]


@pytest.mark.slurm
def test_slurm_returns_after_submission_with_what_to_do_next(config):
    process = with_function("tell", "c.yaml", "--nodes", "3", "--set", "cluster.time_min=2")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    job = re.search(r"job (\d+) submitted", out)[1]
    assert f"scancel {job}" in out
    record = json.loads((config / "runs/one/attempt_001/submission.json").read_text())
    assert (record["kind"], record["job_id"], record["nodes"]) == ("het", job, [1, 2])
    results = [config / f"runs/one/attempt_001/submitit/{job}_{task}_result.pkl" for task in range(3)]
    end = time.monotonic() + 60
    while not all(path.exists() for path in results):
        assert time.monotonic() < end, (config / "runs/one/attempt_001/logs/batch.log").read_text()
        time.sleep(0.1)


@pytest.mark.slurm
def test_slurm_with_wait_follows_the_job(config):
    process = with_function("fail", "c.yaml", "--nodes", "2", "--wait", "--set", "cluster.time_min=2")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert re.search(r"the run failed \(job \d+ is FAILED\): ValueError: the cause of it all", out)


@pytest.mark.slurm
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_batch_script_that_fails_is_told(config, nodes):
    overrides = ["cluster.time_min=2", 'cluster.setup=["false"]']
    process = with_function("tell", "c.yaml", "--nodes", nodes, "--wait", "--set", *overrides)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert re.search(
        r"the run failed \(job \d+ is FAILED\): the job ended before its first process began; its batch script", out
    )
    assert re.search(r"\nbatch script: line \d+ ended with code 1: false\nlogs: ", out)


def test_commands_to_go_on_with_can_be_copied(tmp_path, capsys):
    run = tmp_path / "my run"
    submit._leave(SimpleNamespace(job_id="7", attempt=1, run=RunFolder(run)))
    words = [shlex.split(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert words[1][:2] == ["prl-report", str(run)]
    assert words[2] == ["tail", "-F", f"{run}/attempt_001/logs/*.log"]
    assert words[3][:2] == ["touch", str(RunFolder(run).stop)]
