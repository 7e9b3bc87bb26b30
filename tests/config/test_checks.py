"""Every bad input has its message, and all of them come at once."""

import dataclasses
import re
from typing import get_args, get_type_hints

import pytest
from checked import GIB, problems

from prl.config.checks import check
from prl.config.load import replace
from prl.config.paths import resolve_paths
from prl.domains.options import DomainOptions
from prl.streams.options import RedisOptions


def test_a_good_configuration_has_neither_problems_nor_warnings(good):
    assert check(good, memory_bytes=16 * GIB) == []


def test_a_container_s_image_that_is_a_file_is_there(good, tmp_path):
    absent, there = str(tmp_path / "absent.sif"), tmp_path / "there.sif"
    there.touch()
    for container in ("apptainer", "pyxis"):
        cluster = {"nodes": 2, "container": container}
        (line,) = problems(replace(good, cluster=cluster | {"container_image": absent}))
        assert line == f"cluster.container_image = {absent}: no such file; name an image that lies on a filesystem of all nodes"
        for image in (str(there), "docker://registry/prl:1"):
            check(replace(good, cluster=cluster | {"container_image": image}))


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
        ("cluster", {"modules": ("cuda\n",)}, "'cluster.modules[0]' = 'cuda\\n': give one line without control characters"),
        (
            "run",
            {"rollouts_per_group": 10**4000},
            f"run.rollouts_per_group = 1{'0' * 79}... (4001 characters): must be at least 1 and below",
        ),
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
            for name in (
                "logprobs-mode",
                "data_parallel_size",
                "weight-transfer-config.backend",
                "load-format",
                "no-headless",
                "disable_log_stats",
            )
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
        (
            "control",
            {"no_progress_s": 599.0},
            "control.no_progress_s = 599.0: a run in which nothing moves for so long fails",
        ),
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


def test_warnings_do_not_stop_a_run(good):
    config = replace(good, actor={"temperature": 0.7, "top_p": 0.9}, preprocess={"pack_tokens": 32})
    temperature, top_p, pack = check(config, memory_bytes=16 * GIB)
    assert temperature.startswith("actor.temperature = 0.7: training assumes 1")
    assert top_p.startswith("actor.top_p = 0.9: training assumes 1")
    assert "longer rollouts are discarded" in pack


def test_waits_that_end_before_a_standstill_is_noticed(good):
    (warning,) = check(replace(good, control={"wait_s": 600.0}), memory_bytes=16 * GIB)
    assert warning.startswith("control.no_progress_s = 600.0: is not below control.wait_s = 600.0")


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
    slow = replace(good, streams={"backend": "redis", "redis": RedisOptions(url=url)}, control={"wait_s": 3000.0})
    (problem,) = problems(slow)
    assert problem.startswith("streams.redis.full_s = 1200.0: trainers that begin again may take control.start_s + ")
    assert "3300.0 s" in problem
    there = replace(good, streams={"redis": RedisOptions(url=url, password_file="secret")})
    assert resolve_paths(there, tmp_path).streams.redis.password_file == str(tmp_path / "secret")


@pytest.mark.parametrize(
    ("redis", "words"),
    [
        (RedisOptions(url="host:6379"), "streams.redis.url = host:6379: is no address of a Redis server; write e.g. redis://"),
        *(
            (RedisOptions(url=url), f"streams.redis.url = {url}: is no address of a Redis server")
            for url in (
                "nonsense",
                "redis://",
                "redis://[::1/0",
                "redis://host:99999",
                "redis://host:x",
                "redis://host/x",
                "unix://",
            )
        ),
        (RedisOptions(url="redis://:secret@host:6379/0"), "streams.redis.url: holds a password, which logs would show"),
        (
            RedisOptions(url="redis://host", password_file="/no/such/file"),
            "streams.redis.password_file = /no/such/file: no such file; name the file with the server's password",
        ),
        (
            RedisOptions(url="unix:///run/redis.sock", password_file="/dev/null"),
            "streams.redis.password_file = /dev/null: is no regular file; name the file with the server's password",
        ),
    ],
)
def test_a_redis_server_needs_an_address_and_its_password(good, redis, words):
    (problem,) = problems(replace(good, streams={"backend": "redis", "redis": redis}))
    assert problem.startswith(words)


def test_lanes_send_deltas_to_what_can_be_read_back(good):
    for staging in ("full", "chunked"):
        deltas = replace(good, weights={"transport": "lanes", "delta": True, "staging": staging})
        assert check(deltas, memory_bytes=16 * GIB) == []
    quantized = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    (problem,) = problems(replace(good, weights={"transport": "lanes", "delta": True}, sample=quantized))
    assert problem.startswith("weights.delta = true: what samplers quantise (sample.quantization = fp8_per_channel) cannot be")


