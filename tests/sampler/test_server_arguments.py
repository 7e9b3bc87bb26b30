import pytest

from prl.sampler.options import SampleOptions
from prl.sampler.server import server_arguments


def test_options_become_vllm_arguments_and_engine_args_win():
    options = SampleOptions(
        dtype="float32",
        kv_cache_mib=64,
        engine_args={"block-size": 32, "enable-prefix-caching": False, "async-scheduling": True},
    )
    words = server_arguments("/models/m", "10.0.0.1", 8001, options, gpu=False)
    given = " ".join(words)
    assert "--model /models/m" in given
    assert "--host 10.0.0.1 --port 8001" in given
    assert "--kv-cache-memory-bytes 67108864" in given
    assert "--block-size 32 --no-enable-prefix-caching" in given
    assert "--async-scheduling" in words
    assert "--no-async-scheduling" not in words
    assert "--enforce-eager" in words
    assert "--no-enforce-eager" in server_arguments("/models/m", "10.0.0.1", 8001, options, gpu=True)


def test_without_a_gpu_the_cache_needs_a_size():
    with pytest.raises(ValueError, match=r"sample\.kv_cache_mib is null"):
        server_arguments("/models/m", "10.0.0.1", 8001, SampleOptions(), gpu=False)
