"""The model's folder, its weights and its layout: every fault has its message."""

import pytest
from checked import GIB, model_folder, problems
from empty_weights import write_tensors
from safetensors import safe_open

from prl.config.checks import check
from prl.config.load import replace

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_tensor_parallel_against_the_models_own_config(good, tmp_path):
    config = replace(good, model=model_folder(tmp_path / "model"))
    lines = problems(config)
    assert lines == ["train.tensor_parallel = 2: does not divide the model's 9 query heads; choose one of 1, 3"]
    assert check(replace(config, train={"tensor_parallel": 3}), memory_bytes=16 * GIB) == []


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "has neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_an_incomplete_model_folder(good, tmp_path, missing, words):
    config = replace(good, model=model_folder(tmp_path / "model"), train={"tensor_parallel": 1})
    (tmp_path / "model" / missing).unlink()
    (line,) = problems(config)
    assert line.startswith(f"model.path = {tmp_path / 'model'}: {words}")


HEADER = b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}'

WHOLE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)

CUT = "bytes are no safetensors file, or only the beginning of one); download it again"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", b"", f"model.safetensors is damaged (its 0 {CUT}"),
        ("model.safetensors", WHOLE[:20], f"model.safetensors is damaged (its 20 {CUT}"),
        ("model.safetensors", WHOLE[:-1], f"(it has {len(WHOLE) - 1} bytes and should have "),
        ("model.safetensors", WHOLE + b"0", f"bytes and should have {len(WHOLE)}); download it"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "fetch the file itself with git lfs pull"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "model.safetensors is damaged"),
        ("model.safetensors.index.json", b"{", "model.safetensors.index.json is no index of weights (JSONDecodeError"),
        ("model.safetensors.index.json", b'{"weight_map": {"b": "two.safetensors"}}', "has no file two.safetensors, which its"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"model.norm.weight": "model.safetensors", "b": "model.safetensors"}}',
            "model.safetensors lacks 1 tensors that model.safetensors.index.json places there, e.g. b",
        ),
        *(
            (
                "model.safetensors.index.json",
                b'{"weight_map": {"model.norm.weight": "%s"}}' % name,
                "model.safetensors.index.json names ",
            )
            for name in (b"../model/model.safetensors", b"/model.safetensors", b"part/model.safetensors")
        ),
        ("tokenizer.json", b"{", "tokenizer.json is no tokenizer ("),
        ("tokenizer_config.json", b"{", "tokenizer_config.json cannot be read ("),
        ("generation_config.json", b"3", "generation_config.json holds no keys and values; download it again"),
    ],
)
def test_a_damaged_model_folder(good, tmp_path, name, content, words):
    config = replace(good, model=model_folder(tmp_path / "model"), train={"tensor_parallel": 1})
    with safe_open(tmp_path / "model/model.safetensors", "np") as whole:  # as the library reads it
        assert whole.get_slice("model.norm.weight").get_shape() == [576]
    assert check(config, memory_bytes=16 * GIB) == []
    (tmp_path / "model" / name).write_bytes(content)
    (line,) = problems(config)
    assert line.startswith(f"model.path = {tmp_path / 'model'}: ")
    assert words in line
    if name.startswith("model"):
        assert check(replace(config, model={"init": "random"}), memory_bytes=16 * GIB) == []


