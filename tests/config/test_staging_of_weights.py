"""Which way new weights arrive where nobody says: by the memory of an accelerator. Figures worked out by hand."""

import pytest
from real_sizes import QWEN_7B, QWEN_30B

from prl.config.load import replace
from prl.config.schema import Config
from prl.config.staging import Room, describe_staging, room_for_staging, settle_staging

MIB, GIB = 1024**2, 1024**3
VERSION = 2 * 7_615_616_512  # in bfloat16


def accelerators(gib: float = 80.0, **sections) -> Config:
    """Of which vLLM takes 0.9, a tenth is left: 8 GiB."""
    return replace(Config(), **{"cluster": {"gpus_per_node": 8, "gpu_memory_gib": gib}, **sections})


def chosen(config: Config, model=QWEN_7B) -> str:
    return settle_staging(config, model).weights.staging


def test_the_room_of_a_version():
    """Buckets are of 256 MiB, and CUDA and NCCL take 1 GiB."""
    one = accelerators()
    assert room_for_staging(one, QWEN_7B) == Room(8 * GIB, VERSION + 256 * MIB + GIB)
    four = replace(one, sample={"tensor_parallel": 4})
    assert room_for_staging(four, QWEN_7B) == Room(8 * GIB, VERSION + 256 * MIB + GIB)  # every worker gets all of it
    lanes = replace(four, weights={"transport": "lanes"})
    assert room_for_staging(lanes, QWEN_7B) == Room(8 * GIB, VERSION // 4 + 2 * 256 * MIB + GIB)
    deltas = replace(lanes, weights={"delta": True})
    assert room_for_staging(deltas, QWEN_7B) == Room(8 * GIB, VERSION // 4 + 3 * 256 * MIB + GIB)
    files = replace(deltas, weights={"transport": "filesystem"})
    assert room_for_staging(files, QWEN_7B) == Room(8 * GIB, VERSION // 4 + GIB)


def test_a_version_that_has_no_room_beside_the_last_one_is_written_over_it():
    """All of 7B takes 15.435 GiB, of which half an accelerator has as much as the accelerator has halves."""
    assert chosen(accelerators()) == "chunked"
    assert chosen(accelerators(sample={"gpu_memory_utilization": 0.75})) == "full"  # 20 GiB
    assert chosen(accelerators(weights={"transport": "lanes"}, sample={"tensor_parallel": 4})) == "full"
    half = {"gpu_memory_utilization": 0.5}
    assert 30.870 < 2 * (VERSION + 256 * MIB + GIB) / GIB < 30.871
    assert [chosen(accelerators(gib, sample=half)) for gib in (30.870, 30.871)] == ["chunked", "full"]


@pytest.mark.parametrize(
    "config",
    [
        Config(),  # no accelerators
        replace(Config(), cluster={"gpus_per_node": 8}),  # of a size that nobody knows
        accelerators(sample={"kv_cache_mib": 1024}),
        accelerators(weights={"staging": "full"}),
        accelerators(weights={"delta": True}),
        accelerators(sample={"quantization": "fp8_per_channel"}),
    ],
)
def test_it_arrives_beside_the_last_one_where_that_is_asked_for_or_nothing_is_known_or_it_has_to(config):
    assert chosen(config) == "full"


def test_experts_are_written_over_where_they_lie_as_they_are_sent():
    triton = {"engine_args": {"moe-backend": "triton"}}
    assert [chosen(accelerators(), QWEN_30B), chosen(accelerators(sample=triton), QWEN_30B)] == ["full", "chunked"]
    assert chosen(accelerators(weights={"staging": "chunked"}, sample={"gpu_memory_utilization": 0.5})) == "chunked"


def test_the_plan_says_which_and_why():
    def words(config, model=QWEN_7B):
        return " ".join(describe_staging(settle_staging(config, model), model).split())

    assert words(accelerators()) == (
        "weights.staging = chunked: beside vLLM (sample.gpu_memory_utilization = 0.9) an accelerator has 8.0 GiB, and what "
        "arrives takes 15.4 GiB with its buckets, CUDA's and NCCL's memory"
    )
    roomy = words(accelerators(sample={"gpu_memory_utilization": 0.75}))
    assert roomy == words(accelerators()).replace("chunked", "full").replace("0.9", "0.75").replace("8.0", "20.0")
    full = words(accelerators(weights={"staging": "full"}))
    assert full.endswith("memory, which is more: lower that share, or set chunked")
    assert words(accelerators(weights={"delta": True})).endswith(
        "lower that share; weights.delta = true keeps or needs a whole version beside the live one"
    )
    assert words(Config()).startswith("weights.staging = full; whether samplers have the memory for full is not known")
