"""Versions that come while tokens are sampled: a short form of `test_inflight_slow`, with the sampler that is there."""

import pytest
from inflight import by_transport, follow, hear, one_word_models
from tiny_models import tiny_model


@pytest.mark.parametrize("clear_cache", [False, True])
def test_each_version_samples_what_hugging_face_does(lab, clear_cache):
    with by_transport(lab, "gather") as send:
        follow(lab, send, [tiny_model(seed) for seed in range(5)], 0, clear_cache=clear_cache)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_every_token_is_of_the_version_that_it_is_said_to_be_of(lab, clear_cache):
    with by_transport(lab, "gather") as send:
        hear(lab, send, one_word_models(10), 0, clear_cache=clear_cache)
