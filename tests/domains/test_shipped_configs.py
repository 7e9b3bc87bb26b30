"""The configurations that come with prl, as `prl-submit --dry-run` takes them. Models and data that do not come with prl are
stood for by empty weights beside the real models' config.json, and by a few questions."""

import json
from pathlib import Path

import pytest
from empty_weights import write_model
from tokenizers import Tokenizer, models

from prl.cli.submit import main
from prl.config.hf_config import model_config, read_model_config
from prl.config.load import load
from prl.config.machine import count_parameters

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
GIB = 2**30
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
}
MODELS = {"qwen7b": QWEN_7B, "smollm2_gsm8k_cpu": SMOLLM2}
SPLITS = {
    "quickstart": ["this machine", "2 trainer ranks (tensor parallel 2 x data parallel 1), 1 sampler (tensor parallel 1)"],
    "smollm2_gsm8k_cpu": [
        "this machine",
        "1 trainer rank (tensor parallel 1 x data parallel 1), 1 sampler (tensor parallel 1)",
    ],
    "qwen7b": [
        "8 nodes, a heterogeneous Slurm job",
        "3 nodes, each: 8 trainer ranks on devices 0-7",
        "5 nodes, each: 8 samplers on devices 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7",
        "24 trainer ranks (tensor parallel 4 x data parallel 6), 40 samplers (tensor parallel 1)",
    ],
}
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def stub_model(folder: Path, config: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").touch()
    write_model(folder / "model.safetensors", model_config(config))
    return folder


def test_all_are_known_here():
    assert {path.stem for path in CONFIGS} == set(SPLITS)


@every_config
def test_a_dry_run_accepts_them_and_splits_as_they_say(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prl.config.checks.free_memory_bytes", lambda: 16 * GIB)  # whatever else runs on this machine
    config = load(path)
    overrides = []
    if path.stem in MODELS:
        overrides.append(f"model.path={stub_model(tmp_path / 'model', MODELS[path.stem])}")
    for number, domain in enumerate(config.domains):
        for key in ("paths", "evaluate_paths"):
            if key in domain.options:
                data = tmp_path / f"{key}.jsonl"
                data.write_text(json.dumps({"problem": "Two and two?", "answer": "#### 4"}) + "\n")
                overrides.append(f"domains.{number}.options.{key}=[{data}]")
    code = main([str(path), "--dry-run", *(["--set", *overrides] if overrides else [])])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert said.err == ""  # no warnings either
    for words in SPLITS[path.stem]:
        assert words in said.out
    assert ("#SBATCH" in said.out) == (config.cluster.nodes is not None)
    assert not (tmp_path / "runs").exists()


@every_config
def test_without_their_files_they_are_refused(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prl.config.checks.free_memory_bytes", lambda: 16 * GIB)
    assert main([str(path), "--dry-run"]) == (2 if path.stem in MODELS else 0)
    if path.stem in MODELS:
        assert "model.path" in capsys.readouterr().err


@every_config
def test_figures_fit_each_other(path):
    config = load(path)
    assert config.actor.temperature == config.actor.top_p == 1.0  # what training assumes
    assert config.actor.max_tokens < config.sample.max_model_len <= config.preprocess.pack_tokens
    assert config.run.rollouts_per_group <= config.sample.max_num_seqs  # one request a group
    assert config.actor.request_s <= config.actor.rollout_s <= config.control.no_progress_s < config.control.wait_s
    needs_verifier = any(domain.name == "gsm8k" for domain in config.domains)
    assert (config.verifier.processes > 0) == needs_verifier


def test_a_gpu_of_qwen7b_holds_weights_cache_and_the_version_that_arrives(tmp_path):
    """80 GB as a driver counts them: 79 GiB and a little."""
    config = load(next(path for path in CONFIGS if path.stem == "qwen7b"))
    model = read_model_config(stub_model(tmp_path / "model", QWEN_7B))
    parameters = count_parameters(model)
    assert parameters == pytest.approx(7.6e9, rel=0.01)
    weights, bucket, whole = 2 * parameters / config.sample.tensor_parallel, config.weights.bucket_mib * 2**20, 79 * GIB
    engine = config.sample.gpu_memory_utilization * whole
    assert engine + 2 * parameters + bucket + 4 * GIB < whole  # CUDA and NCCL take some, too
    cache = engine - weights - 4 * GIB  # activations and graphs
    token = 2 * model.layers * model.kv_heads * model.head_dim * 2
    assert cache / token > config.sample.max_num_seqs * config.sample.max_model_len
