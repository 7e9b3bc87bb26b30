"""A real sampler of a mixture of experts takes new weights while it runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from answers import LONG, PROMPT, during_updates, greedy, greedy_answer, logprobs
from lab import Lab
from launch import OPTIONS, sampler
from tiny_models import tiny_experts, weights_of
from transformers import Qwen3MoeForCausalLM
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, convert_to_unquantized_kernel_format

from prl.weights.digest import digest

SWAPPED = [f"model.layers.1.mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")]


@pytest.fixture(scope="module")
def models() -> list[Qwen3MoeForCausalLM]:
    return [tiny_experts(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def experts(tmp_path_factory, models) -> Iterator[Lab]:
    with sampler(tmp_path_factory.mktemp("experts"), OPTIONS, models[0]) as lab:
        yield lab


def test_after_each_update_the_same_process_answers_as_transformers_does(experts, models):
    answers, processes = [], []
    for model in models:
        experts.update(weights_of(model))
        (answer,) = experts.ask(PROMPT, max_tokens=60, ignore_eos=True).result(60).body["answers"]
        assert answer["token_ids"] == greedy_answer(model, PROMPT, 60)
        assert answer["logprobs"] == pytest.approx(logprobs(model, PROMPT, answer["token_ids"]), abs=1e-4)
        assert answer["versions"] == [[f"0:{experts.step}", 0, 60]]
        answers.append(tuple(answer["token_ids"]))
        children = psutil.Process(experts.process.pid).children(recursive=True)
        processes.append((experts.process.pid, *(child.pid for child in children)))
    assert len(set(answers)) == len(models)
    assert len(set(processes)) == 1


def test_an_answer_in_flight_goes_on_with_the_new_experts(experts, models):
    experts.update(weights_of(models[0]))
    body, labels = during_updates(experts, models, PROMPT)
    (choice,) = body["choices"]
    assert len(choice["weight_versions"]) >= 3
    assert choice["token_ids"] == greedy(labels, choice, PROMPT)


def test_swapped_experts_are_refused_as_they_arrive(experts, models):
    good = weights_of(models[1])
    experts.update(good)
    swapped = good | {name.format(a): good[name.format(b)] for name in SWAPPED for a, b in ((0, 2), (2, 0))}
    experts.send(swapped)
    refused = experts.commit(digest(good))
    assert refused.status == 409
    assert "arrived in worker 0 with digest" in refused.body["error"]
    experts.update(good)


def test_experts_that_are_swapped_in_the_live_model_are_refused(experts, models):
    good = weights_of(models[1])
    experts.update(good)
    assert experts.request("POST", "/collective_rpc", {"method": "swap_experts_of_next_commit"}).status == 200
    report, _ = experts.send(good)
    refused = experts.commit(report.digest)
    assert refused.status == 409
    assert "the live copy differs from what was received" in refused.body["error"]
    assert experts.generate(PROMPT, max_tokens=3).result(30).status == 503
    experts.update(good)


def test_experts_that_do_not_fit_are_refused_before_anything_is_sent(experts, models):
    good = weights_of(models[0])
    gate, down = (f"model.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "down"))
    fifth = "model.layers.0.mlp.experts.4.gate_proj.weight"
    cases = {
        f"{fifth}: the sampler has 4 experts a layer": good | {fifth: good[gate]},
        f"{gate} has shape (32, 64), the sampler needs (48, 64)": good | {gate: good[gate][:32]},
        f"{down} has shape (64, 32), the sampler needs (64, 48)": good | {down: good[down][:, :32]},
        f"{gate} is bfloat16, the sampler holds torch.float32": good | {gate: good[gate].bfloat16()},
        "no tensor fills these parameters of the sampler: model.layers.0.mlp.experts.routed_experts.w2_weight": {
            name: tensor for name, tensor in good.items() if name != down
        },
    }
    for words, weights in cases.items():
        reply = experts.offer(weights)
        assert reply.status == 400
        assert words in reply.body["error"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_written_as_vllms_own_loader_writes_them(tmp_path, dtype):
    worker = Path(__file__).with_name("experts_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path), dtype], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    amx = dtype == "bfloat16" and torch.cpu._is_amx_tile_supported()
    assert found["kernel"] == ("X86CPUUnquantizedExperts" if amx else "CPUUnquantizedExperts")
    assert (found["tensors"], found["wrong"]) == (2 * 4 * 3, [])
    if dtype == "float32":
        assert found["differ with others"] == found["parameters"]
        assert found["differ with the same"] == []


def test_the_kernels_of_gpus_take_experts_as_they_were_loaded():
    """What vLLM does with loaded weights for Triton's kernels needs no GPU."""
    gate_up, down = torch.randn(4, 96, 64), torch.randn(4, 64, 48)
    for given, made in zip(
        (gate_up, down),
        convert_to_unquantized_kernel_format(UnquantizedMoeBackend.TRITON, None, gate_up, down),
        strict=True,
    ):
        assert made.data_ptr() == given.data_ptr()
        assert made.stride() == given.stride()
    assert TritonExperts.process_weights_after_loading is FusedMoEExperts.process_weights_after_loading


@pytest.mark.slow
def test_two_tensor_parallel_workers_share_each_expert(tmp_path):
    """A width of 24 a worker would not fit the tiles, so that the experts of this model are 64 wide."""
    models = [tiny_experts(seed, width=64) for seed in range(4)]
    with sampler(tmp_path, replace(OPTIONS, tensor_parallel=2), models[0]) as lab:
        lab.update(weights_of(models[0]))
        body, labels = during_updates(lab, models, PROMPT)
        (choice,) = body["choices"]
        assert len(choice["weight_versions"]) >= 2
        assert len(choice["token_ids"]) == LONG
        assert choice["token_ids"] == greedy(labels, choice, PROMPT)
