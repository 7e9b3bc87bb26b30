"""The GPU check at toy size on the CPU, with what a machine without prl's other parts has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("vllm", "omegaconf", "pyarrow", "aiohttp", "submitit", "tensorboard", "xxhash", "jinja2")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu_check")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({ABSENT!r})\n")
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--toy", "--json", str(folder / "report.json")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "report.json").read_text()), done.stdout


def rows(report, check):
    return [row for row in report[0]["rows"] if row["check"] == check]


def test_all_is_measured_and_nothing_is_off(report):
    assert report[0]["ok"]
    assert report[0]["complete"]
    assert report[0]["missing"] == []
    assert not [row for row in report[0]["rows"] if {"skipped", "failed"} & row.keys()]
    count = {check: len(rows(report, check)) for check in ("parity", "step", "head", "padded", "weights")}
    assert count == {"parity": 2, "step": 2, "head": 3, "padded": 2, "weights": 1}
    assert len(report[0]["rows"]) == sum(count.values())


def test_values_agree_with_transformers(report):
    exact, half = rows(report, "parity")
    assert (exact["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert exact["logits_off"] < 1e-5
    assert exact["gradients_off"] < 1e-4
    assert 0 < half["logits_off"] < half["allowed_logits"] < 0.05
    assert 0 < half["gradients_off"] < half["allowed_gradients"] < 0.1


def test_packed_sequences_are_as_each_alone(report):
    exact, half = rows(report, "parity")
    assert exact["packed_off_alone"] < 1e-5
    assert half["packed_off_alone"] < half["allowed_logits"]


def test_padding_is_counted_and_weights_are_copied(report):
    packed, padded = rows(report, "padded")
    assert (packed["layout"], padded["layout"]) == ("packed", "padded")
    assert packed["tokens"] == 64 < padded["tokens"]
    assert padded["times_packed"] == pytest.approx(padded["passes_s"] / packed["passes_s"])
    (weights,) = rows(report, "weights")
    assert weights["same_digest"]
    assert min(weights["digest_gb_s"], weights["copy_gb_s"]) > 0


def test_the_attention_that_was_used_is_named(report):
    assert {row["attention"] for check in ("parity", "step") for row in rows(report, check)} == {"sdpa"}


def test_steps_have_times_and_memory(report):
    for row in rows(report, "step"):
        assert 0 < row["optimizer_s"] < row["step_s"]
        assert row["memory_gib"] > 0
        assert row["mfu"] == "unknown"


def test_the_output_layer_is_measured_in_chunks_and_whole(report):
    assert [row["logits"] for row in rows(report, "head")] == ["chunks", "one chunk", "torch's"]
    assert all(row["step_s"] > 0 and row["passes_s"] > 0 for row in rows(report, "head")[:2])


def test_the_table_is_printed(report):
    lines = report[1].splitlines()
    assert sum(line.startswith(("parity", "step", "head", "padded", "weights")) for line in lines) == len(report[0]["rows"])
    assert sum(line.startswith("check ") for line in lines) == 5
    assert lines[-1] == "gpu_check: all is well"
