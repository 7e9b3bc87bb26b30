"""A real sampler whose versions are written over the live one bucket by bucket, while it stands still, and which keeps its
prefix cache over them."""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from answers import LONG, PROMPT, greedy, greedy_answer
from lab import Lab
from lane_trainer import lane_trainer
from launch import OPTIONS, WEIGHTS, sampler
from tiny_models import tiny_model, weights_of
from transformers import Qwen2ForCausalLM

from prl.weights.digest import digest


@pytest.fixture(scope="module")
def models() -> list[Qwen2ForCausalLM]:
    return [tiny_model(seed) for seed in range(3)]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one worker", "two workers"])
def chunked(tmp_path_factory, request) -> Iterator[Lab]:
    options = replace(OPTIONS, tensor_parallel=request.param)
    weights = replace(WEIGHTS, staging="chunked", prefix_cache="keep")
    with sampler(tmp_path_factory.mktemp("chunked"), options, weights=weights) as lab:
        yield lab


def staged(lab: Lab) -> list[Mapping[str, Any]]:
    """What the workers say of the version that was on its way to them."""
    return [lab.staged.get(timeout=60) for _ in range(lab.joined["workers"])]


def answers(lab: Lab, model: Qwen2ForCausalLM) -> bool:
    """As Hugging Face does with the model's weights."""
    (found,) = lab.ask(PROMPT, max_tokens=40, ignore_eos=True).result(60).body["answers"]
    return found["token_ids"] == greedy_answer(model, PROMPT, 40) and found["versions"] == [[f"0:{lab.step}", 0, 40]]


def test_it_stands_still_from_the_order_to_the_commit_and_then_goes_on(chunked, models):
    chunked.update(weights_of(models[0]))
    first = chunked.step
    stream = chunked.stream(PROMPT, max_tokens=LONG, temperature=0.0)
    assert chunked.offer(weights_of(models[1])).status == 200
    still = time.perf_counter()
    late = chunked.ask(PROMPT, max_tokens=40, ignore_eos=True)
    time.sleep(0.5)
    assert not late.done()
    sent = time.perf_counter()
    report = chunked.trainer.send(weights_of(models[1]))
    assert report.digest == digest(weights_of(models[1]))
    assert {one["digest"] for one in staged(chunked)} == {str(report.digest)}
    reply = chunked.commit(report.digest)
    assert reply.status == 200
    assert reply.body["digest"] == str(report.digest)  # of the live parameters
    assert reply.body["pause_s"] >= sent - still
    assert max(after - before for before, after in itertools.pairwise(stream.times)) >= 0.9 * (sent - still)
    choice = stream.last
    labels = {f"0:{first}": models[0], f"0:{chunked.step}": models[1]}
    assert [span["version"] for span in choice["weight_versions"]] == list(labels)
    tokens = [token for _, chunk in stream.chunks.result(1) for token in chunk["choices"][0]["token_ids"]]
    assert tokens == greedy(labels, {"token_ids": tokens, "weight_versions": choice["weight_versions"]}, PROMPT)
    (found,) = late.result(60).body["answers"]
    assert found["token_ids"] == greedy_answer(models[1], PROMPT, 40)


def test_a_transfer_that_broke_off_is_made_good_by_the_next_version(chunked, models):
    chunked.update(weights_of(models[0]))
    assert chunked.offer(weights_of(models[1])).status == 200
    chunked.trainer.close()
    assert all("error" in one for one in staged(chunked))
    waiting = chunked.ask(PROMPT, max_tokens=40, ignore_eos=True)
    refused = chunked.commit(digest(weights_of(models[1])))
    assert refused.status == 409
    assert "no staged version" in refused.body["error"]
    assert not waiting.done()
    assert chunked.request("GET", "/prl/state").body["version"] is None
    chunked.connect()
    chunked.update(weights_of(models[2]))
    (found,) = waiting.result(60).body["answers"]
    assert found["token_ids"] == greedy_answer(models[2], PROMPT, 40)
    assert answers(chunked, models[2])


def test_what_is_in_flight_is_handed_back_where_it_is_fenced_meanwhile(chunked, models):
    """As where no version comes until its own deadline (test_replica.py)."""
    chunked.update(weights_of(models[0]))
    asked = chunked.ask(PROMPT, max_tokens=LONG, ignore_eos=True)
    time.sleep(0.2)
    assert chunked.offer(weights_of(models[1])).status == 200
    waiting = chunked.ask(PROMPT, max_tokens=3)
    time.sleep(0.2)
    assert not asked.done(), asked.result().body
    assert chunked.request("POST", "/prl/weights/fence", {"reason": "no version came"}).status == 200
    (answer,) = asked.result(30).body["answers"]
    assert (answer["finish_reason"], len(answer["token_ids"]) < LONG) == ("abort", True)
    assert (waiting.result(30).status, waiting.result().body) == (503, {"error": "no version came"})
    report = chunked.trainer.send(weights_of(models[1]))
    assert {one["digest"] for one in staged(chunked)} == {str(report.digest)}
    assert chunked.commit(report.digest).status == 200
    assert answers(chunked, models[1])


def test_other_weights_than_were_sent_are_not_sampled_from(chunked, models):
    chunked.update(weights_of(models[0]))
    good = weights_of(models[1])
    names = [f"model.layers.{layer}.mlp.gate_proj.weight" for layer in (0, 1)]
    chunked.send(good | {names[0]: good[names[1]], names[1]: good[names[0]]})
    refused = chunked.commit(digest(good))
    assert refused.status == 409
    assert "arrived in worker 0 with digest" in refused.body["error"]
    assert chunked.ask(PROMPT, max_tokens=3).result(30).status == 503
    chunked.update(good)
    assert answers(chunked, models[1])


def test_a_live_parameter_that_changes_before_the_commit_is_caught(chunked, models):
    chunked.update(weights_of(models[0]))
    assert chunked.request("POST", "/collective_rpc", {"method": "corrupt_next_commit"}).status == 200
    report, _ = chunked.send(weights_of(models[1]))
    refused = chunked.commit(report.digest)
    assert refused.status == 409
    assert "the live parameters of all workers have digest" in refused.body["error"]
    chunked.update(weights_of(models[1]))


def test_versions_by_files_and_by_lanes_are_written_over_the_live_one_too(chunked, models):
    chunked.update(weights_of(models[1]))
    stored = chunked.store(weights_of(models[1]))
    chunked.update(weights_of(models[0]))
    chunked.take(replace(stored), weights_of(models[1]))
    (found,) = chunked.ask(PROMPT, max_tokens=40, ignore_eos=True).result(60).body["answers"]
    assert found["token_ids"] == greedy_answer(models[1], PROMPT, 40)
    with lane_trainer(chunked) as trainer:
        trainer.update(weights_of(models[2]))
        assert answers(chunked, models[2])
    chunked.connect()


def test_a_kept_prefix_is_reused_by_a_later_version(chunked, models):
    """With weights.prefix_cache: salted nothing of it is (test_sampler_updates.py). Two full blocks of the cache and a rest."""
    prompt = [(7 * k + k // 9) % 10 for k in range(300)]
    cached = []
    for model in models[:2]:
        chunked.update(weights_of(model))
        usage = chunked.generate(prompt, max_tokens=8, ignore_eos=True).result(60).body["usage"]
        cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
    assert cached == [0, 256]
