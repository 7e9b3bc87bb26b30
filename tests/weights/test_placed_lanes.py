"""What plans of lanes bring to samplers, bit for bit, against what vLLM's own loaders make of the whole tensors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lane_cases import MODELS, TENSOR

WORKER = Path(__file__).with_name("placed_worker.py")


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> dict[str, list[str]]:
    """From one process for all models."""
    folder = tmp_path_factory.mktemp("placed")
    done = subprocess.run([sys.executable, str(WORKER), str(folder)], capture_output=True, text=True, check=False, timeout=270)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("workers", TENSOR)
@pytest.mark.parametrize("name", MODELS)
def test_workers_hold_what_vllm_would_load(checked, name, workers):
    assert checked[f"{name}_{workers}"] == []
