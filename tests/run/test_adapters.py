"""A whole run that trains adapters (LoRA) and sends merged weights by lanes: the weights beneath them stay as they were, the
samplers verify what the trainer computes with, and a resume goes on with the adapters that were saved."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from whole_runs import Ended, submit

from prl.config.hf_config import read_model_config
from prl.report.audit import audit, render
from prl.trainer.table import random_weights
from prl.weights.digest import digest

pytestmark = [pytest.mark.slow, pytest.mark.deadline(1200)]

STEPS, MORE, RANK = 12, 18, 4
OVERRIDES = (
    f"train.lora_rank={RANK}",
    "train.learning_rate=0.01",
    "train.sequence_parallel=true",
    "weights.transport=lanes",
    f"run.steps={STEPS}",
    "run.stop_at_reward=null",
    "run.evaluate_every_steps=0",
)
# Matrices that are one tensor of Hugging Face's each.
DIRECT = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}


def saved(ended: Ended, step: int) -> dict[str, torch.Tensor]:
    """The layers' tensors in a checkpoint, all layers in one, as torch's own reader has them."""
    folder = Path(ended.folder.checkpoint(step)) / "trainer"
    kept = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(of.size, dtype=of.properties.dtype)
        for key, of in kept.items()
        if key.startswith("decoder.layers.") and isinstance(of, TensorStorageMetadata)
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def split(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of the model beneath, and of the adapters."""
    adapters = {key: tensor for key, tensor in tensors.items() if key.endswith((".lora_a", ".lora_b"))}
    return {key: tensor for key, tensor in tensors.items() if key not in adapters}, adapters


def check_steps(ended: Ended, attempt: int, first: int, last: int) -> list[dict[str, float]]:
    steps = ended.events("step", attempt)
    assert [event.step for event in steps] == list(range(first, last + 1))
    values = [event.values for event in steps]
    assert all(math.isfinite(one["train/loss"]) and not one["train/skipped"] for one in values)
    return values


def check_sent(ended: Ended, version: str) -> None:
    """The samplers' last version is what was exported, by the digest of what they hold."""
    last = ended.events("weights")[-1]
    exported = load_file(ended.folder.export / "model.safetensors")
    assert (last.labels["version"], last.labels["digest"]) == (version, str(digest(exported)))
    assert last.values["weights/gathered_bytes"] == last.values["weights/by_files"] == 0


def test_adapters_are_trained_sent_merged_saved_and_go_on_after_a_resume(tmp_path):
    folder = tmp_path / "run"
    ended = submit(folder, "configs/quickstart.yaml", "--set", *OVERRIDES, deadline_s=500)
    assert ended.code == 0, ended.logs()
    initial = dict(random_weights(read_model_config(ended.folder.model), ended.config.run.seed))
    check_steps(ended, 1, 1, STEPS)
    updates = ended.events("weights")
    assert updates[0].labels["digest"] == str(digest(initial))  # adapters begin at nought
    assert len({event.labels["digest"] for event in updates}) == len(updates) > STEPS // 2
    check_sent(ended, f"0:{STEPS}")

    resumed = submit(folder, "--resume", folder, "--set", f"run.steps={MORE}", "run.max_lag=0", deadline_s=500)
    assert resumed.code == 0, resumed.logs()
    later = check_steps(resumed, 2, STEPS + 1, MORE)
    again = resumed.events("weights", attempt=2)[0].labels
    assert (again["version"], again["digest"]) == (f"1:{STEPS}", updates[-1].labels["digest"])
    check_sent(resumed, f"1:{MORE}")
    # Without lag trainer and sampler compute with the same weights, those with the adapters.
    assert all(values["train/lag_max"] == 0 for values in later)
    assert all(values["train/mismatch_mean_nats"] < 1e-4 for values in later)

    (beneath, adapters), (beneath_later, adapters_later) = (split(saved(resumed, step)) for step in (STEPS, MORE))
    assert beneath.keys() == beneath_later.keys()
    assert all(torch.equal(tensor, beneath_later[key]) for key, tensor in beneath.items())
    assert len(adapters) == len(adapters_later) == 2 * 4
    for key, tensor in adapters.items():
        assert tensor.abs().max() > 1e-3, key
        assert (adapters_later[key] - tensor).abs().max() > 1e-3, key

    exported = load_file(resumed.folder.export / "model.safetensors")
    assert {name for name in initial if not torch.equal(exported[name], initial[name])} == {
        name for name in initial if name.endswith("proj.weight")
    }
    for ours, theirs in DIRECT.items():
        key = f"decoder.layers.{ours}"
        for layer, weight in enumerate(beneath_later[f"{key}.weight"]):
            name = f"model.layers.{layer}.{theirs}.weight"
            assert torch.equal(weight, initial[name])
            a, b = (adapters_later[f"{key}.lora_{factor}"][layer].double() for factor in "ab")
            torch.testing.assert_close(exported[name].double(), weight.double() + 32 / RANK * b @ a, rtol=1e-6, atol=1e-7)

    result = audit(folder)
    assert result.passed, render(result)
    assert result.trained == MORE * 512