ONE_LAYER = {  # of a Llama 8 wide, with a head of keys and values for 2 of queries, worked out by hand
    "model.embed_tokens.weight": ("F16", [11, 8]),
    "model.layers.0.input_layernorm.weight": ("F32", [8]),
    "model.layers.0.self_attn.q_proj.weight": ("BF16", [8, 8]),
    "model.layers.0.self_attn.k_proj.weight": ("BF16", [4, 8]),
    "model.layers.0.self_attn.v_proj.weight": ("BF16", [4, 8]),
    "model.layers.0.self_attn.o_proj.weight": ("F64", [8, 8]),
    "model.layers.0.post_attention_layernorm.weight": ("F32", [8]),
    "model.layers.0.mlp.gate_proj.weight": ("BF16", [6, 8]),
    "model.layers.0.mlp.up_proj.weight": ("BF16", [6, 8]),
    "model.layers.0.mlp.down_proj.weight": ("BF16", [8, 6]),
    "model.norm.weight": ("F32", [8]),
    "lm_head.weight": ("F32", [11, 8]),
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [2])}, None),  # follows from the config
        ({"lm_head.weight": None}, "1 tensors missing, e.g. lm_head.weight"),
        ({"model.norm.weight": ("F32", [7])}, "1 tensors of another shape, e.g. model.norm.weight is [7], not [8]"),
        ({"model.norm.bias": ("F32", [8])}, "1 tensors unknown, e.g. model.norm.bias"),
        ({"model.norm.weight": ("I8", [8])}, "1 tensors of no floating-point numbers, e.g. model.norm.weight is I8"),
        (
            {name: ("F8_E4M3", shape) for name, (_, shape) in ONE_LAYER.items() if name.endswith("_proj.weight")},
            "7 tensors of no floating-point numbers, e.g. model.layers.0.self_attn.q_proj.weight is F8_E4M3, ",
        ),
        (
            {"model.norm.weight": None, "lm_head.weight": None, "model.embed_tokens.weight": ("F32", [12, 8])},
            "2 tensors missing, e.g. model.norm.weight, lm_head.weight; 1 tensors of another shape, e.g. model.embed",
        ),
    ],
)
def test_weights_against_the_models_config(good, tmp_path, changes, words):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"intermediate_size": 6, "vocab_size": 11, "tie_word_embeddings": False}
    config = replace(good, model=model_folder(tmp_path / "model", **sizes), train={"tensor_parallel": 1})
    tensors = {name: held for name, held in {**ONE_LAYER, **changes}.items() if held}
    write_tensors(tmp_path / "model/model.safetensors", tensors)
    if words is None:
        assert check(config, memory_bytes=16 * GIB) == []
        return
    (line,) = problems(config)
    assert line.startswith(
        f"model.path = {tmp_path / 'model'}: its weights are not those of the llama model in config.json: {words}"
    )


def test_a_model_with_experts(good):
    config = replace(good, model={"architecture": "qwen3_moe"}, train={"tensor_parallel": 1})
    assert check(config, memory_bytes=16 * GIB) == []
    (line,) = problems(replace(config, model={"experts_per_token": 9}))
    assert line == "model.experts_per_token = 9: there are model.experts = 8"
    (line,) = problems(replace(config, model={"expert_ffn_size": 40}))
    assert line.endswith("one of 16 on each worker; they are 64 and 40")
    on_gpus = replace(config, model={"expert_ffn_size": 40}, cluster={"nodes": 2, "gpus_per_node": 4})
    assert check(on_gpus, memory_bytes=16 * GIB) == []
    (line,) = problems(replace(config, sample={"record_routing": True}))
    assert line.startswith("sample.record_routing = true: vLLM records no routing without accelerators")
    (line,) = problems(replace(good, sample={"record_routing": True}))
    assert line == "sample.record_routing = true: the model has no experts; set it to false"
    staged = {"tensor_parallel": 1, "pipeline_parallel": 2, "recompute": "selective"}
    (line,) = problems(replace(on_gpus, sample={"record_routing": True}, train=staged))
    assert line.startswith("sample.record_routing = true: with train.recompute = selective, stages")
    (line,) = problems(replace(config, model={"expert_ffn_size": 33}, sample={"tensor_parallel": 2}))
    assert line.startswith("sample.tensor_parallel = 2: samplers share 8 experts, each 33 wide")


