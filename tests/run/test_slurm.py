"""Whole runs as heterogeneous jobs of the lab cluster."""

import json
import statistics
import subprocess

import pytest
from whole_runs import ROOT, command, learned, outcome, steps_of, submit, wait_until

from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.deadline(600)]
SHORT = ["--nodes", "3", "--follow", "--set", "run.steps=20", "run.stop_at_reward=null"]


def rewards(ended):
    return [event.values["data/reward_mean"] for event in ended.events("step")]


def plan_of(ended):
    return json.loads(RunFolder(ended.folder.path).plan(1).read_text())


def sacct(job_id):
    asked = ["sacct", "-j", job_id, "-X", "-P", "-n", "-o", "JobID,State,NNodes"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    return {job: (state, int(nodes)) for job, state, nodes in (line.split("|") for line in lines)}


@pytest.fixture(scope="module")
def het_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("het")
    staged = ["cluster.stage_model=always", f"cluster.local_folder={folder}/disk"]
    return submit(folder / "run", "configs/quickstart.yaml", *SHORT, *staged)


def test_a_het_job_learns_and_ends_well(het_run):
    assert het_run.code == 0, het_run.logs()
    assert het_run.exit["steps"] == 20
    assert statistics.mean(rewards(het_run)[-5:]) > 1.15 * statistics.mean(rewards(het_run)[:5])


def test_each_component_is_a_job_of_its_own_in_the_accounting(het_run):
    job = json.loads((het_run.folder.attempt(1) / "submission.json").read_text())
    assert job["kind"] == "het"
    states = sacct(job["job_id"])
    assert states == {f"{job['job_id']}+0": ("COMPLETED", 1), f"{job['job_id']}+1": ("COMPLETED", 2)}


def test_the_plan_puts_trainers_and_samplers_on_nodes_of_their_own(het_run):
    plan = plan_of(het_run)
    assert len({node["name"] for node in plan["nodes"]}) == 3
    places = {(child["role"], child["index"]): child["node"] for child in plan["children"]}
    assert places["trainer", 0] == places["trainer", 1] == 0
    assert {places["sampler", 0], places["sampler", 1]} == {1, 2}


def test_each_node_read_its_own_copy_of_the_model(het_run):
    copies = [event for event in het_run.events("model") if event.values["model/copied_bytes"] > 0]
    assert sorted(event.index for event in copies) == [0, 1, 2]
    log = het_run.folder.path / "attempt_001" / "submitit"
    said = "\n".join(path.read_text() for path in log.glob("*_log.err"))
    assert said.count(f"the model is read from {het_run.folder.path.parent}/disk/prl-") == 3
    assert list((het_run.folder.path.parent / "disk").iterdir()) == []


@pytest.mark.slurm_netns
def test_every_node_has_an_address_of_its_own(het_run):
    assert len({node["address"] for node in plan_of(het_run)["nodes"]}) == 3


def test_both_samplers_answered(het_run):
    replicas = {turn.replica for group in het_run.groups() for rollout in group.rollouts for turn in rollout.turns}
    assert replicas == {0, 1}


@pytest.mark.slow
def test_conventional_mode_alternates(tmp_path):
    ended = submit(tmp_path / "run", "configs/quickstart.yaml", *SHORT, "run.mode=conventional", "run.steps_per_generation=4")
    assert ended.code == 0, ended.logs()
    assert statistics.mean(rewards(ended)[-4:]) > 1.15 * statistics.mean(rewards(ended)[:4])
    lags = {event.step: event.values["train/lag_mean"] for event in ended.events("step")}
    assert lags == {step: (step - 1) % 4 for step in range(1, 21)}  # one version a generation, trained on four times
    turns = [turn for group in ended.groups() for rollout in group.rollouts for turn in rollout.turns]
    assert max(len(turn.versions) for turn in turns) == 1


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_homogeneous_job_does_everything(tmp_path, nodes):
    short = ["cluster.mode=plain", "run.steps=4", "run.stop_at_reward=null", "run.evaluate_every_steps=0"]
    ended = submit(tmp_path / "run", "configs/quickstart.yaml", "--nodes", str(nodes), "--follow", "--set", *short)
    assert ended.code == 0, ended.logs()
    job = json.loads((ended.folder.attempt(1) / "submission.json").read_text())
    assert job["kind"] == "plain"
    assert sacct(job["job_id"]) == {job["job_id"]: ("COMPLETED", nodes)}
    assert ended.exit["steps"] == 4


@pytest.mark.slow
@pytest.mark.deadline(1800)
@pytest.mark.parametrize("mode", ["het", "plain"])
def test_jobs_reach_the_accuracy_of_the_local_run(tmp_path, quickstart, mode):
    """All of them end when the held-out reward has been 0.9 twice."""
    where = ["--nodes", "3", "--follow", "--set", f"cluster.mode={mode}"]
    ended = submit(tmp_path / "run", "configs/quickstart.yaml", *where, deadline_s=1200)
    assert (ended.code, quickstart.code) == (0, 0), ended.logs()
    kind = json.loads(ended.folder.submission(1).read_text())["kind"]
    assert (kind, json.loads(quickstart.folder.submission(1).read_text())["kind"]) == (mode, "local")
    assert learned(ended), ended.held_out()
    assert learned(quickstart), quickstart.held_out()


@pytest.fixture
def submitted(tmp_path):
    """Submits a run without following it: its folder and the job's id. The job does not outlive the test."""
    jobs = []

    def start(*overrides):
        folder = RunFolder(tmp_path / "run")
        where = ["--set", "run.stop_at_reward=null", "run.evaluate_every_steps=0", *overrides]
        subprocess.run(command("configs/quickstart.yaml", "--nodes", "3", *where, folder=folder.path), cwd=ROOT, check=True)
        jobs.append(json.loads((folder.attempt(1) / "submission.json").read_text())["job_id"])
        return folder, jobs[-1]

    yield start
    for job in jobs:
        subprocess.run(["scancel", job], check=False, timeout=30)


def test_a_job_that_is_warned_saves_and_is_queued_again_as_the_next_attempt(submitted):
    folder, job = submitted("run.steps=100000", "cluster.requeue=true", "train.checkpoint_every_steps=0")
    wait_until(lambda: len(steps_of(folder)) >= 3, 240, "three steps")
    subprocess.run(["scancel", "--signal=USR1", job], check=True, timeout=30)  # to all tasks of the step, as Slurm's warning
    wait_until(lambda: outcome(folder, 1), 60, "the end of the first attempt")
    left = outcome(folder, 1)
    assert (left["outcome"], left["reason"], left["next"]) == ("left", "time limit", "requeue")
    assert [step for step, _ in folder.manifests()] == [left["steps"]]
    wait_until(lambda: (2, left["steps"] + 2) in steps_of(folder), 400, "steps of the second attempt")
    assert folder.latest.readlink().name == "attempt_002"
    folder.stop.touch()
    wait_until(lambda: outcome(folder, 2), 90, "the end of the second attempt")
    assert outcome(folder, 2)["reason"] == "stopped"
    result = audit(folder.path)
    assert result.passed, render(result)
    assert result.trained_again == 0


def test_a_time_limit_that_is_near_is_noticed_by_slurms_own_warning(submitted):
    limit = ("cluster.time_min=30", "cluster.warning_s=40")
    folder, job = submitted("run.steps=100000", *limit, "train.checkpoint_every_steps=0")
    wait_until(lambda: steps_of(folder), 240, "a step")
    subprocess.run(["scontrol", "update", f"JobId={job}", "EndTime=now+60"], check=True, timeout=30)
    wait_until(lambda: outcome(folder, 1), 120, "the end before the time limit")
    left = outcome(folder, 1)
    assert (left["outcome"], left["reason"], left["next"]) == ("left", "time limit", "stop")
    assert [step for step, _ in folder.manifests()] == [left["steps"]]


@pytest.mark.slow
def test_a_cancelled_job_is_told_from_one_that_is_over_its_time(submitted):
    folder, job = submitted("run.steps=100000")
    wait_until(lambda: steps_of(folder), 240, "a step")
    subprocess.run(["scancel", job], check=True, timeout=30)
    wait_until(lambda: outcome(folder, 1), 60, "the end")
    assert (outcome(folder, 1)["outcome"], outcome(folder, 1)["reason"]) == ("cancelled", "cancelled")
