"""A real sampler that keeps its linear layers in fp8: whole tensors go through vLLM's own loader while it runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab import Lab
from launch import OPTIONS, sampler
from quantized_worker import PROMPT, TOKENS
from tiny_models import Weights, tiny_model, weights_of

from prl.flow.versions import Version
from prl.runfolder.weights import new_folder
from prl.weights.folder import write_version
from prl.weights.plan import to_json
from prl.weights.transport import spec_of

pytestmark = pytest.mark.slow
SEEDS = range(2)


@pytest.fixture(scope="module")
def versions() -> list[Weights]:
    return [weights_of(tiny_model(seed).to(torch.bfloat16)) for seed in SEEDS]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[dict]:
    """Of each version, as vLLM answers that has loaded it from files."""
    worker = Path(__file__).with_name("quantized_worker.py")
    command = [sys.executable, str(worker), str(tmp_path_factory.mktemp("loaded")), *map(str, SEEDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return [answers[str(seed)] for seed in SEEDS]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Iterator[Lab]:
    options = replace(OPTIONS, dtype="bfloat16", quantization="fp8_per_channel")
    with sampler(tmp_path_factory.mktemp("quantized"), options, tiny_model(0)) as lab:
        yield lab


def answer(lab: Lab) -> dict:
    (found,) = lab.ask(PROMPT, max_tokens=TOKENS, ignore_eos=True).result(60).body["answers"]
    return found


def test_after_each_update_it_answers_as_vllm_that_has_loaded_the_version(quantized, versions, expected):
    assert len({tuple(one["token_ids"]) for one in expected}) == len(SEEDS)
    for version, wanted in zip(versions, expected, strict=True):
        quantized.update(version)
        found = answer(quantized)
        assert found["token_ids"] == wanted["token_ids"]
        assert found["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-5)
        assert found["versions"] == [[f"0:{quantized.step}", 0, TOKENS]]


def test_the_share_of_bytes_that_are_written_directly_is_told(quantized, versions):
    if quantized.epoch == 0:
        quantized.connect()
    report, staged = quantized.send(versions[0])
    sizes = {name: tensor.numel() for name, tensor in versions[0].items()}
    directly = sum(size for name, size in sizes.items() if "_proj." not in name)  # the embedding and the norms
    assert staged["direct_share"] == pytest.approx(directly / sum(sizes.values()))
    assert quantized.commit(report.digest).status == 200
    words = f"prl: {directly / sum(sizes.values()):.1%} of a version's bytes are written directly; whole tensors go to vLLM's"
    (line,) = [line for line in quantized.log.read_text().splitlines() if words in line]
    assert "for 8 modules: MergedColumnParallelLinear keeps them as Fp8PtpcOnlineLinearMethod makes them" in line


def test_an_answer_in_flight_goes_on_over_the_update(quantized, versions):
    quantized.update(versions[0])
    reply = quantized.ask(PROMPT, max_tokens=900, ignore_eos=True)
    quantized.update(versions[1])
    (found,) = reply.result(60).body["answers"]
    assert len(found["token_ids"]) == 900
    assert [label for label, _, _ in found["versions"]] == [f"0:{quantized.step - 1}", f"0:{quantized.step}"]


def test_what_was_quantised_is_not_stored_as_if_it_were_the_version(quantized, versions):
    quantized.update(versions[0])
    folder = new_folder(quantized.folder.weights, Version(0, quantized.step))
    tensors = to_json(spec_of(name, tensor) for name, tensor in versions[0].items())
    body = {"lineage": 0, "step": quantized.step, "seed": 1, "folder": str(folder), "tensors": tensors}
    refused = quantized.request("POST", "/prl/weights/store", body)
    assert refused.status == 400
    assert "layers.0.self_attn.q_proj.weight cannot be read back" in refused.body["error"]


def test_a_version_through_files_is_quantised_too(quantized, versions, expected):
    quantized.update(versions[0])
    tensors = {spec_of(name, tensor): tensor for name, tensor in versions[1].items()}
    stored = write_version(quantized.folder.weights, Version(0, quantized.step + 1), tensors)
    quantized.take(stored, versions[1])
    quantized.step += 1
    assert answer(quantized)["token_ids"] == expected[1]["token_ids"]


def test_a_sampler_whose_loader_fails_answers_nothing_any_more(quantized, versions):
    """The last test of this sampler."""
    quantized.update(versions[0])
    partly = {name: tensor for name, tensor in versions[1].items() if name != "model.layers.1.self_attn.v_proj.weight"}
    report, _ = quantized.send(partly)
    refused = quantized.commit(report.digest)
    assert refused.status == 409
    assert "vLLM's loader has not loaded all of model.layers.1.self_attn.qkv_proj (1 modules in all)" in refused.body["error"]
    assert quantized.ask(PROMPT, max_tokens=3).result(30).status == 503
    refused = quantized.offer(versions[0])
    assert refused.status == 400
    assert "vLLM could not load version" in refused.body["error"]