def test_a_model_that_prl_does_not_know(good, tmp_path):
    (line,) = problems(replace(good, model=model_folder(tmp_path / "model", model_type="mamba"), train={"tensor_parallel": 1}))
    assert "model_type 'mamba' is not one of qwen2, qwen3, qwen3_moe, llama, mistral" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = {'quant_method': 'fp8'} is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic' is not supported, only default, linear, "),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 2000}, "use_sliding_window = true with sliding"),
        ({"model_type": "qwen3_moe"}, "the key 'num_local_experts' is missing"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers = [0] is not supported"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported, only 1"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8},
            "num_experts_per_tok = 5: there are num_experts = 4",
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, "the key 'factor' is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters that differ between layers are not"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"vocab_size": "many"}, "vocab_size = 'many': expected a whole number of at least 1"),
        ({"hidden_size": None}, "hidden_size = None: expected a whole number"),
        ({"hidden_size": 10**400}, "hidden_size = 10000000000000000000...: must be below 100000000"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers = 100000: must be below 100000"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2: must divide num_attention_heads = 9"),
        ({"num_key_value_heads": 18}, "num_key_value_heads = 18: must divide num_attention_heads = 9"),
        ({"head_dim": 31}, "head_dim = 31: must be even (rotary positions turn pairs) and at least 2"),
        ({"head_dim": 1}, "head_dim = 1: must be even"),
        ({"num_attention_heads": 1152, "model_type": "mistral"}, "head_dim = 0: must be even"),
        (
            {"num_attention_heads": 12, "hidden_size": 578, "head_dim": 48},
            "hidden_size = 578: llama wants a multiple of num_attention_heads = 12",
        ),
        ({"model_type": "qwen2", "head_dim": 32}, "head_dim = 32: qwen2 wants hidden_size / num_attention_heads = 576/9"),
        (
            {"head_dim": 31, "num_key_value_heads": 2},
            "num_key_value_heads = 2: must divide num_attention_heads = 9; head_dim = 31",
        ),
        ({"rope_theta": 0}, "rope_theta = 0: expected a number above 0"),
        ({"rope_theta": -5.0}, "rope_theta = -5.0: expected a number above 0"),
        ({"rope_theta": True}, "rope_theta = True: expected a number above 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "rope_theta = 1: must be above 1"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2': expected a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0: expected a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": -2}}, "factor = -2: expected a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0}}, "beta_fast = 0: expected a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": "no"}}, "truncate = 'no': expected true or false"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor = 1.0: must be above low_freq_factor = 1.0"),
        ({"rope_scaling": LLAMA3 | {"factor": 1e400}}, "factor = inf: expected a number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1: expected a number above 0 and below 1e+12"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: expected a number above 0"),
        ({"rms_norm_eps": 10**400}, f"rms_norm_eps = 1{'0' * 39}: expected a number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no': expected true or false"),
        ({"model_type": "qwen3", "use_sliding_window": "no"}, "use_sliding_window = 'no': expected true or false"),
        ({"model_type": "mistral", "sliding_window": "a"}, "sliding_window = 'a': expected a whole number of at least 1"),
    ],
)
def test_a_model_that_the_trainer_would_compute_wrongly(good, tmp_path, changes, words):
    (line,) = problems(replace(good, model=model_folder(tmp_path / "model", **changes), train={"tensor_parallel": 1}))
    assert line.startswith(
        f"model.path = {tmp_path / 'model'}: prl cannot train this model: {tmp_path}/model/config.json: {words}"
    )


@pytest.mark.parametrize(
    ("sizes", "width", "words"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 3, "neither divides the model's 4 key-value heads nor is a"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "neither divides the model's 4 key-value heads nor is a"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 1534},
            4,
            "does not divide the model's feed",
        ),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1152},
            9,
            "does not divide the model's 960 rows",
        ),
    ],
)
def test_tensor_parallel_ranks_share_heads_and_widths_evenly(good, tmp_path, sizes, width, words):
    folder = model_folder(tmp_path / "model", head_dim=64, **sizes)
    (line,) = problems(replace(good, model=folder, train={"tensor_parallel": width}))
    assert line.startswith(f"train.tensor_parallel = {width}: {words}")
    (line,) = problems(replace(good, model=folder, train={"tensor_parallel": 1}, sample={"tensor_parallel": width}))
    assert line.startswith(f"sample.tensor_parallel = {width}: {words}")


@pytest.mark.parametrize(("kv_heads", "width"), [(4, 2), (4, 4), (4, 12), (1, 12), (12, 6)])
def test_fewer_key_value_heads_than_ranks_are_fine(good, tmp_path, kv_heads, width):
    folder = model_folder(tmp_path / "model", num_attention_heads=12, num_key_value_heads=kv_heads, head_dim=48)
    config = replace(good, model=folder, train={"tensor_parallel": width}, run={"groups_per_step": 64})
    assert check(config, memory_bytes=1000 * GIB) == []


def test_a_broken_model_config(good, tmp_path):
    config = replace(good, model=model_folder(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text("{")
    (line,) = problems(config)
    assert "config.json cannot be read: JSONDecodeError" in line
    (tmp_path / "model" / "config.json").write_text("[1]")
    (line,) = problems(config)
    assert line.endswith("config.json: holds no keys and values; download it again")
