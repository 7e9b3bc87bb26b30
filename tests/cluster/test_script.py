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


def script(nodes, run=RUN, after=None, **cluster):
    config = replace(Config(), run={"name": "my run"}, cluster={"python": "/opt/python", **cluster, "nodes": nodes})
    return render(config, make_split(config), run, 2, after=after)


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
    number = next(n for n, found in enumerate(text.splitlines(), 1) if line in found and found[0] != " ")
    assert done.returncode == int(words.split()[3].rstrip(":"))
    assert done.stderr.startswith(f"{BATCH_FAILED}{number} {words}")
    assert not (tmp_path / "went_on").exists()


# In place of srun: says which step it is, and which attempt the run is taken for; the first step tells a later one's number.
SRUN = """
case "$*" in
*prl.cluster.begin) echo "step before: $*" >&2; echo a banner; echo $NUMBER ;;
*) echo "attempt $PRL_ATTEMPT" ;;
esac
"""
SCONTROL = "echo NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 State=IDLE"
LISTS = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n2"}


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(
    ("after", "restarts", "number", "attempt"),
    [
        (None, None, "", "2"),
        (None, "0", "", "2"),
        (None, "1", "3", "3"),  # put into the queue again
        ("77", None, "12", "12"),  # of a chain
        ("77", None, "", None),  # of the chain of a run that has ended
    ],
)
def test_a_job_learns_which_attempt_it_is_and_writes_to_that_ones_log(nodes, after, restarts, number, attempt, tmp_path):
    run_folder = RunFolder(tmp_path / "my run")
    run_folder.logs(int(number or 2)).mkdir(parents=True)
    environment = LISTS | {"NUMBER": number} | ({} if restarts is None else {"SLURM_RESTART_COUNT": restarts})
    done = run(script(nodes, run_folder, after), tmp_path, environment, scontrol=SCONTROL, srun=SRUN)
    assert done.returncode == 0, done.stderr
    log = run_folder.batch_log(int(number or 2))
    own = log.read_text() if log.exists() else done.stdout
    assert own == ("" if attempt is None else f"attempt {attempt}\n")
    asked = after is not None or restarts == "1"
    before = "step before: --nodes=1 --ntasks=1 --export=ALL --mpi=none --cpu-bind=none /opt/python -m prl.cluster.begin\n"
    assert done.stderr == (before if asked else "")


def test_a_job_of_a_chain_waits_for_the_end_of_the_one_before_it_however_it_came_about():
    mine = {"dependency": "afterok:5", "exclusive": True}
    first, follower = directives(script(3, sbatch=mine)), directives(script(3, sbatch=mine, after="77"))
    assert first.count("--dependency=afterok:5") == 2
    hetjob = first.index("hetjob")
    train, sample = ([line for line in part if "dependency" not in line] for part in (first[:hetjob], first[hetjob:]))
    assert follower == [*(line.replace("batch.log", "chain.log") for line in train), "--dependency=afterany:77", *sample]
    assert directives(script(1, after="77"))[-1] == "--dependency=afterany:77"


def test_an_attempt_that_cannot_be_begun_ends_the_script(tmp_path):
    done = run(script(1, after="77"), tmp_path, LISTS, scontrol=SCONTROL, srun="echo 3; exit 5")
    assert done.returncode == 5
    assert "batch script: line" in done.stderr


def test_templates_lie_beside_the_package():
    assert template_folder() == Path(__file__).parents[2] / "slurm"
