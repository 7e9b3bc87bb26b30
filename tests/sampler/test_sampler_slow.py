"""Samplers that need a start of their own."""

import os
import signal
from dataclasses import replace

import psutil
import pytest
from lab import OPTIONS, sampler, tiny_model, weights_of
from test_sampler import LONG, PROMPT, during_updates, greedy

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
    """Two query heads and one key-value head over two workers: shards of rows and of columns, a replicated head."""
    models = [tiny_model(seed) for seed in range(4)]
    with sampler(tmp_path, replace(OPTIONS, tensor_parallel=2)) as lab:
        lab.update(weights_of(models[0]))
        body, labels = during_updates(lab, models, PROMPT)
        (choice,) = body["choices"]
        assert len(choice["weight_versions"]) >= 2
        assert choice["token_ids"] == greedy(labels, choice, PROMPT)
