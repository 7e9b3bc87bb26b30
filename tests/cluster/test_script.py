import os
import subprocess
from pathlib import Path

import pytest

from prl.cluster.script import render, template_folder
from prl.cluster.split import make_split
from prl.config.load import replace
from prl.config.schema import Config
from prl.runfolder.logs import BATCH_FAILED
from prl.runfolder.paths import RunFolder

RUN = RunFolder("/data/my runs/one")


def script(nodes, **cluster):
    config = replace(Config(), run={"name": "my run"}, cluster={"python": "/opt/python", **cluster, "nodes": nodes})
    return render(config, make_split(config), RUN, 2)


def directives(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_a_heterogeneous_job():
    text = script(
        3,
        gpus_per_node=8,
        cpus_per_node=64,
        memory_per_node_gib=1.5,
        time_min=90,
        partition="gpu",
        account="me",
        sbatch={"constraint": "h100&nvlink", "exclusive": True, "nice": 10, "overcommit": False},
        setup=("module load cuda", "export A='b c'"),
    )
    both = [
        *("--ntasks-per-node=1", "--time=90", "--partition=gpu", "--account=me", "--cpus-per-task=64", "--mem=1536M"),
        *("--gpus-per-node=8", "--constraint='h100&nvlink'", "--exclusive", "--nice=10"),
    ]
    assert directives(text) == [
        "--job-name='my run'",
        "--output='/data/my runs/one/attempt_002/logs/batch.log'",
        "--open-mode=append",
        "--no-requeue",
        "--signal=USR1@120",
        "--nodes=1",
        *both,
        "hetjob",
        "--nodes=2",
        *both,
    ]
    lines = text.splitlines()
    assert lines.index("module load cuda") + 1 == lines.index("export A='b c'")
    assert "export PRL_RUN='/data/my runs/one'" in lines
    assert "export PRL_ATTEMPT=2" in lines
    assert "export PYTHONSAFEPATH=1" in lines
    assert "export PYTHONPATH='/data/my runs/one/code'\"${PYTHONPATH:+:$PYTHONPATH}\"" in lines
    srun = text[text.index("\nsrun ") :]
    assert "--het-group=0-1 " in srun
    assert "--kill-on-bad-exit=1" in srun
    assert srun.rstrip().endswith("/opt/python -u -m submitit.core._submit '/data/my runs/one/attempt_002/submitit'")


def test_a_plain_job():
    text = script(1, gpus_per_node=8, sbatch={"exclusive": True})
    assert directives(text) == [
        "--job-name='my run'",
        "--output='/data/my runs/one/attempt_002/logs/batch.log'",
        "--open-mode=append",
        "--no-requeue",
        "--signal=USR1@120",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--time=60",
        "--gpus-per-node=8",
        "--exclusive",
    ]
    assert "--het-group" not in text


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_result_is_bash(nodes, tmp_path):
    text = script(nodes, setup=("if true; then", "  :", "fi"))
    assert "@@" not in text
    path = tmp_path / "script.sh"
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)


def run(text, folder, environment=None, **programs):
    """Run the script with programs of one shell line in place of Slurm's."""
    for name, line in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={**os.environ, **path, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_nodes_that_another_job_left_in_the_environment_do_not_count(tmp_path):
    left_over = {"PRL_NODES_1": "n8=10.0.0.8", "SLURM_JOB_NODELIST": "n1"}
    scontrol = "echo NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 State=IDLE"
    done = run(script(1), tmp_path, left_over, scontrol=scontrol, srun="env | grep ^PRL_NODES")
    assert done.stdout == "PRL_NODES_0=n1=10.0.0.1\n", done.stderr


def test_several_nodes_of_a_homogeneous_job_choose_their_roles_by_rank(tmp_path):
    """The first two of four train; scontrol gives the nodes in the order of the ranks."""
    text = script(4, mode="plain", train_nodes=2)
    assert directives(text)[5:7] == ["--nodes=4", "--ntasks-per-node=1"]
    scontrol = "for n in 3 1 2 4; do echo NodeName=n$n Arch=x86_64 NodeAddr=10.0.0.$n State=IDLE; done"
    done = run(
        text, tmp_path, {"SLURM_JOB_NODELIST": "n[1-4]"}, scontrol=scontrol, srun="env | grep -E '^(PRL_NODES|MASTER)' | sort"
    )
    wanted = "MASTER_ADDR=10.0.0.3\nPRL_NODES_0=n3=10.0.0.3,n1=10.0.0.1\nPRL_NODES_1=n2=10.0.0.2,n4=10.0.0.4\n"
    assert done.stdout == wanted, done.stderr


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(
    ("setup", "line", "words"),
    [
        (("true", "(exit 3)", "touch went_on"), "(exit 3)", "ended with code 3: ( exit 3 )"),
        ((), "=$(", "ended with code 7: "),  # the controller does not answer
    ],
)
def test_a_line_that_fails_ends_the_script_and_is_told(nodes, setup, line, words, tmp_path):
    text = script(nodes, setup=setup)
    done = run(text, tmp_path, scontrol="exit 7")
    number = next(n for n, found in enumerate(text.splitlines(), 1) if line in found)
    assert done.returncode == int(words.split()[3].rstrip(":"))
    assert done.stderr.startswith(f"{BATCH_FAILED}{number} {words}")
    assert not (tmp_path / "went_on").exists()


def test_templates_lie_beside_the_package():
    assert template_folder() == Path(__file__).parents[2] / "slurm"
