"""A whole run with a value head, one rollout a problem: it is trained beside the policy, saved, and goes on after a resume."""

import math

import pytest
from whole_runs import Ended, submit

from prl.report.audit import audit, render

pytestmark = [pytest.mark.slow, pytest.mark.deadline(1200)]

STEPS, MORE = 16, 20
OVERRIDES = (
    "train.value_head=true",
    "train.gae_lambda=0.95",
    "train.value_rate_factor=2",  # of a rate of 1e-3: with more the values swing about the mean reward, 0.06, by as much
    "preprocess.advantage=reward",
    "run.groups_per_step=128",
    "run.rollouts_per_group=1",
    f"run.steps={STEPS}",
    "run.stop_at_reward=null",
    "run.evaluate_every_steps=0",
)


def steps_of(ended: Ended, attempt: int) -> list[dict[str, float]]:
    return [event.values for event in ended.events("step", attempt)]


def mean_of(steps: list[dict[str, float]], name: str) -> float:
    return sum(values[name] for values in steps) / len(steps)


def test_a_value_head_learns_in_a_whole_run_and_goes_on_after_a_resume(tmp_path):
    folder = tmp_path / "run"
    ended = submit(folder, "configs/quickstart.yaml", "--set", *OVERRIDES, deadline_s=500)
    assert ended.code == 0, ended.logs()
    first = steps_of(ended, 1)
    assert len(first) == STEPS
    logged = ("train/loss_value", "train/value_mean", "train/explained_variance", "train/loss_policy")
    assert all(math.isfinite(values[name]) for values in first for name in logged)
    assert not any(values["train/skipped"] for values in first)
    assert all(values["data/rollouts"] == 128 for values in first)
    # An untrained head says 0 of all answers; a trained one knows at least their mean reward. (The loss need not fall: while
    # the policy learns rewards vary more.)
    assert abs(first[0]["train/value_mean"]) < 0.01
    assert mean_of(first[-8:], "train/value_mean") == pytest.approx(mean_of(first[-8:], "data/reward_mean"), rel=0.3)

    resumed = submit(folder, "--resume", folder, "--set", f"run.steps={MORE}", deadline_s=500)
    assert resumed.code == 0, resumed.logs()
    later = steps_of(resumed, 2)
    assert len(later) == MORE - STEPS
    # It goes on with the head that was saved: a new one would say 0 again.
    assert abs(later[0]["train/value_mean"] - first[-1]["train/value_mean"]) < 0.5 * abs(first[-1]["train/value_mean"])
    result = audit(folder)
    assert result.passed, render(result)
    assert result.trained == MORE * 128
