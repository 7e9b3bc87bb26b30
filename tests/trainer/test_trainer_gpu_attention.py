"""Attention that GPUs have, with stand-ins for its kernels: what it is asked for is what a CPU computes. (Whole models with it,
against transformers': test_trainer_families.py.)"""

from dataclasses import fields

import gpu_attention
import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from trainer_data import BASE

from prl.config.hf_config import model_config
from prl.trainer import device, model, packing
from prl.trainer.layers import PackedAttention
from prl.trainer.model import transformer_config
from prl.trainer.options import TrainOptions
from prl.trainer.packing import packed_sequences

CASES = [  # lengths, heads of queries and of keys, window, scale
    ([5, 1, 12, 3, 8, 7, 12], (4, 2), None, 0.25),
    ([9], (4, 4), None, 0.1),
    ([1, 1, 1], (6, 3), None, 0.7),
    ([20, 2, 11], (4, 1), 1, 0.25),
    ([3, 17, 9, 1, 16, 9], (6, 3), 7, 0.1),
    ([8, 9], (4, 2), 8, 0.25),
]


def config_of(heads=(4, 2), window=None):
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "sliding_window": window}
    return transformer_config(model_config(BASE | {"model_type": "mistral"} | shape), TrainOptions())


def states(lengths, heads):
    """Queries, keys and values [T, 1, heads, 16] as Megatron hands them over, which are parts of one tensor."""
    mixed = torch.randn(sum(lengths), 1, heads[0] + 2 * heads[1], 16, dtype=torch.float64)
    return [x.requires_grad_() for x in mixed.split([heads[0], heads[1], heads[1]], 2)]


def results(attention, inputs, sequences, factors):
    """Output and gradients of the inputs."""
    own = [x.detach().requires_grad_() for x in inputs]
    given = [x.squeeze(1) for x in own] if sequences.qkv_format == "thd" else own  # as Megatron does it
    output = attention(*given, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=sequences)
    output = output.reshape(len(factors), 1, -1)
    (output * factors).sum().backward()
    return [output.detach(), *(x.grad for x in own)]


def sequences_of(lengths):
    return packed_sequences(np.cumsum([0, *lengths]).astype(np.int32), torch.cat([torch.arange(n) for n in lengths]))


@pytest.mark.parametrize("stand_in", [gpu_attention.varlen, gpu_attention.transformer_engine])
def test_it_is_asked_for_what_a_cpu_computes(stand_in):
    torch.manual_seed(0)
    prepared = []
    for lengths, heads, window, scale in CASES:
        config, inputs = config_of(heads, window), states(lengths, heads)
        factors = torch.randn(sum(lengths), 1, heads[0] * 16, dtype=torch.float64)
        expected = results(PackedAttention(config, softmax_scale=scale), inputs, sequences_of(lengths), factors)
        prepared.append((lengths, config, scale, inputs, factors, expected))
    with stand_in() as wrapper:
        megatrons = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"} if wrapper else {}
        for lengths, config, scale, inputs, factors, expected in prepared:
            attention = (wrapper or PackedAttention)(config, softmax_scale=scale, **megatrons)
            found = results(attention, inputs, sequences_of(lengths), factors)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_which_attention_there_is(monkeypatch):
    """On GPUs Transformer Engine's where it is installed, else torch's for the dtypes that it has."""
    assert {device.attention(dtype) for dtype in (torch.float32, torch.bfloat16)} == {"sdpa"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert device.attention(torch.bfloat16) == "varlen"
    assert device.attention(torch.float32) == "sdpa"
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: name if name == "transformer_engine" else None)
    assert {device.attention(dtype) for dtype in (torch.float32, torch.bfloat16)} == {"transformer engine"}


def test_what_megatrons_layers_are_told_with_transformer_engine(monkeypatch):
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())  # Megatron asks whether it is there
    asked = []
    monkeypatch.setattr(
        model, "get_gpt_layer_with_transformer_engine_spec", lambda **options: asked.append(options) or "layers"
    )
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    for raw in ({"model_type": "llama"}, {"model_type": "qwen3"}, {"model_type": "qwen3_moe", **experts}):
        config = transformer_config(model_config(BASE | raw), TrainOptions(context_parallel=2))
        assert model._layers(config, None) == "layers"
        assert (config.apply_rope_fusion, config.persist_layer_norm) == (True, True)
        assert config.context_parallel_size == 2
    assert asked == [
        {"num_experts": None, "moe_grouped_gemm": False, "qk_layernorm": False},
        {"num_experts": None, "moe_grouped_gemm": False, "qk_layernorm": True},
        {"num_experts": 4, "moe_grouped_gemm": True, "qk_layernorm": True},
    ]
    monkeypatch.setattr(device, "has_transformer_engine", lambda: False)
    config = config_of()
    assert (config.apply_rope_fusion, config.persist_layer_norm) == (False, False)


def test_what_transformer_engine_is_told_of_sequences(monkeypatch):
    """Megatron hands all fields of its own class on; of ours it knows nothing."""
    monkeypatch.setattr(packing, "has_transformer_engine", lambda: True)
    told = sequences_of([5, 1, 9])
    given = {field.name: getattr(told, field.name) for field in fields(PackedSeqParams)}
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        starts = given.pop(name)
        assert starts.dtype is torch.int32
        assert starts.tolist() == [0, 5, 6, 15]
    assert {name: value for name, value in given.items() if value is not None} == {
        "qkv_format": "thd",
        "max_seqlen_q": 9,
        "max_seqlen_kv": 9,
    }
