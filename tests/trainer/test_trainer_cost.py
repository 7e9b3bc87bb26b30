"""What a step tells about its cost: tokens, padding, seconds by phase, model FLOP utilisation, memory."""

import re

import numpy as np
import pytest
from step_metrics import PHASES, undocumented
from trainer_data import LENGTHS, facts

from prl.config.hf_config import read_model_config
from prl.metrics import names
from prl.trainer.flops import step_flops


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_tells_what_it_cost(results, ranks):
    found = results[ranks, "step_reinforce"]
    tokens = sum(map(sum, LENGTHS))
    computed = sum(-(-sum(lengths) // ranks) * ranks for lengths in LENGTHS)  # tensor-parallel ranks have equally many
    assert found["1:train/all_tokens"] == tokens
    assert found["1:train/padding"] == pytest.approx(1 - tokens / computed)
    seconds = found["1:train/forward_backward_s"] + found["1:train/optimizer_s"]
    flops = step_flops(read_model_config(results.folder / "qwen3"), np.concatenate([np.array(n) for n in LENGTHS]))
    assert found["1:train/mfu"] == pytest.approx(flops / (seconds * ranks * 2e12))
    assert found["1:train/peak_memory_bytes"] > 1e8
    assert "1:train/mfu" not in results[ranks, "step"]  # no peak is known of a CPU
    rates = [results[ranks, "step_scheduled"][f"{step}:train/learning_rate"] for step in (1, 2, 3)]
    assert rates == pytest.approx([0.005, 0.01, 0.01])


@pytest.mark.parametrize(("name", "slots"), [("step_two_data_ranks", 73), ("step_one_rank_idle", 74)])
def test_data_parallel_ranks_tell_what_the_whole_step_cost(results, name, slots):
    """One micro-batch on one rank and two on the other, or all on one and an idle token on the other."""
    found = results[2, name]
    assert found["1:train/tokens"] == facts(1).trained_tokens
    assert found["1:train/all_tokens"] == 73
    assert found["1:train/padding"] == pytest.approx(1 - 73 / slots, abs=1e-12)
    # Qwen3 of 2 layers: queries and outputs 32 x 64, keys and values 32 x 32, three matrices of 32 x 48; then 51 rows of 32.
    products = 73 * (2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48) + 51 * 32)
    pairs = sum(n * (n + 1) // 2 for lengths in LENGTHS for n in lengths)
    flops = 3 * 2 * (products + 2 * pairs * 2 * 64)
    seconds = found["1:train/forward_backward_s"] + found["1:train/optimizer_s"]
    assert found["1:train/mfu"] == pytest.approx(flops / (2 * 2e12 * seconds))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "step", "frozen"),
    [
        ("step", 1, set()),
        ("step_own_logprobs", 1, set()),  # the step file has what the reference would say
        ("step_reference", 1, {names.REFERENCE_S}),
        ("step_proximal", 1, {names.PROXIMAL_S}),  # its copy alone
        ("step_proximal", 2, {names.PROXIMAL_S}),
    ],
)
def test_frozen_policies_cost_seconds_where_they_are_asked(results, ranks, name, step, frozen):
    found = results[ranks, name]
    seconds = {key: found[f"{step}:{key}"] for key in PHASES if f"{step}:{key}" in found}
    assert seconds.keys() == {names.FORWARD_BACKWARD_S, names.OPTIMIZER_S} | frozen
    assert min(seconds.values()) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_that_steps_tell_is_described(results, ranks):
    told = {
        key.partition(":")[2]
        for path in (results.folder / f"ranks_{ranks}").glob("step*.npz")
        for key in results[ranks, path.stem]
        if re.match(r"\d+:train/", key)
    }
    assert len(told) > 30
    assert undocumented(sorted(told)) == []
