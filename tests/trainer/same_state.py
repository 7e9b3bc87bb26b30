"""What must hold of a checkpoint's weights and moments wherever they go, as resumes.py tells of them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from checkpoint_layouts import CONFIGS, OPTIONS
from safetensors.torch import load_file

from prl.trainer.export import export_checkpoint

State = Mapping[str, np.ndarray]


def assert_same_state(model: str, resumed: State, saved: State) -> None:
    """Weights and moments bit for bit; the weights that the model has are those of the optimizer, rounded to its dtype."""
    dtype = getattr(torch, OPTIONS[model].dtype)
    assert resumed.keys() == saved.keys()
    rounded = 0
    for key in saved.keys() - {"steps"}:
        assert np.array_equal(resumed[key], saved[key]), key
        kind, _, name = key.partition(":")
        if kind == "param":
            assert np.abs(saved[f"exp_avg:{name}"]).max() > 1e-6, name
            assert np.array_equal(torch.from_numpy(saved[key]).to(dtype).float(), saved[f"model:{name}"]), name
            rounded += not np.array_equal(saved[key], saved[f"model:{name}"])
    assert bool(rounded) is (dtype is torch.bfloat16)


def assert_goes_on(model: str, resumed: State, saved: State, *, same_layout: bool) -> None:
    """Steps after the checkpoint: in the same layout bit for bit, in another one within 1e-5 of a loss in float32."""
    found, expected = resumed["steps"], saved["steps"]
    assert len(set(expected[:, 0])) == len(expected)  # the steps do something
    if same_layout:
        assert np.array_equal(found, expected)
    elif OPTIONS[model].dtype == "float32":
        np.testing.assert_allclose(found[:, 0], expected[:, 0], atol=1e-5)
        np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=1e-4)


def assert_exported(model: str, checkpoint: Path, saved: State, folder: Path) -> None:
    """A checkpoint is exported, without process groups, to the weights that were gathered from the ranks as they saved it:
    bit for bit, in the model's dtype."""
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIGS[model]))
    assert not torch.distributed.is_initialized()
    export_checkpoint(checkpoint / "trainer", source, folder / "exported")
    found = load_file(folder / "exported" / "model.safetensors")
    gathered = {key.removeprefix("model:"): values for key, values in saved.items() if key.startswith("model:")}
    assert found.keys() == gathered.keys()
    for name, tensor in found.items():
        assert tensor.dtype is getattr(torch, OPTIONS[model].dtype)
        assert np.array_equal(tensor.float().numpy().view(np.int32), gathered[name].view(np.int32)), name
