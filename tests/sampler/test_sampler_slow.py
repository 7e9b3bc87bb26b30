"""Samplers that need a start of their own."""

import os
import signal
from dataclasses import replace

import psutil
import pytest
from answers import LONG, PROMPT, greedy_answer
from inflight import drifting_models
from lane_trainer import lane_trainer
from launch import OPTIONS, WEIGHTS, sampler
from tiny_models import tiny_model, weights_of

pytestmark = pytest.mark.slow


SILENT = "vLLM's engine has sampled no token for 3 s (sample.no_token_s), with 1 requests in flight"


@pytest.mark.parametrize(("blow", "words"), [("kill", "vLLM's engine died"), ("suspend", SILENT)])
def test_a_sampler_ends_with_its_engine_and_says_so(tmp_path, blow, words):
    """Also with one that stands still, while its server answers /health."""
    with sampler(tmp_path, replace(OPTIONS, no_token_s=3.0)) as lab:
        lab.update(weights_of(tiny_model(1)))
        lab.stream(PROMPT, max_tokens=LONG)
        children = psutil.Process(lab.process.pid).children()
        (engine,) = [child for child in children if any("EngineCore" in word for word in child.cmdline())]
        getattr(engine, blow)()
        assert words in lab.failed.get(timeout=20)
        assert lab.process.wait(40) == 1


def test_a_sampler_ends_on_sigterm_with_all_its_processes(tmp_path):
    with sampler(tmp_path) as lab:
        processes = psutil.Process(lab.process.pid).children(recursive=True)
        os.kill(lab.process.pid, signal.SIGTERM)
        assert lab.process.wait(30) == 128 + signal.SIGTERM
        assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_deltas_by_lanes_are_written_over_the_live_version(tmp_path):
    """Nothing is staged: a delta is applied where it goes, and what is refused leaves nothing to serve until all has come."""
    models = drifting_models(4)
    with sampler(tmp_path, weights=replace(WEIGHTS, transport="lanes", staging="chunked", delta=True)) as lab:

        def serves(model):
            (found,) = lab.ask(PROMPT, max_tokens=40, ignore_eos=True).result(60).body["answers"]
            return found["token_ids"] == greedy_answer(model, PROMPT, 40)

        with lane_trainer(lab) as trainer:
            sent = []
            for model in models[:3]:
                sent.append(sum(report.bytes for report in trainer.update(weights_of(model))))
                assert serves(model)
            assert max(sent[1:]) < 0.05 * sent[0]
            assert lab.request("POST", "/collective_rpc", {"method": "forget_version"}).status == 200
            assert "nothing to apply it to is held" in trainer.refused(weights_of(models[3]))["error"]
            assert lab.commit(0).status == 409
        with lane_trainer(lab) as trainer:
            trainer.update(weights_of(models[3]))
            assert serves(models[3])
