"""Does a run without Slurm fit this machine?"""

import sys

import pytest
from checked import GIB, LLAMA, problems

from prl.config.checks import check
from prl.config.hf_config import model_config
from prl.config.load import ConfigError, replace
from prl.config.machine import (
    cgroup_free_bytes,
    cgroup_kills,
    count_parameters,
    estimate_memory_bytes,
    free_memory_bytes,
    memory_kills,
    own_groups,
)
from prl.streams.options import RedisOptions


def test_a_machine_with_too_little_memory(good):
    with pytest.raises(ConfigError, match=r"this machine has 1.0 GiB of memory free, the run needs about \d\.\d: lower"):
        check(good, memory_bytes=GIB)
    assert check(replace(good, cluster={"nodes": 2}), memory_bytes=GIB) == []


def test_activations_of_the_largest_micro_batch_count(good):
    """A token keeps in each layer 4 x 64 + 4 x 256 numbers; the 64 queries and the 32 keys and values that two ranks gather as
    there is one head of them, and of these 2 x 64 queries and 32 keys or values of its own; and 64 and 3 x 16 logits once more.
    Tensor parallelism splits all but the 64s and what is gathered."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 256}
    model = model_config(LLAMA | sizes | {"num_hidden_layers": 2, "vocab_size": 16})
    large = replace(good, run={"groups_per_step": 10**4, "rollouts_per_group": 8})
    one, two = (
        estimate_memory_bytes(replace(large, preprocess={"pack_tokens": millions * 10**6}), model) for millions in (1, 2)
    )
    kept = 2 * (4 * 64 + (64 + 2 * 32) + (2 * 64 // 2 + 32) + 4 * 256 // 2) + 64 + 3 * 16 // 2
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
    cgroup(tmp_path / "two/job_7/step_0", memory__max=600, memory__current=500, memory__stat=stat)
    assert cgroup_free_bytes(tmp_path / "two", "job_7/step_0") == 101


def test_the_control_groups_around_a_process():
    slurm = "4:memory:/slurm/uid_7/job_9\n3:cpuset:/other\n0::/system.slice/slurmd\n"
    around = ["", "slurm", "slurm/uid_7", "slurm/uid_7/job_9", "system.slice", "system.slice/slurmd"]
    assert own_groups(slurm) == around
    assert own_groups("0::/\n") == own_groups("") == [""]


def test_processes_that_the_kernel_has_killed_out_of_memory(tmp_path):
    """The files' lines are the kernel's (Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst)."""
    events = "low 0\nhigh 3\nmax 40\noom 5\noom_kill 2\noom_group_kill 1"
    cgroup(tmp_path / "two/job_7", memory__events=events)
    assert cgroup_kills(tmp_path / "two", "job_7") == 2
    assert cgroup_kills(tmp_path / "two") is None  # the root has no such file
    cgroup(tmp_path / "one/memory/job_7", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4")
    assert cgroup_kills(tmp_path / "one", "job_7") == 4
    cgroup(tmp_path / "old/memory", memory__oom_control="oom_kill_disable 0\nunder_oom 0")
    assert cgroup_kills(tmp_path / "old") is None
    assert memory_kills() >= 0


def test_what_is_not_installed_here_is_told_before_a_run_on_this_machine(good, monkeypatch, tmp_path):
    through_redis = replace(good, streams={"backend": "redis", "redis": RedisOptions(start=True)})
    monkeypatch.setitem(sys.modules, "redis", None)  # as if it were not there
    monkeypatch.setenv("PATH", str(tmp_path))
    library, server = problems(through_redis)
    assert library.startswith("streams.backend = redis: redis-py is not installed here; pip install '.[redis]'")
    assert server.startswith("streams.redis.start = true: there is no redis-server on PATH; install Redis")
    assert check(replace(through_redis, cluster={"nodes": 2}), memory_bytes=16 * GIB) == []


def test_context_parallelism_and_transformer_engine(good, monkeypatch, tmp_path):
    """As with adapters, the other way round."""
    shared = replace(good, train={"context_parallel": 2, "dtype": "bfloat16"}, cluster={"gpus_per_node": 1})
    words = "train.context_parallel = 2: needs Transformer Engine, which is not installed here; install it, or set 1"
    assert words in problems(shared)
    (warning,) = check(replace(shared, cluster={"nodes": 4}), memory_bytes=16 * GIB)
    assert warning.startswith(
        "train.context_parallel = 2: needs Transformer Engine, and whether that is installed on the job's"
    )
    (tmp_path / "transformer_engine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not any(line.startswith("train.context_parallel") for line in problems(shared))  # but there is no accelerator


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
