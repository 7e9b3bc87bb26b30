"""The script that gets the small real model."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

SCRIPT = Path(__file__).parents[2] / "tools" / "fetch_smollm2.py"


def run_script(folder):
    return subprocess.run(
        [sys.executable, SCRIPT, "--folder", folder], capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_folder_that_is_not_whole_is_refused_and_left_alone(script, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(script.FACTS))
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    done = run_script(tmp_path)
    assert done.returncode == 1
    assert "has 6 parameters instead of 134,515,008; remove" in done.stderr
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "config.json").write_text(json.dumps({**script.FACTS, "hidden_size": 64}))
    with pytest.raises(script.FetchError, match=r"is not SmolLM2-135M's: \{'hidden_size': 64\}"):
        script.check(tmp_path)


@pytest.mark.slow
def test_fetching_twice(tmp_path):
    from prl.actor.tokenizer import ModelTokenizer

    folder = tmp_path / "models" / "smollm2"
    first, second = run_script(folder), run_script(folder)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "made in" in first.stdout
    assert "is there and whole" in second.stdout
    assert list(folder.parent.iterdir()) == [folder]
    tokenizer = ModelTokenizer(folder)
    text = tokenizer.decode(tokenizer.chat([{"role": "user", "content": "What is 7 + 5?"}]))
    assert "What is 7 + 5?" in text
    assert tokenizer.end_ids == tokenizer.encode("<|im_end|>")
