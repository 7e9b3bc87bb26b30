"""prl-submit --chain N: several jobs of one run, each to go on where the one before it left."""

import json
import re

import pytest
from stand_ins import stand_in
from submitting import checkpoint

from prl.cli import submit
from prl.cli.job_end import follow_job
from prl.cluster import claims, submission
from prl.cluster.begin import begin
from prl.cluster.record import read_record
from prl.cluster.submission import reopen
from prl.config.load import load
from prl.runfolder.outcome import Outcome
from prl.runfolder.paths import RunFolder

UP = "case $1 in ping) echo 'Slurmctld(primary) at login is UP' ;; show) echo 'ClusterName = lab' ;; esac"
NODES = "printf 'main*|n1|8|4000|(null)|infinite\\nmain*|n2|8|4000|(null)|infinite\\nmain*|n3|8|4000|(null)|infinite\\n'"
LEFT = Outcome("left", "the time limit is near", "time limit", "chain", "time limit", code=75, steps=3)
GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def sbatch(folder, fails_at=None):
    """Job 63, 65, ..., a heterogeneous one each."""
    fail = f"[ $id = {fails_at} ] && {{ echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; }}"
    return f"""
id=$(($(cat {folder}/last_id 2>/dev/null || echo 61) + 2)); echo $id >{folder}/last_id
{fail if fails_at else ":"}
echo "Submitted batch job $id"
"""


def queue(states):
    """squeue, for jobs by their ids; those that have no state are not in the queue."""
    lines = [
        f"case ,$3, in *,{job},*) echo '{job}+0|{state}|N/A||{reason}'; echo '{job}+1|{state}|N/A||None' ;; esac"
        for job, (state, reason) in states.items()
    ]
    return "\n".join(lines) or ":"


@pytest.fixture
def programs(config, monkeypatch):
    monkeypatch.setattr(claims, "snapshot_code", lambda *_: None)
    quiet = {"scontrol": UP, "sinfo": NODES, "srun": ":", "squeue": GONE, "scancel": ":", "sacct": "echo 'JobID|State'"}
    return lambda **lines: stand_in(config, monkeypatch, **{**quiet, "sbatch": sbatch(config), **lines})


@pytest.fixture
def run(config, programs, capsys):
    """A chain of three jobs that was submitted."""
    programs()
    assert submit.main(["c.yaml", "--nodes", "3", "--chain", "3"]) == 0
    capsys.readouterr()
    return RunFolder(config / "runs/one")


def test_all_jobs_are_sent_each_behind_the_one_before_it_and_recorded(config, programs, capsys):
    programs()
    assert submit.main(["c.yaml", "--nodes", "3", "--chain", "3"]) == 0
    assert "job 63 submitted, and behind it in its chain job 65 67; what to do next:" in capsys.readouterr().out
    run = RunFolder(config / "runs/one")
    assert run.attempts() == [1]
    record = json.loads(run.submission(1).read_text())
    assert (record["job_id"], record["chain"], record["cluster"]) == ("63", ["63", "65", "67"], "lab")
    assert load(run.config).cluster.chain == 3
    scripts = [run.script(1), run.follower_script(1, 2), run.follower_script(1, 3)]
    dependencies = [re.findall(r"^#SBATCH --dependency=(.*)$", path.read_text(), re.MULTILINE) for path in scripts]
    assert dependencies == [[], ["afterany:63"], ["afterany:65"]]
    assert sorted(path.name for path in (run.attempt(1) / "submitit").glob("*_submitted.pkl")) == [
        f"{job}_submitted.pkl" for job in (63, 65, 67)
    ]


def test_where_one_is_refused_none_is_left(config, programs, capsys):
    calls = programs(sbatch=sbatch(config, fails_at=67))
    assert submit.main(["c.yaml", "--nodes", "3", "--chain", "3"]) == 1
    error = capsys.readouterr().err
    assert "QOSMaxSubmitJobPerUserLimit" in error
    assert "a limit of your account or QOS" in error
    assert calls.read_text().splitlines()[-1] == "scancel 65 63"
    assert list((config / "runs").iterdir()) == []


