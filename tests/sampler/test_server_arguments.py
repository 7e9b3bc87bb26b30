import contextlib
import io
from collections import defaultdict
from itertools import chain

import pytest

from prl.config.engine_args import arguments, engine_args_problems
from prl.sampler.options import SampleOptions
from prl.sampler.server import _words, server_arguments


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
    assert "--disable-log-stats" not in words
    assert "--disable-log-stats" in server_arguments("/models/m", "10.0.0.1", 8001, options, gpu=False, counts=False)
    assert "--no-enforce-eager" in server_arguments("/models/m", "10.0.0.1", 8001, options, gpu=True)


def test_without_a_gpu_the_cache_needs_a_size():
    with pytest.raises(ValueError, match=r"sample\.kv_cache_mib is null"):
        server_arguments("/models/m", "10.0.0.1", 8001, SampleOptions(), gpu=False)


def test_values_are_refused_as_vllm_refuses_them():
    """Arguments of each kind with values of every kind; what is out of an argument's bounds is refused here alone, since vLLM
    looks at bounds once it starts."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())

    def takes(name, value):
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                # What stands behind an argument that takes no value would be the model's name.
                return parser.parse_args(_words(name, value)).model_tag is None
            except (SystemExit, ValueError):
                return False

    of_kind, compared = defaultdict(list), 0
    for name, argument in arguments().items():
        of_kind[argument.kind, argument.optional].append((name, argument))
    for name, argument in chain.from_iterable(several[::9][:5] for several in of_kind.values()):
        choices = argument.rest[:1] if argument.kind in ("choice", "folded") else ()
        for value in (True, False, 1, 0.5, "abc", "2k", "None", '{"a": 1}', "-x", *choices):
            said = "".join(engine_args_problems({name: value}))
            if "has a key of its own" in said or "is set by prl" in said or " above " in said or " below " in said:
                continue
            if argument.kind != "text" and name not in ("help", "config"):
                assert takes(name, value) == (not said), (name, value, said)
                compared += 1
            elif said and name != "help":
                assert not takes(name, value), (name, value, said)
    assert compared > 200
