"""The configurations that come with prl, as far as they can be checked without their models and data."""

from pathlib import Path

import pytest

from prl.config.load import load
from prl.domains.api import DomainError
from prl.domains.registry import check_domain

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_there_are_some():
    assert {path.stem for path in CONFIGS} >= {"quickstart", "smollm2_gsm8k_cpu", "qwen7b"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_keys_are_known_and_domains_take_their_options(path):
    for domain in load(path).domains:
        try:
            check_domain(domain.name, domain.options)
        except DomainError as error:
            assert "there is no file" in str(error)  # noqa: PT017 (data that do not come with prl)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_figures_fit_each_other(path):
    config = load(path)
    assert config.actor.temperature == config.actor.top_p == 1.0  # what training assumes
    assert config.actor.max_tokens < config.sample.max_model_len <= config.preprocess.pack_tokens
    assert config.run.rollouts_per_group <= config.sample.max_num_seqs  # one request a group
    assert config.actor.request_s <= config.actor.rollout_s <= config.control.wait_s
    needs_verifier = any(domain.name == "gsm8k" for domain in config.domains)
    assert (config.verifier.processes > 0) == needs_verifier