def test_versions_that_are_put_together_first_are_not_sent_beside_the_passes(good):
    """Of one rank that holds all in the samplers' dtype nothing is; by lanes each rank sends what it holds."""
    train, sample = {"tensor_parallel": 1, "dtype": "float32"}, {"dtype": "float32"}
    gather = replace(good, train=train, sample=sample, weights={"overlap": True})
    assert check(gather, memory_bytes=16 * GIB) == []
    for changes in ({"train": {"tensor_parallel": 2}}, {"train": {"lora_rank": 4}}, {"sample": {"dtype": "bfloat16"}}):
        for transport in ("gather", "filesystem"):
            (problem,) = problems(replace(gather, weights={"transport": transport}, **changes))
            assert problem.startswith(f"weights.overlap = true: with weights.transport = {transport} tensors of this trainer")
        assert check(replace(gather, weights={"transport": "lanes"}, **changes), memory_bytes=16 * GIB) == []


def test_what_needs_a_version_beside_the_live_one_is_not_written_over_it(good):
    chunked = replace(good, weights={"staging": "chunked"})
    (problem,) = problems(replace(chunked, weights={"delta": True}))
    assert problem.startswith("weights.staging = chunked: weights.delta = true keeps or needs a whole version")
    (problem,) = problems(replace(chunked, sample={"quantization": "fp8_per_channel", "dtype": "bfloat16"}))
    assert problem.startswith("weights.staging = chunked: sample.quantization = fp8_per_channel keeps or needs")
    assert check(replace(chunked, weights={"transport": "lanes"}), memory_bytes=16 * GIB) == []


@pytest.mark.parametrize("key", ["request_s", "rollout_s"])
def test_requests_outlast_samplers_that_stand_still(good, key):
    chunked = replace(good, weights={"staging": "chunked", "group_s": 50.0, "update_s": 40.0})
    (problem,) = problems(replace(chunked, actor={key: 90.0}))
    assert problem.startswith(
        f"actor.{key} = 90.0: with weights.staging = chunked samplers may stand still for weights.group_s"
    )
    assert "= 90.0 s before" in problem
    assert check(replace(chunked, actor={key: 90.1}), memory_bytes=16 * GIB) == []
    assert check(replace(good, weights={"group_s": 50.0, "update_s": 40.0}, actor={key: 90.0}), memory_bytes=16 * GIB) == []


def test_quantised_samplers_need_bfloat16_and_whole_tensors(good):
    quantized = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    on_gpus = {"nodes": 2, "gpus_per_node": 4}
    assert check(replace(good, sample=quantized), memory_bytes=16 * GIB) == []
    (problem,) = problems(replace(good, sample=quantized | {"dtype": "float32"}))
    assert problem.startswith("sample.quantization = fp8_per_channel: vLLM quantises weights of bfloat16 alone")
    (problem,) = problems(replace(good, sample=quantized | {"quantization": "fp8_per_block"}))
    assert problem.startswith("sample.quantization = fp8_per_block: without accelerators only fp8_per_channel")
    lanes = replace(good, sample=quantized | {"tensor_parallel": 2}, weights={"transport": "lanes"}, cluster=on_gpus)
    (problem,) = problems(lanes)
    assert problem.startswith("sample.quantization = fp8_per_channel: lanes bring a worker parts of tensors")
    assert check(replace(lanes, sample={"tensor_parallel": 1}), memory_bytes=16 * GIB) == []
    (problem,) = problems(replace(good, model={"architecture": "qwen3_moe"}, train={"tensor_parallel": 1}, sample=quantized))
    assert problem.startswith("sample.quantization = fp8_per_channel: experts need accelerators")


def numbers(options, prefix=""):
    """The names of all keys that take a number."""
    hints = get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value, kind = getattr(options, field.name), get_args(hints[field.name])[0]
        if dataclasses.is_dataclass(value):
            yield from numbers(value, f"{prefix}{field.name}.")
        elif {int, float} & {kind, *get_args(kind)}:
            yield f"{prefix}{field.name}"


def with_value(config, key, value):
    section, *path = key.split(".")
    if len(path) == 1:
        return replace(config, **{section: {path[0]: value}})
    inner = getattr(getattr(config, section), path[0])
    return replace(config, **{section: {path[0]: dataclasses.replace(inner, **{path[1]: value})}})


def test_every_number_has_a_largest_value(good):
    keys = list(numbers(good))
    assert len(keys) > 100
    for key in keys:
        (line,) = problems(with_value(good, key, 2**63))
        assert re.match(rf"{re.escape(key)} = 9223372036854775808: must be (.*and )?(below \d|at most 1(00)?$)", line)
    for key, value, bound in (
        ("weights.bucket_mib", 2**17, "at least 1 and below 131072"),
        ("streams.redis.max_mib", 2**24, "below 16777216"),
        ("run.rollouts_per_group", 2**16, "at least 1 and below 65536"),  # an audit has 16 bits for them
        ("sample.max_num_seqs", 99999999999, "at least 1 and below 1000000"),
        ("cluster.nodes", 10**5, "at least 1 and below 100000"),
        ("weights.group_s", 1e300, "below 1000000"),
        ("control.stop_s", 1e6, "below 1000000"),
        ("cluster.memory_per_node_gib", 1e6, "below 1000000"),
        ("train.learning_rate", 1e9, "below 1000000000"),
    ):
        assert problems(with_value(good, key, value)) == [f"{key} = {value}: must be {bound}"]
