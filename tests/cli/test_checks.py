"""Every bad input has its message, and all of them come at once."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from empty_weights import write_model, write_tensors
from safetensors import safe_open
from tokenizers import Tokenizer, models
from unprivileged import unprivileged

from prl.config.bounds import AtMost, Below, bounds_of
from prl.config.checks import LIMITS, check, resolve_paths
from prl.config.hf_config import UnsupportedModelError, model_config
from prl.config.load import ConfigError, load, replace
from prl.config.machine import cgroup_free_bytes, count_parameters, estimate_memory_bytes, free_memory_bytes
from prl.config.schema import Config
from prl.domains.options import DomainOptions
from prl.runfolder.model import write_model_folder
from prl.streams.options import RedisOptions

GIB = 1024**3
LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def good(tmp_path):
    config = replace(
        Config(),
        run={"folder": str(tmp_path / "runs" / "one")},
        model={"init": "random", "architecture": "qwen2"},
        sample={"max_model_len": 64, "kv_cache_mib": 64},
        actor={"max_tokens": 5},
        train={"tensor_parallel": 2},
        preprocess={"pack_tokens": 128},
    )
    return dataclasses.replace(config, domains=(DomainOptions(name="digits"),))


def problems(config, **options):
    with pytest.raises(ConfigError) as caught:
        check(config, memory_bytes=16 * GIB, **options)
    return str(caught.value).splitlines()


def model_folder(path, **changes):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    try:
        write_model(path / "model.safetensors", model_config({**LLAMA, **changes}))
    except (UnsupportedModelError, KeyError):
        write_tensors(path / "model.safetensors", {"a": ("U8", [8])})
    return {"path": str(path), "init": "pretrained", "architecture": None}


def test_a_good_configuration_has_neither_problems_nor_warnings(good):
    assert check(good, memory_bytes=16 * GIB) == []


def test_values_that_vllm_takes_pass(good):
    given = {"max-num-batched-tokens": "4K", "max_num_scheduled_tokens": "None", "watermark": 0.5, "async-scheduling": False}
    given |= {"moe-backend": "Batched-Triton", "limit-mm-per-prompt": '{"image": 1}', "seed": -3, "tokenizer": "folder"}
    assert check(replace(good, sample={"engine_args": given}), memory_bytes=16 * GIB) == []


def test_rewards_that_are_not_compared_need_no_others(good):
    alone = replace(good, run={"rollouts_per_group": 1, "min_rollouts_per_group": 1}, preprocess={"advantage": "reward"})
    assert check(alone, memory_bytes=16 * GIB) == []
    (line,) = problems(replace(alone, preprocess={"drop_equal_groups": True}))
    assert line.startswith("preprocess.drop_equal_groups = true: with run.rollouts_per_group = 1 no group would be left")
    (line,) = problems(replace(alone, run={"min_rollouts_per_group": 2}))
    assert line.startswith("run.min_rollouts_per_group = 2: set 1 to run.rollouts_per_group = 1, or null")


@pytest.mark.parametrize(
    ("section", "keys", "words"),
    [
        ("run", {"steps": 0}, "run.steps = 0: must be at least 1"),
        ("run", {"groups_per_step": 0}, "run.groups_per_step = 0: must be at least 1"),
        ("run", {"max_lag": -1}, "run.max_lag = -1: must be at least 0"),
        ("run", {"steps_per_generation": 0}, "run.steps_per_generation = 0: must be at least 1"),
        ("run", {"rollouts_per_group": 1}, "run.rollouts_per_group = 1: preprocess.advantage = group_std compares"),
        ("run", {"min_rollouts_per_group": 1}, "run.min_rollouts_per_group = 1: rollouts are compared with"),
        ("run", {"min_rollouts_per_group": 999}, "run.min_rollouts_per_group = 999: rollouts are compared with each other"),
        ("run", {"group_deadline_s": 600.0}, "run.group_deadline_s = 600.0: actors work on a group for"),
        ("run", {"stop_at_reward": 0.9}, "run.stop_at_reward = 0.9: needs evaluations; set run.evaluate_every_steps"),
        ("run", {"name": "a/b"}, "run.name = 'a/b': give a name without slashes"),
        ("run", {"name": ".."}, "run.name = '..': give a name without slashes"),
        ("run", {"name": "a\nb"}, "run.name = 'a\\nb': give a name without slashes, outer blanks and control characters"),
        ("run", {"name": "n" * 101}, f"run.name = '{'n' * 101}': give a name"),
        ("run", {"folder": "/runs/a\0b"}, "run.folder = '/runs/a\\x00b': give a path without control characters"),
        ("run", {"folder": "/runs/a:b"}, "run.folder = /runs/a:b: holds :, which PYTHONPATH (:) or Slurm's names of log files"),
        ("run", {"folder": "/runs/a%jb"}, "run.folder = /runs/a%jb: holds %, which"),
        ("run", {"folder": "/a:/\\%"}, "run.folder = /a:/\\%: holds : and % and \\, which"),
        ("run", {"seed": 2**63}, "run.seed = 9223372036854775808: must be below 9223372036854775808"),
        ("run", {"steps": 10**9}, "run.steps = 1000000000: must be below 1000000000"),
        ("run", {"groups_per_step": 10**6 - 1}, "run.groups_per_step = 999999: with run.rollouts_per_group = "),
        ("cluster", {"partition": "a\nb"}, "'cluster.partition' = 'a\\nb': give one line"),
        (
            "cluster",
            {"sbatch": {"comment": "a\n#SBATCH --x"}},
            "'cluster.sbatch.comment' = 'comment=a\\n#SBATCH --x': give one line",
        ),
        ("cluster", {"sbatch": {"foo bar": 1}}, "cluster.sbatch.foo bar: is no option of sbatch; give the name of one"),
        ("cluster", {"sbatch": {"": 1}}, "cluster.sbatch.: is no option of sbatch"),
        ("run", {"rollouts_per_group": 10**4000}, f"run.rollouts_per_group = 1{'0' * 79}... (4001 characters): must be below"),
        ("model", {"init": "pretrained", "architecture": None}, "model.path is empty: name a Hugging Face folder"),
        ("model", {"architecture": None}, "model.architecture = null: with init: random give"),
        ("model", {"path": "/no/such/model", "architecture": None}, "model.path = /no/such/model: no such folder"),
        ("model", {"path": "/tmp"}, "model.architecture = qwen2: is for models without a path"),
        ("model", {"kv_heads": 3}, "model.kv_heads = 3: must divide model.heads = 2"),
        ("model", {"head_dim": 33}, "model.head_dim = 33: must be even"),
        ("model", {"head_dim": 64}, "model.head_dim = 64: qwen2 wants model.hidden_size / model.heads = 64/2"),
        ("model", {"layers": 0}, "model.layers = 0: must be at least 1"),
        (
            "train",
            {"tensor_parallel": 4},
            "train.tensor_parallel = 4: does not divide the model's 2 query heads; choose one of 1, 2",
        ),
        (
            "train",
            {"kl_coefficient": 0.1},
            "train.kl_coefficient = 0.1: the KL term needs a reference; set train.reference: initial, or the coefficient to 0",
        ),
        ("train", {"tensor_parallel": 1, "sequence_parallel": True}, "train.sequence_parallel = true: needs"),
        ("sample", {"tensor_parallel": 3}, "sample.tensor_parallel = 3: does not divide the model's 2 query heads"),
        ("sample", {"kv_cache_mib": None}, "sample.kv_cache_mib = null: without accelerators the KV cache needs a size"),
        ("sample", {"max_model_len": 4096}, "sample.max_model_len = 4096: the model has 1024 positions"),
        ("sample", {"max_num_seqs": 0}, "sample.max_num_seqs = 0: must be at least 1"),
        (
            "sample",
            {"engine_args": {"enable_prefix_caching": True, "compilation-config.mode": 0, "blok-size": 1}},
            "sample.engine_args.blok-size: vLLM's server has no such argument; did you mean block-size?",
        ),
        ("sample", {"engine_args": {"foo": 1}}, "sample.engine_args.foo: vLLM's server has no such argument; "),
        (
            "sample",
            {"engine_args": {"max_num_seqs": 7}},
            "sample.engine_args.max_num_seqs: has a key of its own, sample",
        ),
        ("sample", {"engine_args": {"no-enforce-eager": True}}, "sample.engine_args.no-enforce-eager: has a key of its own, "),
        *(
            ("sample", {"engine_args": {name: value}}, f"sample.engine_args.{name} = {value!r}: {words}")
            for name, value, words in (
                ("max-num-batched-tokens", "abc", "must be a whole number, perhaps with k or M at least 1"),
                ("max-num-batched-tokens", -5, "must be a whole number, perhaps with k or M at least 1"),
                ("max-num-batched-tokens", "1.5K", "must be a whole number, perhaps with k or M at least 1"),
                ("watermark", 1, "must be a number at least 0 and below 1"),
                ("block_size", 16.5, "must be a whole number above 0"),
                ("block-size", True, "must be a whole number above 0"),
                ("max-num-queued-reqs", "x", "must be a whole number at least 0, or None"),
                ("async-scheduling", "yes", "must be true or false"),
                ("no-async-scheduling", False, "is given or not; set it to true, or leave it out"),
                ("scheduling-policy", "lifo", "must be one of fcfs, priority"),
                ("moe-backend", "cuda", "must be one of aiter, "),
                ("limit-mm-per-prompt", "{image: 1}", "must be JSON"),
                ("tokenizer", "-x", "begins with -, so that vLLM's server would take it for an argument"),
            )
        ),
        *(
            ("sample", {"engine_args": {name: 2}}, f"sample.engine_args.{name}: is set by prl and cannot be changed")
            for name in ("logprobs-mode", "data_parallel_size", "weight-transfer-config.backend", "load-format", "no-headless")
        ),
        ("actor", {"max_tokens": 64}, "actor.max_tokens = 64: leaves no room for a prompt in sample.max_model_len = 64"),
        ("actor", {"processes": 0}, "actor.processes = 0: must be at least 1"),
        ("actor", {"temperature": 0.0}, "actor.temperature = 0.0: must be above 0"),
        ("actor", {"top_p": 0.0}, "actor.top_p = 0.0: must be above 0 and at most 1"),
        (
            "control",
            {"lost_after_s": 1.0},
            "control.lost_after_s = 1.0: every process would count as lost between two heartbeats",
        ),
        ("control", {"wait_s": 599.0}, "control.wait_s = 599.0: a run in which nothing moves for so long fails"),
        ("cluster", {"sbatch": {"requeue": True}}, "cluster.sbatch.requeue = true: a job that Slurm starts again does not"),
        ("preprocess", {"pack_tokens": 5}, "preprocess.pack_tokens = 5: an answer of actor.max_tokens = 5 and its prompt"),
        ("cluster", {"time_min": 0}, "cluster.time_min = 0: must be at least 1"),
        ("cluster", {"gpus_per_node": 500}, "cluster.gpus_per_node = 500: this machine has "),
    ],
)
def test_one_bad_key_gives_one_line(good, section, keys, words):
    (line,) = problems(replace(good, **{section: keys}))
    assert line.startswith(words)


def test_all_problems_come_at_once(good):
    lines = problems(replace(good, run={"name": ""}, actor={"max_tokens": 64}, train={"tensor_parallel": 4}))
    assert [line.split(" ")[0] for line in lines] == ["run.name", "actor.max_tokens", "train.tensor_parallel"]


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


def test_domains_need_their_files(good, tmp_path):
    (tmp_path / "there.parquet").touch()
    options = {"paths": [str(tmp_path / "there.parquet"), "/no/data.jsonl"], "evaluate_paths": "/no/more.jsonl"}
    train, evaluate = problems(dataclasses.replace(good, domains=(DomainOptions(name="gsm8k", options=options),)))
    assert train == "domains[0].options.paths = /no/data.jsonl: no such file; name the data of domain gsm8k"
    assert evaluate.startswith("domains[0].options.evaluate_paths = /no/more.jsonl: no such file")
    (line,) = problems(dataclasses.replace(good, domains=()))
    assert line.startswith("domains is empty")
    (line,) = problems(dataclasses.replace(good, domains=(DomainOptions(name="digits"), DomainOptions(name="digits"))))
    assert line.startswith("domains[1].name = digits: is named already by domains[0]")


def with_options(config, **options):
    return dataclasses.replace(config, domains=(DomainOptions(name="gsm8k", options=options),))


def test_the_run_folder_may_start_at_home_and_must_be_a_path(good, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = resolve_paths(replace(good, run={"folder": "~/runs/a"}), Path("/base"))
    assert found.run.folder == "/home/me/runs/a"
    assert resolve_paths(replace(good, model={"path": "~/m"}), Path("/base")).model.path == "/home/me/m"
    for path, words in (("~nobody-of-this-name/a", "there is no such user"), ("a\0b", "no path can hold NUL")):
        for key, config in (
            ("run.folder", replace(good, run={"folder": path})),
            ("model.path", replace(good, model={"path": path})),
            ("run.replay", replace(good, run={"replay": path})),
            ("streams.redis.password_file", replace(good, streams={"redis": RedisOptions(password_file=path)})),
            ("domains[0].options.paths", with_options(good, paths=["a", path])),
            ("domains[0].options.other_path", with_options(good, other_path=path)),
        ):
            with pytest.raises(ConfigError, match=rf"^{re.escape(key)} = .*: {words}"):
                resolve_paths(config, Path("/base"))


def test_a_folder_that_holds_another_run(good):
    folder = Path(good.run.folder)
    folder.mkdir(parents=True)
    assert check(good, memory_bytes=16 * GIB) == []
    (folder / "notes.txt").touch()
    assert problems(good) == [f"run.folder = {folder}: is not empty and holds no run; choose another run.folder or run.name"]
    (folder / "config.yaml").touch()
    (line,) = problems(good)
    assert line.startswith(f"run.folder = {folder}: already holds another run, which has no checkpoint to go on from; delete")
    (folder / "checkpoints/step_000005").mkdir(parents=True)
    (folder / "checkpoints/step_000005/manifest.json").touch()
    (line,) = problems(good)
    assert line.startswith(f"run.folder = {folder}: already holds another run; go on with it by prl-submit --resume {folder}")
    (line,) = problems(replace(good, run={"folder": str(folder / "notes.txt")}))
    assert line.startswith(f"run.folder = {folder}/notes.txt: {folder}/notes.txt is no folder; choose another")
    (line,) = problems(replace(good, run={"folder": str(folder / "notes.txt/under")}))
    assert line.startswith(f"run.folder = {folder}/notes.txt/under: {folder}/notes.txt is no folder")
    write_model_folder(good.model, folder / "model")
    assert check(good, resume=True, memory_bytes=16 * GIB) == []


def test_a_folder_that_cannot_be_written(good, tmp_path):
    parent = tmp_path / "mine"
    (parent / "runs").mkdir(parents=True)
    (parent / "begun").mkdir()
    write_model_folder(good.model, parent / "begun/model")
    for folder in (parent, parent / "runs", parent / "begun", parent / "begun/model", tmp_path):
        folder.chmod(0o555)
    with unprivileged(tmp_path):
        (new,) = problems(replace(good, run={"folder": str(parent / "one" / "two")}))
        (there,) = problems(replace(good, run={"folder": str(parent / "runs")}))
        (resumed,) = problems(replace(good, run={"folder": str(parent / "begun")}), resume=True)
    assert new.startswith(f"run.folder = {parent}/one/two: {parent} cannot be written; choose another run.folder or run.name")
    assert resumed == f"--resume {parent}/begun: the run's folder cannot be written; have its owner permit it (chmod)"
    assert there.startswith(f"run.folder = {parent}/runs: cannot be written; choose another run.folder or run.name, or have")


def test_a_suggested_command_can_be_copied(good, tmp_path):
    folder = tmp_path / "my run"
    (folder / "checkpoints/step_000005").mkdir(parents=True)
    (folder / "checkpoints/step_000005/manifest.json").touch()
    (folder / "config.yaml").touch()
    (line,) = problems(replace(good, run={"folder": str(folder)}))
    assert f"go on with it by prl-submit --resume '{folder}', or choose" in line


def test_a_machine_with_too_little_memory(good):
    with pytest.raises(ConfigError, match=r"this machine has 1.0 GiB of memory free, the run needs about \d\.\d: lower"):
        check(good, memory_bytes=GIB)
    assert check(replace(good, cluster={"nodes": 2}), memory_bytes=GIB) == []


def test_activations_of_the_largest_micro_batch_count(good):
    """A token keeps in each layer 4 x 64 + 3 x (64 + 32) + 4 x 256 numbers, and 64 and 3 x 16 logits once more; tensor
    parallelism splits all but the 64s."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 256}
    model = model_config(LLAMA | sizes | {"num_hidden_layers": 2, "vocab_size": 16})
    large = replace(good, run={"groups_per_step": 10**4, "rollouts_per_group": 8})
    one, two = (
        estimate_memory_bytes(replace(large, preprocess={"pack_tokens": millions * 10**6}), model) for millions in (1, 2)
    )
    kept = 2 * (4 * 64 + 3 * 96 // 2 + 4 * 256 // 2) + 64 + 3 * 16 // 2
    assert two - one == 2 * 4 * kept * 10**6  # on each of 2 ranks
    large = replace(large, preprocess={"pack_tokens": 2 * 10**6})
    with pytest.raises(ConfigError, match=r"needs about \d+\.\d: lower preprocess.pack_tokens = 2000000, "):
        check(large, memory_bytes=16 * GIB)
    assert check(replace(large, run={"groups_per_step": 2}), memory_bytes=16 * GIB) == []  # no step has so many tokens


def test_parameters_of_known_models():
    """SmolLM2-135M and Qwen2.5-7B."""
    assert count_parameters(model_config(LLAMA)) == 134_515_008
    qwen = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    qwen |= {"intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False, "model_type": "qwen2"}
    assert count_parameters(model_config({**LLAMA, **qwen})) == 7_615_616_512


def test_memory_grows_with_what_is_asked_for(good):
    model = model_config(LLAMA)
    base = estimate_memory_bytes(good, model)
    more = replace(good, sample={"kv_cache_mib": 64 + 1024})
    assert estimate_memory_bytes(more, model) - base == GIB
    assert estimate_memory_bytes(replace(good, cluster={"replicas_per_node": 2}), model) > base + GIB
    # A frozen copy is split over the tensor-parallel ranks: 4 bytes a parameter in all (norms are on each).
    reference = replace(good, train={"reference": "initial"})
    assert estimate_memory_bytes(reference, model) - base == pytest.approx(4 * count_parameters(model), rel=1e-3)
    assert check(replace(reference, train={"kl_coefficient": 0.1}), memory_bytes=16 * GIB) == []


def cgroup(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_cached_files_count_as_free_memory(tmp_path):
    stat = "anon 300\nfile 500\ninactive_file 400\nactive_file 100"
    cgroup(tmp_path / "two", memory__max=1000, memory__current=850, memory__stat=stat)
    assert cgroup_free_bytes(tmp_path / "two") == 550
    cgroup(tmp_path / "open", memory__max="max", memory__current=850, memory__stat=stat)
    assert cgroup_free_bytes(tmp_path / "open") is None
    stat = "cache 500\ninactive_file 1\ntotal_inactive_file 400"
    cgroup(tmp_path / "one" / "memory", memory__limit_in_bytes=1000, memory__usage_in_bytes=850, memory__stat=stat)
    assert cgroup_free_bytes(tmp_path / "one") == 550
    assert cgroup_free_bytes(tmp_path / "none") is None
    assert free_memory_bytes() > 0


def test_warnings_do_not_stop_a_run(good):
    config = replace(good, actor={"temperature": 0.7, "top_p": 0.9}, preprocess={"pack_tokens": 32})
    temperature, top_p, pack = check(config, memory_bytes=16 * GIB)
    assert temperature.startswith("actor.temperature = 0.7: training assumes 1")
    assert top_p.startswith("actor.top_p = 0.9: training assumes 1")
    assert "longer rollouts are discarded" in pack


def test_paths_become_absolute_and_survive_the_yaml(tmp_path):
    text = "run: {name: one}\nmodel: {path: models/a}\ndomains: [{name: gsm8k, options: {paths: [a, /b], template: a}}]\n"
    (tmp_path / "c.yaml").write_text(text)
    config = resolve_paths(load(tmp_path / "c.yaml"), Path("/base"))
    assert config.run.folder == "/base/runs/one"
    assert config.model.path == "/base/models/a"
    assert config.domains[0].options == {"paths": ["/base/a", "/b"], "template": "a"}


def test_what_is_not_installed_here_is_told_before_a_run_on_this_machine(good, monkeypatch, tmp_path):
    through_redis = replace(good, streams={"backend": "redis", "redis": RedisOptions(start=True)})
    monkeypatch.setitem(sys.modules, "redis", None)  # as if it were not there
    monkeypatch.setenv("PATH", str(tmp_path))
    library, server = problems(through_redis)
    assert library.startswith("streams.backend = redis: redis-py is not installed here; pip install '.[redis]'")
    assert server.startswith("streams.redis.start = true: there is no redis-server on PATH; install Redis")
    assert check(replace(through_redis, cluster={"nodes": 2}), memory_bytes=16 * GIB) == []


def test_adapters_and_transformer_engine(good, monkeypatch, tmp_path):
    """Here it is known whether it is installed, on the nodes of a job it is not."""
    adapted = replace(good, train={"lora_rank": 8}, cluster={"gpus_per_node": 1})
    assert not any("lora_rank" in line for line in problems(adapted))  # but there is no accelerator
    (tmp_path / "transformer_engine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert any(line.startswith("train.lora_rank = 8: adapters are for models without Trans") for line in problems(adapted))
    (warning,) = check(replace(adapted, cluster={"nodes": 2}), memory_bytes=16 * GIB)
    assert warning.startswith("train.lora_rank = 8: adapters are for models without Transformer Engine, and whether that")
    assert check(replace(good, train={"lora_rank": 8}), memory_bytes=16 * GIB) == []


def test_redis_needs_one_server(good, tmp_path):
    url = "redis://host:6379/0"
    for redis in (RedisOptions(), RedisOptions(start=True, url=url)):
        (problem,) = problems(replace(good, streams={"backend": "redis", "redis": redis}))
        assert "needs one of them" in problem
    elsewhere = replace(good, cluster={"nodes": 2})  # what is installed there is not known
    for redis in (RedisOptions(start=True), RedisOptions(url=url)):
        assert check(replace(elsewhere, streams={"backend": "redis", "redis": redis}), memory_bytes=16 * GIB) == []
    kept = replace(good, streams={"backend": "redis", "redis": RedisOptions(url=url), "keep": "all"})
    (problem,) = problems(kept)
    assert problem.startswith("streams.keep = all: Redis keeps no rollout that is done with")
    there = replace(good, streams={"redis": RedisOptions(url=url, password_file="secret")})
    assert resolve_paths(there, tmp_path).streams.redis.password_file == str(tmp_path / "secret")


@pytest.mark.parametrize(
    ("redis", "words"),
    [
        (RedisOptions(url="host:6379"), "streams.redis.url = host:6379: is no address of a Redis server; write e.g. redis://"),
        (RedisOptions(url="nonsense"), "streams.redis.url = nonsense: is no address of a Redis server"),
        (
            RedisOptions(url="redis://host", password_file="/no/such/file"),
            "streams.redis.password_file = /no/such/file: no such file; name the file with the server's password",
        ),
    ],
)
def test_a_redis_server_needs_an_address_and_its_password(good, redis, words):
    (problem,) = problems(replace(good, streams={"backend": "redis", "redis": redis}))
    assert problem.startswith(words)


def test_lanes_send_no_deltas(good):
    (problem,) = problems(replace(good, weights={"transport": "lanes", "delta": True}))
    assert problem.startswith("weights.delta = true: lanes send all values of each version")
    assert check(replace(good, weights={"transport": "lanes"}), memory_bytes=16 * GIB) == []


def test_what_may_not_be_read_is_told_with_its_key(good, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    model = replace(good, model=model_folder(locked / "model"), train={"tensor_parallel": 1})
    data = dataclasses.replace(good, domains=(DomainOptions(name="gsm8k", options={"paths": [f"{locked}/rows.jsonl"]}),))
    Path(good.run.folder).parent.mkdir(mode=0o777)
    Path(good.run.folder).parent.chmod(0o777)
    locked.chmod(0)
    with unprivileged(tmp_path):
        told = [problems(config) for config in (model, data, replace(model, model={"path": str(locked)}))]
    assert told == [
        [f"model.path = {locked}/model: Permission denied; have its owner permit it (chmod), or name another folder"],
        [f"domains[0].options.paths = {locked}/rows.jsonl: Permission denied; name the data of domain gsm8k"],
        [f"model.path = {locked}: Permission denied; have its owner permit it (chmod), or name another folder"],
    ]


def numbers(options, prefix=""):
    """The names of all keys that take a number, but for those with an upper bound of their own."""
    hints = get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value, hint = getattr(options, field.name), hints[field.name]
        kind = get_args(hint)[0]
        if dataclasses.is_dataclass(value):
            yield from numbers(value, f"{prefix}{field.name}.")
        elif {int, float} & {kind, *get_args(kind)} and not any(isinstance(bound, AtMost | Below) for bound in bounds_of(hint)):
            yield f"{prefix}{field.name}"


def test_every_number_has_a_largest_value(good):
    limits = {key: limit for limit, keys in LIMITS.items() for key in keys.split()}
    assert sorted(limits) == sorted(numbers(good))
    for key, value in (
        ("weights.bucket_mib", 99999999999),
        ("sample.max_num_seqs", 99999999999),
        ("cluster.nodes", 10**5),
        ("weights.group_s", 1e300),
        ("control.stop_s", 1e6),
        ("train.learning_rate", 1e9),
    ):
        section, name = key.split(".")
        assert f"{key} = {value}: must be below {limits[key]}" in problems(replace(good, **{section: {name: value}}))
    (problem,) = problems(replace(good, streams={"redis": RedisOptions(max_mib=2**24)}))
    assert problem.startswith("streams.redis.max_mib = 16777216: must be below")
