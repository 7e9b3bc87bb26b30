"""The sampler that all tests of this folder ask, and the models that it gets."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from lab import Lab
from launch import WEIGHTS, sampler
from tiny_models import tiny_model
from transformers import Qwen2ForCausalLM


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One sampler for all tests; it takes deltas, too."""
    with sampler(tmp_path_factory.mktemp("sampler"), weights=replace(WEIGHTS, delta=True)) as made:
        made.before = [
            made.generate([1], max_tokens=1).result(30),
            made.request("GET", "/prl/state"),
            made.request("GET", "/health"),
            made.ask([1], max_tokens=1).result(30),
        ]
        yield made


@pytest.fixture(scope="session")
def models() -> list[Qwen2ForCausalLM]:
    return [tiny_model(seed) for seed in range(6)]
