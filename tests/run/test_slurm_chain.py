"""A run whose time limit is too short for it, over several jobs of a chain."""

import json
import os
import subprocess

import pytest
from whole_runs import ROOT, command, outcome, steps_of, wait_until

from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.deadline(1500)]

STEPS = 80
# A step takes a second at least, whatever the machine does besides.
SLOW_DIGITS = """
import asyncio
from prl.domains import digits
from prl.domains.digits import check_options, load_problems

async def generate_rollout(problem, sampler, context):
    await asyncio.sleep(1.0)
    return await digits.generate_rollout(problem, sampler, context)
"""


def job_of(folder, attempt):
    return json.loads(folder.submission(attempt).read_text())["job_id"]


def state(job):
    asked = ["sacct", "-j", job, "-X", "-P", "-n", "-o", "State"]
    return set(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.split())


def test_it_finishes_over_three_attempts_and_the_rest_of_the_chain_is_taken_out_of_the_queue(tmp_path):
    (tmp_path / "slow_digits.py").write_text(SLOW_DIGITS)
    folder = RunFolder(tmp_path / "run")
    small = ["domains=[{name: slow_digits}]", "run.groups_per_step=4", "run.rollouts_per_group=4", "run.max_lag=0"]
    until = [f"run.steps={STEPS}", "run.stop_at_reward=null", "run.evaluate_every_steps=0", "train.checkpoint_every_steps=0"]
    limit = ["cluster.time_min=30", "cluster.warning_s=40"]
    arguments = ["configs/quickstart.yaml", "--nodes", "3", "--chain", "4", "--set", *small, *until, *limit]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(command(*arguments, folder=folder.path), cwd=ROOT, env=environment, check=True, timeout=60)
    jobs = json.loads(folder.submission(1).read_text())["chain"]
    try:
        for attempt in (1, 2):
            own = [0] if attempt == 1 else [outcome(folder, 1)["steps"]]
            wait_until(
                lambda attempt=attempt, own=own: (attempt, own[0] + 3) in steps_of(folder), 300, f"steps of attempt {attempt}"
            )
            # The limit becomes too short; Slurm itself warns the job.
            lower = ["scontrol", "update", f"JobId={job_of(folder, attempt)}", "EndTime=now+60"]
            subprocess.run(lower, check=True, timeout=30)
            wait_until(lambda attempt=attempt: outcome(folder, attempt), 120, f"the end of attempt {attempt}")
            left = outcome(folder, attempt)
            assert (left["outcome"], left["reason"], left["next"]) == ("left", "time limit", "chain"), left
            assert own[0] < left["steps"] < STEPS
            assert max(step for step, _ in folder.manifests()) == left["steps"]
        wait_until(lambda: outcome(folder, 3), 400, "the end of the third attempt")
        ended = outcome(folder, 3)
        assert (ended["outcome"], ended["steps"], ended["next"]) == ("done", STEPS, "stop"), ended
        wait_until(lambda: "CANCELLED" in state(jobs[3]), 60, "the end of the job that is left")
    finally:
        subprocess.run(["scancel", *reversed(jobs)], check=False, timeout=30)
    assert folder.attempts() == [1, 2, 3]
    assert [job_of(folder, attempt) for attempt in (1, 2, 3)] == jobs[:3]
    assert sorted(step for _, step in steps_of(folder)) == list(range(1, STEPS + 1))  # each once
    result = audit(folder.path)
    assert result.passed, render(result)
    assert result.trained_again == 0
    assert list((folder.export).iterdir())
