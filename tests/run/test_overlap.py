"""Whole runs whose versions are sent while the trainer computes the next step's passes (weights.overlap)."""

import pytest
from safetensors.torch import load_file
from whole_runs import Ended, learned, submit

from prl.report.audit import audit, render
from prl.weights.digest import digest

pytestmark = [pytest.mark.slow, pytest.mark.deadline(1200)]

OVERRIDES = ("weights.transport=lanes", "weights.overlap=true")


def check_versions(ended: Ended) -> None:
    """Each is another one, and all go by lanes; the last one is what was exported, by the digest of what the samplers hold."""
    assert ended.code == 0, ended.logs()
    updates = ended.events("weights")
    versions = [int(event.labels["version"].split(":")[1]) for event in updates]
    assert versions == sorted(set(versions))
    assert versions[-1] == ended.events("step")[-1].step
    assert len({event.labels["digest"] for event in updates}) == len(updates)
    assert updates[-1].labels["digest"] == str(digest(load_file(ended.folder.export / "model.safetensors")))
    assert all(event.values["weights/by_files"] == event.values["weights/gathered_bytes"] == 0 for event in updates)
    result = audit(ended.folder.path)
    assert result.passed, render(result)


def test_a_run_learns_whose_versions_go_out_beside_the_passes(tmp_path):
    ended = submit(tmp_path / "run", "configs/quickstart.yaml", "--set", *OVERRIDES)
    check_versions(ended)
    assert learned(ended), ended.held_out()


def test_tokens_of_no_lag_were_sampled_with_the_trainer_s_own_weights(tmp_path):
    """Whatever the label of a version says: another one's log-probs would differ by far more."""
    short = ("run.max_lag=0", "run.steps=8", "run.stop_at_reward=null", "run.evaluate_every_steps=0")
    ended = submit(tmp_path / "run", "configs/quickstart.yaml", "--set", *OVERRIDES, *short)
    check_versions(ended)
    steps = [event.values for event in ended.events("step")]
    assert len(steps) == 8
    assert all(values["train/lag_max"] == 0 for values in steps)
    assert all(values["train/mismatch_mean_nats"] < 1e-4 for values in steps)
