"""Samplers that need a start of their own."""

import os
import signal

import psutil
import pytest
from lab import sampler, tiny_model, weights_of
from test_sampler import LONG, PROMPT

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
