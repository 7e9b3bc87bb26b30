"""A whole run of a mixture of experts, which two trainer ranks share and samplers take in flight, by lanes."""

import math

import pytest
from safetensors.torch import load_file
from whole_runs import submit

from prl.weights.digest import digest

pytestmark = [pytest.mark.slow, pytest.mark.deadline(900)]

STEPS = 12
OVERRIDES = (
    "model.architecture=qwen3_moe",
    "model.experts=4",
    "model.experts_per_token=2",
    "model.expert_ffn_size=64",
    "train.sequence_parallel=true",
    "train.expert_parallel=2",
    "weights.transport=lanes",
    f"run.steps={STEPS}",
    "run.stop_at_reward=null",
    "run.evaluate_every_steps=0",
)


def test_a_mixture_of_experts_trains_while_it_samples(tmp_path):
    ended = submit(tmp_path / "run", "configs/quickstart.yaml", "--set", *OVERRIDES, deadline_s=800)
    assert ended.code == 0, ended.logs()

    updates = ended.events("weights")
    assert [event.labels["version"] for event in updates] == [f"0:{step}" for step in range(STEPS + 1)]
    assert len({event.labels["digest"] for event in updates}) == STEPS + 1  # every step changed the weights
    exported = load_file(ended.folder.export / "model.safetensors")
    experts = {name for name in exported if ".mlp.experts." in name}
    assert len(experts) == 2 * 4 * 3
    assert str(digest(exported)) == updates[-1].labels["digest"]

    steps = [event.values for event in ended.events("step")]
    assert len(steps) == STEPS
    assert all(math.isfinite(values["train/loss"]) and not values["train/skipped"] for values in steps)
    assert max(values["train/lag_max"] for values in steps) >= 1  # it is asynchronous
    # At lag 0 trainer and sampler compute the same function of the same weights, whatever ranks hold the experts.
    assert steps[0]["train/lag_max"] == 0
    assert steps[0]["train/mismatch_mean_nats"] < 1e-4
    assert all(values["train/mismatch_mean_nats"] < 0.3 for values in steps)

    turns = [turn for group in ended.groups() for rollout in group.rollouts for turn in rollout.turns]
    assert len({span.version for turn in turns for span in turn.versions}) >= STEPS // 2
