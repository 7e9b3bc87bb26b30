"""What is wrong, or was not measured, the GPU check says, in its report, its last line and its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("gpu_check_faults.py")
PADDED, WEIGHTS = "padded, tiny at 64 tokens, recompute none", "weights, tiny"


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu_check_faults")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(WORKER.parents[2]), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    command = [sys.executable, str(WORKER), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert "deadline" in found, done.stdout + done.stderr
    return found, done


@pytest.mark.parametrize(
    ("fault", "off", "well"),
    [
        ("rope", ["gradients_off"], ["packed_off_alone"]),
        ("packing", ["logits_off", "gradients_off", "packed_off_alone"], []),
        ("gradient", ["gradients_off"], ["logits_off", "packed_off_alone"]),
    ],
)
def test_a_wrong_model_is_not_well(faults, fault, off, well):
    found, done = faults
    (row,) = found[fault]["rows"]
    allowed = {"gradients_off": row["allowed_gradients"]}
    above = {name for name in (*off, *well) if row[name] > allowed.get(name, row["allowed_logits"])}
    assert above == set(off)
    assert row["ok"] is found[fault]["ok"] is False
    assert found["codes"][fault] == 1
    assert f"{fault}:\n" in done.stdout


def test_a_measurement_that_fails_does_not_hide_the_next_one(faults):
    found, done = faults
    failed, weights = found["error"]["rows"]
    assert (failed["failed"], failed["ok"], weights["ok"]) == ("ValueError: broken", False, True)
    assert PADDED in found["error"]["missing"]
    assert WEIGHTS not in found["error"]["missing"]
    assert found["codes"]["error"] == 1
    assert "ValueError: broken" in done.stderr


def test_what_has_no_room_is_named_and_no_fault(faults):
    found, done = faults
    (row,) = found["memory"]["rows"]
    assert row["skipped"] == "out of memory: 8 GiB are missing"
    assert PADDED in found["memory"]["missing"]
    assert (found["memory"]["complete"], found["memory"]["ok"]) == (False, True)
    assert found["codes"]["memory"] == 0
    assert "all that was measured is well, not measured: parity; step, tiny at 64 tokens" in done.stdout


def test_what_comes_too_late_is_a_fault(faults):
    found, _ = faults
    (row,) = found["late"]["rows"]
    assert row["failed"] == "not begun, as 0 s were over"
    assert WEIGHTS in found["late"]["missing"]
    assert found["codes"]["late"] == 1


def test_at_the_deadline_it_ends_with_what_it_has(faults):
    found, done = faults
    assert done.returncode == 1
    assert [row["seconds"] for row in found["deadline"]["rows"]] == [1.0]
    assert found["deadline"]["missing"][-2:] == [PADDED, WEIGHTS]
    assert not found["deadline"]["complete"]
    last = done.stdout.splitlines()[-1]
    assert last.startswith("gpu_check: 480 s are over, 0 measurements failed or are off, not measured: ")
    assert last.endswith(f"{PADDED}; {WEIGHTS}")
    assert "in strike" in done.stderr  # where it was
    assert "deadline" not in found["codes"]
