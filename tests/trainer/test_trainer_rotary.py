"""Rotary frequencies and attention scale of every supported scaling, against transformers' own."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from prl.config.hf_config import model_config
from prl.trainer.rotary import attention_scale, inverse_frequencies

SIZES = {"vocab_size": 51, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", **LLAMA3},
        YARN,
        {**YARN, "attention_factor": 0.7, "beta_fast": 16, "beta_slow": 2},
        {**YARN, "truncate": False},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_frequencies_and_scale_equal_transformers(scaling, form):
    raw = {"model_type": "llama", **SIZES, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6}
    if form == "rope_parameters":  # transformers 5's form, and 4's
        raw |= {"rope_parameters": {"rope_theta": 5e5, **scaling}}
    else:
        raw |= {"rope_theta": 5e5, "rope_scaling": {"type": scaling["rope_type"], **scaling}}
    model = model_config(raw)
    config = LlamaConfig(**raw)
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(model), frequencies, rtol=1e-6, atol=0)
    assert attention_scale(model) == pytest.approx(factor**2 / math.sqrt(32))


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
        {"rope_scaling": {**YARN, "rope_theta": 7e4}, "rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN, "rope_theta": 2e5},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 2e5},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 3e5}, "rope_theta": 2e5},
        {"rope_scaling": YARN, "original_max_position_embeddings": 512},
        {"rope_theta": 2e5},
        {},
    ],
    ids=str,
)
def test_of_several_places_the_one_that_transformers_takes(tmp_path, keys):
    raw = {"model_type": "llama", **SIZES, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, **keys}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(tmp_path)
    model = model_config(raw)
    assert model.rope_theta == config.rope_parameters["rope_theta"]
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        assert model.rope_scaling is None
        return
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(model), frequencies, rtol=1e-6, atol=0)
    assert attention_scale(model) == pytest.approx(factor**2 / math.sqrt(32))
