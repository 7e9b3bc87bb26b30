"""Versions that come while tokens are sampled, over many updates: on one and on two tensor-parallel workers, with tied and
untied heads, with vLLM's scheduler ahead of its model (as on GPUs) and not, by each transport."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from answers import PROMPT, greedy_answer
from inflight import by_transport, drifting_models, follow, hear, one_word_models
from lab import Lab
from launch import OPTIONS, WEIGHTS, sampler
from tiny_models import tiny_model, weights_of

from prl.flow.versions import Version
from prl.weights.folder import write_version
from prl.weights.transport import spec_of

pytestmark = [pytest.mark.slow, pytest.mark.deadline(600)]
UPDATES = 20


@dataclass(frozen=True)
class Kind:
    """Of a sampler. With 16 words, the second of two workers has none of the vocabulary; of 48, it has less than the first."""

    workers: int
    tied: bool
    vocabulary: int
    ahead: bool  # the next step is scheduled while the model works at one

    @property
    def like(self) -> dict[str, Any]:
        return {"tied": self.tied, "vocabulary": self.vocabulary}


ONE_TIED = Kind(1, True, 16, False)
ONE_UNTIED = Kind(1, False, 48, True)
TWO_TIED = Kind(2, True, 16, False)
TWO_UNTIED = Kind(2, False, 48, True)


@pytest.fixture(scope="session")
def engine(request, tmp_path_factory) -> Iterator[tuple[Kind, Lab]]:
    """One sampler of each kind for all tests; the first one is there already."""
    kind = request.param
    if kind == ONE_TIED:
        yield kind, request.getfixturevalue("lab")
        return
    options = replace(
        OPTIONS, tensor_parallel=kind.workers, engine_args={**OPTIONS.engine_args, "async-scheduling": kind.ahead}
    )
    weights = replace(WEIGHTS, delta=kind.tied)
    with sampler(tmp_path_factory.mktemp("engine"), options, tiny_model(0, **kind.like), weights) as lab:
        yield kind, lab


def kinds(*which: Kind) -> Any:
    names = [f"{'tied' if kind.tied else 'untied'}_{kind.workers}" for kind in which]
    return pytest.mark.parametrize("engine", which, indirect=True, ids=names)


@kinds(ONE_TIED, ONE_UNTIED, TWO_TIED, TWO_UNTIED)
@pytest.mark.parametrize("transport", ["gather", "lanes"])
@pytest.mark.parametrize("clear_cache", [False, True])
def test_each_version_samples_what_hugging_face_does(engine, transport, clear_cache):
    kind, lab = engine
    models = [tiny_model(seed, **kind.like) for seed in range(UPDATES + 1)]
    with by_transport(lab, transport) as send:
        follow(lab, send, models, 1, clear_cache=clear_cache)


@kinds(ONE_TIED, TWO_TIED)
@pytest.mark.parametrize("transport", ["deltas", "deltas by lanes"])
def test_each_version_that_comes_as_a_delta_samples_what_hugging_face_does(engine, transport):
    kind, lab = engine
    with by_transport(lab, transport) as send:
        follow(lab, send, drifting_models(UPDATES + 1, **kind.like), 2, clear_cache=False)


@kinds(ONE_TIED, ONE_UNTIED, TWO_TIED, TWO_UNTIED)
@pytest.mark.parametrize(("transport", "clear_cache"), [("gather", False), ("gather", True), ("lanes", False)])
def test_every_token_is_of_the_version_that_it_is_said_to_be_of(engine, transport, clear_cache):
    kind, lab = engine
    with by_transport(lab, transport) as send:
        hear(lab, send, one_word_models(UPDATES + 5, **kind.like), 3, clear_cache=clear_cache)


@kinds(TWO_TIED)
def test_two_workers_write_and_read_their_parts_of_a_version(engine):
    """They also read their parts of what a trainer wrote as a whole."""
    _, lab = engine
    models = [tiny_model(seed) for seed in range(3)]
    with by_transport(lab, "gather"):
        lab.update(weights_of(models[0]))
        stored = lab.store(weights_of(models[0]))
        assert {file.path for file in stored.files} == {"rank_0_0.safetensors", "rank_1_0.safetensors"}
        lab.update(weights_of(models[1]))
        whole = {spec_of(name, tensor): tensor for name, tensor in weights_of(models[2]).items()}
        written = write_version(lab.folder.weights, Version(0, 10**6), whole)
        for version, model in ((stored, models[0]), (written, models[2])):
            lab.take(version, weights_of(model))
            (answer,) = lab.ask(PROMPT, max_tokens=40, ignore_eos=True).result(60).body["answers"]
            assert answer["token_ids"] == greedy_answer(model, PROMPT, 40)
