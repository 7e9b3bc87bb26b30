import json
import os
import subprocess
import sys

CODE = """
import json, os, torch
import vllm._custom_ops as ops
from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory
from vllm.plugins import load_general_plugins
seen = {"before": ops._supports_onednn}
load_general_plugins()  # what every program that uses vLLM does
seen |= {"elsewhere": ops._supports_onednn, "known": "prl" in Factory._registry}
from prl.sampler.plugin import register
os.environ["PRL_ROLE"] = "trainer"
register()
seen["trainer"] = ops._supports_onednn
os.environ["PRL_ROLE"] = "sampler"
register()
seen |= {"sampler": ops._supports_onednn, "gpu": torch.cuda.is_available()}
print(json.dumps(seen))
"""


def test_only_samplers_are_changed():
    environment = {name: value for name, value in os.environ.items() if name != "PRL_ROLE"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=180, check=True
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["known"]
    assert seen["elsewhere"] == seen["trainer"] == seen["before"]
    assert seen["sampler"] == (seen["before"] and seen["gpu"])
