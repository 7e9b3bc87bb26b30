"""Megatron's model against transformers', for one and two tensor-parallel ranks."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ARCHITECTURES = ("qwen2", "qwen3", "llama")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(results, architecture, ranks):
    found = results[ranks, f"logits_{architecture}"]
    model = AutoModelForCausalLM.from_pretrained(results.folder / architecture, dtype=torch.float32).eval()
    start = 0
    for length in found["lengths"]:
        tokens = torch.from_numpy(found["tokens"][start : start + length])
        with torch.no_grad():
            expected = model(tokens[None]).logits[0].numpy()
        np.testing.assert_allclose(found["logits"][start : start + length], expected, atol=1e-4)
        start += length


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_export_is_the_folder_bit_for_bit(results, architecture, ranks):
    exported = results[ranks, f"export_{architecture}"]
    expected = load_file(results.folder / architecture / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(exported[name].view(np.int32), tensor.numpy().view(np.int32)), name


def test_drawn_weights_do_not_depend_on_tensor_parallelism(results):
    one, two = results[1, "drawn"], results[2, "drawn"]
    assert one.keys() == two.keys()
    for name, values in one.items():
        assert np.array_equal(values, two[name]), name
        if name.endswith("bias"):
            assert not values.any()
        elif values.ndim == 1:
            assert (values == 1).all()
        else:
            assert abs(values.mean()) < 0.003, name
            assert abs(values.std() - 0.02) < 0.002, name


def test_packed_attention_equals_a_loop_over_sequences(results):
    found = results[1, "attention"]
    assert found["differences"].max() < 1e-5  # outputs, gradients of queries, keys and values
    # Buckets by powers of two: {1}, {3}, {5, 8, 7} padded to 8, {12, 12}.
    assert found["slots"] == 1 + 3 + 3 * 8 + 2 * 12


@pytest.mark.parametrize("ranks", [1, 2])
def test_exported_folder_gives_the_trainers_greedy_tokens(results, ranks):
    model = AutoModelForCausalLM.from_pretrained(results.folder / f"ranks_{ranks}" / "exported").eval()
    found = results[ranks, "greedy"]
    for number, expected in enumerate(found["answers"]):
        prompt = torch.from_numpy(found[f"prompt_{number}"])[None]
        answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        assert answer[0, prompt.size(1) :].tolist() == expected.tolist()


def test_exported_folder_names_its_dtype(results):
    config = json.loads((results.folder / "ranks_2" / "exported" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "torch_dtype" not in config
