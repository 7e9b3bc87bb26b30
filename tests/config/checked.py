"""What the tests of the checks share: a configuration without problems, a model's folder, and the problems found."""

import dataclasses
import json

import pytest
from empty_weights import write_model, write_tensors
from tokenizers import Tokenizer, models

from prl.config.checks import check
from prl.config.hf_config import UnsupportedModelError, model_config
from prl.config.load import ConfigError, replace
from prl.config.schema import Config
from prl.domains.options import DomainOptions

GIB = 1024**3

LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def good(tmp_path):
    config = replace(
        Config(),
        run={"folder": str(tmp_path / "runs" / "one")},
        model={"init": "random", "architecture": "qwen2"},
        sample={"max_model_len": 64, "kv_cache_mib": 64},
        actor={"max_tokens": 5},
        train={"tensor_parallel": 2},
        preprocess={"pack_tokens": 128},
    )
    return dataclasses.replace(config, domains=(DomainOptions(name="digits"),))


def problems(config, **options):
    with pytest.raises(ConfigError) as caught:
        check(config, memory_bytes=16 * GIB, **options)
    return str(caught.value).splitlines()


def model_folder(path, **changes):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    try:
        write_model(path / "model.safetensors", model_config({**LLAMA, **changes}))
    except (UnsupportedModelError, KeyError):
        write_tensors(path / "model.safetensors", {"a": ("U8", [8])})
    return {"path": str(path), "init": "pretrained", "architecture": None}