def test_what_would_be_sent_is_shown(config, capsys):
    assert submit.main(["c.yaml", "--nodes", "3", "--time", "20", "--chain", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "at the time limit of 20 minutes it has used 1 node-hours, and 3 at that of all 3 jobs of the chain\n" in out
    first, follower = out.split("batch script of job 2 to 3 of the chain, with the id of the one before it for JOB:\n")
    assert "--dependency" not in first
    assert "\n#SBATCH --dependency=afterany:JOB\n#SBATCH hetjob\n" in follower
    assert not (config / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chain", "2"], "cluster.chain = 2: is for Slurm jobs; ask for nodes with --nodes N, or set it to 1"),
        (
            ["--nodes", "3", "--chain", "2", "--set", "cluster.requeue=true"],
            "cluster.chain = 2: with cluster.requeue = true ",
        ),
        (["--nodes", "3", "--chain", "0"], "cluster.chain = 0: must be at least 1 and below 100"),
    ],
)
def test_what_cannot_be(config, capsys, arguments, words):
    assert submit.main(["c.yaml", "--dry-run", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_whole_chain_is_listed_and_ended(run, programs, capsys):
    waits = {"65": ("PENDING", "Dependency"), "67": ("PENDING", "Dependency")}
    calls = programs(squeue=queue({"63": ("RUNNING", "None"), **waits}))
    assert submit.main(["--status", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"run {run}, attempt 1, job 63 of cluster lab",
        "  train  RUNNING",
        "  sample RUNNING",
        "  behind it in the chain: job 65 PENDING (Dependency)",
        "  behind it in the chain: job 67 PENDING (Dependency)",
    ]
    assert submit.main(["--cancel", str(run)]) == 0
    assert calls.read_text().splitlines()[-1] == "scancel 67 65 63"  # the last first: it would begin once the others are gone
    assert "attempt 1, is cancelled, and job 65 67 behind it in its chain is cancelled; see" in capsys.readouterr().out
    programs(squeue=queue(waits))
    assert submit.main(["--cancel", str(run)]) == 0
    assert calls.read_text().splitlines()[-1] == "scancel 67 65 63"
    assert "attempt 1, had ended, and job 65 67 behind it in its chain is cancelled; see" in capsys.readouterr().out
    calls.unlink()
    programs()
    assert submit.main(["--cancel", str(run)]) == 0
    assert "job 63 of cluster lab has ended: " in capsys.readouterr().out
    assert "scancel" not in calls.read_text()


def test_a_run_is_not_resumed_while_jobs_of_its_chain_wait(run, programs, capsys):
    run.checkpoint(3).mkdir()
    checkpoint(run.path, 3)
    LEFT.write(run.exit(1))
    programs(squeue=queue({"67": ("PENDING", "Dependency")}))
    assert submit.main(["--resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert "job 67 of the chain behind attempt 1 is still in the queue, to go on with the run by itself" in error
    assert f"end it first: prl-submit --cancel {run}" in error
    programs()
    assert submit.main(["--resume", str(run), "--dry-run"]) == 0
    assert submit.main(["--resume", str(run)]) == 0
    assert read_record(run, 2).chain == ("69", "71", "73")


def test_a_chain_is_followed_over_its_jobs_to_the_end_of_the_run(run, programs, capsys, monkeypatch):
    monkeypatch.setattr(submission, "SLURM_POLL_S", 0.0)
    config = load(run.config)
    programs(squeue=queue({"65": ("PENDING", "Dependency"), "67": ("PENDING", "Dependency")}))
    LEFT.write(run.exit(1))
    first = reopen(run, 1)
    waited = []

    def begins(seconds):
        """While the second job of the chain is waited for, it begins, and dies without a word; so the third one begins."""
        waited.append(seconds)
        if len(waited) == 2:
            assert begin(run, "65")[0] == 2
            run.plan(2).write_text("{}")
            programs(squeue=queue({"65": ("NODE_FAIL", "None")}))
            assert begin(run, "67")[0] == 3
            Outcome("done", "all steps are trained", "done", "stop", "done", code=0).write(run.exit(3))

    first.sleep = begins
    assert follow_job(first, config, lambda: None) == 0
    said = capsys.readouterr().out
    assert "attempt 1 left: the time limit is near; waiting for the next job of the chain\n" in said
    assert "attempt 1 left: the time limit is near; job 65 goes on as attempt 2\n" in said
    silent = "node failure: the first process ended without a word; Slurm says of the job: NODE_FAIL"  # the queue does
    assert re.search(rf"attempt 2 failed: {silent}.*; job 67 goes on as attempt 3\n", said)
    assert "done: all steps are trained (exit code 0)\n" in said


def test_a_chain_whose_other_jobs_were_cancelled_is_not_waited_for(run, programs, capsys):
    programs()
    LEFT.write(run.exit(1))
    assert follow_job(reopen(run, 1), load(run.config), lambda: None) == 75
    assert "left: the time limit is near (exit code 75)" in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["done", "error", "stopped"])
def test_a_run_that_has_ended_is_not_followed_any_further_though_jobs_of_its_chain_still_wait(run, programs, capsys, reason):
    programs(squeue=queue({"65": ("PENDING", "Dependency"), "67": ("PENDING", "Dependency")}))
    Outcome("failed" if reason == "error" else "done", "the cause", reason, "stop", reason, code=1).write(run.exit(1))
    assert follow_job(reopen(run, 1), load(run.config), lambda: None) == 1
    assert "the cause (exit code 1)" in capsys.readouterr().err
