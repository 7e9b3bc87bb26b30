import configparser
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prl.sampler.plugin import TESTED, check_version

ROOT = Path(__file__).parents[2]
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
import asyncio, vllm
from prl.sampler.server import serving
from prl.weights.options import WeightsOptions
async def start():
    async with serving([], "token", WeightsOptions(), 60.0):
        pass
vllm.__version__ = "0.33.1"
try:
    asyncio.run(start())
except RuntimeError as error:
    seen["refused"] = str(error)
print(json.dumps(seen))
"""


def test_only_samplers_are_changed_and_only_a_tested_vllm_serves():
    environment = {name: value for name, value in os.environ.items() if name != "PRL_ROLE"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=180, check=True
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["known"]
    assert seen["elsewhere"] == seen["trainer"] == seen["before"]
    assert seen["sampler"] == (seen["before"] and seen["gpu"])
    assert seen["refused"].startswith(f"vLLM 0.33.1 is installed, and prl's samplers were tested with vLLM {TESTED} alone: ")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cu130"])
def test_builds_of_the_tested_version_are_taken(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.32.0rc1", "0.32.1", "0.33.0", "1.0", "dev"])
def test_other_versions_are_refused_with_those_that_were_tested(version):
    with pytest.raises(RuntimeError, match=f"^vLLM {version} is installed, .* tested with vLLM ==0.32.0 alone: install that"):
        check_version(version)


def test_the_versions_that_are_installed_are_the_tested_ones():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert f"vllm{TESTED}" in settings["options.extras_require"]["gpu"].split("\n")
    lock = (ROOT / "tools" / "requirements" / "cpu.lock").read_text()
    assert f"\nvllm-cpu{TESTED}\n" in lock
