"""FLOPs against what torch counts in transformers' models."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from prl.config.hf_config import model_config
from prl.trainer.flops import forward_flops, peak_flops, step_flops

SIZES = {"vocab_size": 51, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=4, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
}


def counted(config, lengths, *, backward):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    counter = FlopCounterMode(display=False)
    with counter:
        for length in lengths:
            logits = model(torch.arange(length)[None] % 51).logits
            if backward:
                logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("backward", [False, True])
def test_flops_equal_what_torch_counts(architecture, backward):
    config, lengths = CONFIGS[architecture], np.array([1, 7, 30])
    model = model_config(config.to_dict())
    # torch counts all pairs of tokens in attention; half of those, less the diagonal, are never looked at: two products of
    # head_dim multiplications and additions each.
    unseen = (lengths * (lengths - 1) // 2).sum() * model.layers * model.heads * model.head_dim * 4
    ours = step_flops(model, lengths) if backward else forward_flops(model, lengths)
    assert ours + unseen * (3 if backward else 1) == counted(config, lengths, backward=backward)


def test_a_model_of_7b_has_the_flops_that_torch_counts():
    """In Qwen2.5-7B's shape, without its numbers."""
    raw = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    config = Qwen2Config(**raw, num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)
    length, ours = 512, model_config(config.to_dict())
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model(torch.zeros(1, length, dtype=torch.int64)).logits.sum().backward()
    unseen = length * (length - 1) // 2 * 28 * 28 * 128 * 4 * 3
    found = step_flops(ours, np.array([length]))
    assert found + unseen == counter.get_total_flops()
    matrices = 7_615_616_512 - 152064 * 3584 - 28 * (3584 + 512 + 512) - (2 * 28 + 1) * 3584  # all parameters but these
    assert found == pytest.approx(6 * length * matrices, rel=0.01)


def test_a_token_goes_through_its_experts_alone():
    sizes = {"moe_intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 16, "norm_topk_prob": True}
    two, three = (
        model_config(Qwen3MoeConfig(**SIZES, **sizes, num_experts=8, num_experts_per_tok=k).to_dict()) for k in (2, 3)
    )
    # One more expert of three matrices of 32 x 24, in 3 layers, a multiplication and an addition each, for 10 tokens.
    assert forward_flops(three, np.array([10])) - forward_flops(two, np.array([10])) == 3 * 32 * 24 * 3 * 2 * 10


def test_a_window_bounds_what_a_token_looks_at():
    raw = {**CONFIGS["llama"].to_dict(), "model_type": "mistral"}
    whole, window = (model_config(raw | {"sliding_window": tokens}) for tokens in (None, 4))
    # Of 10 tokens the last six would look at 5 to 10 and look at 4: 1 + ... + 6 pairs fewer, in 3 layers of 4 heads of 8.
    assert forward_flops(whole, np.array([10])) - forward_flops(window, np.array([10])) == 21 * 3 * 4 * 8 * 4


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("AMD Instinct MI250X", 191.5e12),
        ("", None),
    ],
)
def test_peaks_are_known_by_name(name, peak):
    assert peak_flops(name) == peak


def test_frozen_weights_need_no_gradient_of_their_own():
    model = model_config(CONFIGS["llama"].to_dict())
    one, two = (np.array([tokens]) for tokens in (1, 2))
    attention = 4 * 3 * 4 * 8  # of one pair of tokens: two products in 3 layers of 4 heads of 8
    for lengths, pairs in ((one, 1), (two, 3)):
        weights = forward_flops(model, lengths) - pairs * attention
        assert step_flops(model, lengths) == 3 * weights + 3 * pairs * attention
        assert step_flops(model, lengths, frozen=True) == 2 * weights + 3 * pairs * attention
