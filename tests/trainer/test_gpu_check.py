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
    assert not [row for row in report[0]["rows"] if row.get("skipped")]
    assert {row["check"] for row in report[0]["rows"]} == {"parity", "step", "head", "padded", "weights"}


def test_values_agree_with_transformers(report):
    exact, half = rows(report, "parity")
    assert (exact["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert exact["logits_off"] < 1e-5
    assert exact["gradients_off"] < 1e-4
    assert 0 < half["logits_off"] < 0.05


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
