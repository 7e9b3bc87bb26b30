"""Samplers that need a start of their own."""

import os
import signal
from dataclasses import replace

import psutil
import pytest
from lab import OPTIONS, sampler, tiny_model, weights_of
from lane_trainer import lane_trainer
from test_sampler import LONG, PROMPT, during_updates, greedy, greedy_answer

from prl.flow.versions import Version
from prl.weights.folder import write_version
from prl.weights.transport import spec_of

pytestmark = pytest.mark.slow


def test_a_sampler_ends_with_its_engine_and_says_so(tmp_path):
    with sampler(tmp_path) as lab:
        lab.update(weights_of(tiny_model(1)))
        lab.stream(PROMPT, max_tokens=LONG)
        children = psutil.Process(lab.process.pid).children()
        (engine,) = [child for child in children if any("EngineCore" in word for word in child.cmdline())]
        engine.kill()
        assert "vLLM's engine died" in lab.failed.get(timeout=20)
        assert lab.process.wait(20) == 1


def test_a_sampler_ends_on_sigterm_with_all_its_processes(tmp_path):
    with sampler(tmp_path) as lab:
        processes = psutil.Process(lab.process.pid).children(recursive=True)
        os.kill(lab.process.pid, signal.SIGTERM)
        assert lab.process.wait(30) == 128 + signal.SIGTERM
        assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_two_tensor_parallel_workers(tmp_path):
    """Two query heads and one key-value head over two workers: shards of rows and of columns, a replicated head. Both write
    their parts to files and read them; they read their parts of what a trainer wrote as a whole, and are sent them by lanes."""
    models = [tiny_model(seed) for seed in range(4)]
    with sampler(tmp_path, replace(OPTIONS, tensor_parallel=2)) as lab:
        lab.update(weights_of(models[3]))
        stored = lab.store(weights_of(models[3]))
        assert {file.path for file in stored.files} == {"rank_0_0.safetensors", "rank_1_0.safetensors"}
        lab.update(weights_of(models[1]))
        lab.take(stored, weights_of(models[3]))
        (answer,) = lab.ask(PROMPT, max_tokens=40, ignore_eos=True).result(60).body["answers"]
        assert answer["token_ids"] == greedy_answer(models[3], PROMPT, 40)
        whole = {spec_of(name, tensor): tensor for name, tensor in weights_of(models[2]).items()}
        lab.take(write_version(lab.folder.weights, Version(0, 99), whole), weights_of(models[2]))
        (answer,) = lab.ask(PROMPT, max_tokens=40, ignore_eos=True).result(60).body["answers"]
        assert answer["token_ids"] == greedy_answer(models[2], PROMPT, 40)
        with lane_trainer(lab) as trainer:
            for model in models[:2]:
                trainer.update(weights_of(model))
                (answer,) = lab.ask(PROMPT, max_tokens=40, ignore_eos=True).result(60).body["answers"]
                assert answer["token_ids"] == greedy_answer(model, PROMPT, 40)
        lab.connect()
        lab.update(weights_of(models[0]))
        body, labels = during_updates(lab, models, PROMPT)
        (choice,) = body["choices"]
        assert len(choice["weight_versions"]) >= 2
        assert choice["token_ids"] == greedy(labels, choice, PROMPT)
