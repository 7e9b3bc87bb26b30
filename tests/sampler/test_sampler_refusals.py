"""Versions, trainers and calls that a sampler refuses, with words; what it serves stays as it is."""

import os

import pytest
import torch
from answers import LONG, PROMPT
from tiny_models import Weights, weights_of

from prl.weights.digest import digest
from prl.weights.plan import TensorSpec, to_json
from prl.weights.transport import spec_of


def test_two_swapped_tensors_are_refused(lab, models):
    good = weights_of(models[1])
    lab.update(good)
    first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    swapped: Weights = good | {first: good[second], second: good[first]}
    _, staged = lab.send(swapped)
    assert int(staged["digest"]) != digest(good)
    refused = lab.commit(digest(good))
    assert refused.status == 409
    assert "arrived in worker 0 with digest" in refused.body["error"]
    closed = lab.generate(PROMPT, max_tokens=3).result(30)
    assert (closed.status, closed.body) == (503, refused.body)
    lab.update(good)
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 200


def test_a_live_parameter_that_changes_after_the_copy_is_caught(lab, models):
    lab.update(weights_of(models[0]))
    assert lab.request("POST", "/collective_rpc", {"method": "corrupt_next_commit"}).status == 200
    report, staged = lab.send(weights_of(models[1]))
    assert staged["digest"] == str(report.digest)  # it arrived well
    in_flight = lab.stream(PROMPT, max_tokens=LONG)
    refused = lab.commit(report.digest)
    assert refused.status == 409
    assert "the live copy differs from what was received" in refused.body["error"]
    assert in_flight.last["finish_reason"] == "abort"
    assert {span["version"] for span in in_flight.last["weight_versions"]} == {f"0:{lab.step - 1}"}  # no token of the new one
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 503
    assert lab.request("GET", "/prl/state").body["closed"] == refused.body["error"]
    lab.update(weights_of(models[1]))
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 200


def test_a_version_that_was_not_received_cannot_be_committed(lab, models):
    lab.update(weights_of(models[0]))
    lab.step += 1
    refused = lab.commit(1)
    assert (refused.status, refused.body) == (409, {"error": f"worker 0 holds no staged version, not 0:{lab.step}"})
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 200  # the old one serves on


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(lab, models):
    good = weights_of(models[0])
    lab.update(good)
    some = next(iter(good))
    cases = {
        "model.layers.7.mlp.up_proj.weight is no parameter of Qwen2ForCausalLM": good
        | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2)},
        f"{some} is bfloat16, the sampler holds torch.float32": good | {some: good[some].bfloat16()},
        f"{some} has shape (16, 32), the sampler needs (16, 64)": good | {some: good[some][:, :32]},
        "no tensor fills these parameters of the sampler: model.layers.0.mlp.down_proj.weight": {
            name: tensor for name, tensor in good.items() if name != "model.layers.0.mlp.down_proj.weight"
        },
    }
    for words, weights in cases.items():
        reply = lab.offer(weights)
        assert reply.status == 400
        assert words in reply.body["error"]
        tensors = to_json(spec_of(name, tensor) for name, tensor in weights.items())
        reply = lab.request("POST", "/prl/weights/connect", lab.meeting(lab.epoch + 1) | {"tensors": tensors})
        assert reply.status == 400
        assert words in reply.body["error"]
    lab.update(good)  # the group of before still stands


def test_a_trainer_with_other_settings_is_refused_before_the_group_is_built(lab, models):
    lab.update(weights_of(models[0]))
    here = os.uname().nodename
    tensors = [TensorSpec("lm_head.weight", "bfloat16", (16, 64))]
    cases = [
        (
            {**os.environ, "NCCL_CUMEM_ENABLE": "0"},
            {},
            "NCCL_CUMEM_ENABLE is 0 at the trainer on node7 and not set at sampler 0",
        ),
        ({**os.environ, "GLOO_DEVICE_TRANSPORT": "TCP_TLS"}, {}, "GLOO_DEVICE_TRANSPORT is TCP_TLS at the trainer on node7"),
        (
            os.environ,
            {"dtype": "bfloat16"},
            f"dtype is bfloat16 at the trainer on node7 and float32 at sampler 0, worker 0, on {here}",
        ),
        (os.environ, {"bucket_bytes": 2**28}, "bucket_bytes is 268435456 at the trainer on node7 and 1048576 at sampler 0"),
        (os.environ, {"tensors": tensors}, "tensors is 1 of 2048 bytes"),
        (os.environ, {"libraries": {"torch": "1.13.0", "library": "gloo"}}, "torch is 1.13.0 at the trainer on node7"),
    ]
    for environment, others, words in cases:
        facts = lab.facts(environment, **others)
        reply = lab.request("POST", "/prl/weights/connect", lab.meeting(lab.epoch + 1) | {"facts": facts})
        assert reply.status == 400
        assert "no weights can be taken from the trainer: these differ: " in reply.body["error"]
        assert words in reply.body["error"]
        assert "\n" not in reply.body["error"]
    lab.update(weights_of(models[1]))  # the group of before still stands
    facts = lab.facts({**os.environ, "GLOO_SOCKET_IFNAME": "ib7"})
    lab.epoch += 1
    assert lab.request("POST", "/prl/weights/connect", lab.meeting(lab.epoch) | {"facts": facts}).status == 200
    lab.trainer.join(lab.epoch, 2)
    lab.update(weights_of(models[0]))
    assert "differences from the trainer that do no harm: GLOO_SOCKET_IFNAME is ib7" in lab.log.read_text()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("connect", {}, "master_address is missing"),
        ("receive", {"lineage": "0"}, "lineage must be int, not '0'"),
        ("commit", [], "expected a JSON object with lineage, step, digest, clear_cache"),
        ("commit", {"lineage": 0, "step": 1, "digest": "x", "clear_cache": False}, "digest"),
    ],
)
def test_wrong_bodies_are_refused(lab, path, body, words):
    reply = lab.request("POST", f"/prl/weights/{path}", body)
    assert reply.status == 400
    assert words in reply.body["error"]
