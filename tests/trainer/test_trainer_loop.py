"""`python -m prl.trainer` as the node agent starts it, from its start to its end, and its weights on their way."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from served_trainer import LAYOUTS, RANKS, TRAIN, TRANSPORTS, WORKERS, Run, new_run, start_and_serve, step_file
from step_metrics import PHASES, other_time_s, undocumented

from prl.metrics import names
from prl.weights.digest import digest


@pytest.fixture(scope="module", params=["tensor", pytest.param("stages", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, model_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    train = replace(TRAIN, **LAYOUTS[request.param])
    run = new_run(tmp_path_factory.mktemp("run"), model_folders, train, transport=TRANSPORTS[request.param])
    run.files = {step: step_file(run.folder, step, "original") for step in (1, 2, 3)}
    return run


def check_seconds(run: Run) -> None:
    """Phases add up to the step; where something was slow it is seen. What is beside them is small, but for other work on the
    machine that a step may have waited for."""
    others_s = {step: other_time_s(metrics) for step, metrics in run.metrics.items()}
    assert min(others_s.values()) >= 0
    assert min(other_s / run.metrics[step][names.STEP_S] for step, other_s in others_s.items()) < 0.1
    for key in PHASES - {names.SAVE_S, names.PROXIMAL_S}:
        assert all(key in metrics for metrics in run.metrics.values()), key
    assert [step for step, metrics in run.metrics.items() if names.SAVE_S in metrics] == [3]  # begun behind step 2
    assert run.metrics[2][names.WAIT_S] > 0.5
    assert run.metrics[3][names.SEND_S] > 0.5


def test_a_run_from_its_start_to_its_export(run, results):
    run.slow_s = {("next_step", 2): 0.5, ("offer", 3): 0.5}
    assert asyncio.run(start_and_serve(run)) == [0, 0]
    assert sorted(run.joined) == [0, 1]
    assert run.failures == []

    assert list(run.versions) == ["0:0", "0:1", "0:2", "0:3"]
    start = load_file(results.folder / "qwen3" / "model.safetensors")
    assert all(torch.equal(run.versions["0:0"][name], tensor) for name, tensor in start.items())
    for label, tensors in run.versions.items():
        assert str(digest(tensors)) == run.digests[label]
    assert len(set(run.digests.values())) == 4
    assert [label for label, share in run.shares.items() if share is None] == ["0:0", "0:2"]  # all values every two steps
    assert 0 < run.shares["0:1"] <= 1

    expected = results[RANKS, "step_reference"]  # the same steps without the loop around them
    for step in (1, 2, 3):
        assert run.metrics[step]["train/loss"] == pytest.approx(float(expected[f"{step}:train/loss"]), abs=1e-6)
        assert run.metrics[step]["train/kl"] == pytest.approx(float(expected[f"{step}:train/kl"]), abs=1e-6)
        assert run.metrics[step]["train/kl_coefficient"] == pytest.approx(0.1 + 5.0 * (step - 1))
        assert undocumented(run.metrics[step]) == []
    check_seconds(run)
    assert run.data == {step: {"reward_mean": step / 4} for step in (1, 2, 3)}  # of the step files, for the run's metrics

    assert run.checkpoints == [2, 3]
    assert run.finished == [3]
    exported = load_file(run.folder.export / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in run.versions["0:3"].items())
    assert json.loads((run.folder.export / "config.json").read_text())["model_type"] == "qwen3"


def test_a_resumed_run_goes_on_as_before_and_another_runs_step_file_ends_it(run):
    """Depends on the run above, which left the checkpoint."""
    before = dict(run.metrics), run.versions["0:3"]
    run.versions.clear()
    run.stop_after = 9
    run.files[4] = step_file(run.folder, 4, "another")
    assert asyncio.run(start_and_serve(run, resumes=True)) == [1, 1]

    assert list(run.versions) == ["1:2", "1:3"]
    assert run.metrics[3]["train/loss"] == before[0][3]["train/loss"]
    assert run.metrics[3]["train/kl"] == before[0][3]["train/kl"] > 0  # the reference is the one of before
    assert run.metrics[3]["train/loss_kl"] == before[0][3]["train/loss_kl"] > 0  # and the coefficient that of the step
    assert run.metrics[3]["train/kl_coefficient"] == pytest.approx(10.1)
    assert all(torch.equal(run.versions["1:3"][name], tensor) for name, tensor in before[1].items())
    assert run.failures
    assert all("of run 'another', this is run 'original'" in failure for failure in run.failures)
    assert run.failures[0].startswith("DamagedStep: step 4 cannot be trained: ")
    assert set(run.ending) == {True}  # another start would find it so again
    assert np.isfinite(run.metrics[3]["train/grad_norm"])


@pytest.mark.parametrize("transport", ["gather", "lanes"])
def test_a_group_that_breaks_is_left_and_its_version_sent_again_and_so_is_one_that_is_asked_for(
    run, model_folders, tmp_path, transport
):
    """The same training as above: versions are the same ones, bit for bit, however they go."""
    sent = {label: run.digests[label] for label in ("0:0", "0:1", "0:2")}
    again = new_run(tmp_path / "again", model_folders, run.train, transport=transport)
    again.stop_after, again.save_after, again.breaks, again.resend, again.by_files = 2, 9, "0:1", 2, "0:2"
    again.slow_s = {("offer", 3): 1.0}  # what is asked for
    for step in (1, 2):
        again.files[step] = {**run.files[step], "path": str(run.folder.path / run.files[step]["path"])}
    began = time.monotonic()
    assert asyncio.run(start_and_serve(again)) == [0, 0]
    assert time.monotonic() - began < 100  # the group would have waited for 120 s
    assert again.failures == []
    assert again.offered == ["0:0", "0:1", "0:1", "0:1", "0:2"]  # the second group is whole, and then it is asked for
    assert again.metrics[2][names.SEND_S] > 1.0  # counts as sent, not as waited for, in the step that comes next
    assert other_time_s(again.metrics[2]) >= 0
    (failure,) = again.unsent
    assert (failure["step"], failure["epoch"], failure["missing"], failure["overdue"]) == (1, 2, [], False)
    assert "it was left while it was built" in failure["error"]
    assert list(again.versions) == ["0:0", "0:1", "0:2"]
    assert again.digests == {label: str(digest(tensors)) for label, tensors in again.versions.items()} == sent
    assert again.shares == {"0:0": None, "0:1": 0.0, "0:2": None}  # the last 0:1 is told as a delta to the one before
    if transport == "lanes":
        assert list(again.lanes) == ["0:0", "0:1"]
        whole = sum(tensor.nbytes for tensor in again.versions["0:2"].values())
        assert again.gathered == {"0:0": 0, "0:1": 0, "0:2": whole}
        assert all(told == held and len(set(told)) == WORKERS for told, held in again.lanes.values())


def test_versions_are_sent_while_the_next_step_is_computed(run, model_folders, tmp_path):
    """The same training and the same versions, bit for bit: one whose group breaks and which arrives late, one that is asked
    for again, and the last, which no lanes take."""
    digests = {label: run.digests[label] for label in ("0:0", "0:1", "0:2", "0:3")}
    beside = new_run(tmp_path / "beside", model_folders, run.train, transport="lanes", overlap=True)
    beside.breaks, beside.resend, beside.by_files = "0:1", 3, "0:3"
    beside.slow_s = {("receive", 2): 2.0}
    for step in (1, 2, 3):
        beside.files[step] = {**run.files[step], "path": str(run.folder.path / run.files[step]["path"])}
    assert asyncio.run(start_and_serve(beside)) == [0, 0]
    assert beside.failures == []
    assert beside.offered == ["0:0", "0:1", "0:1", "0:2", "0:2", "0:3", "0:3"]  # the last one: until tensors can be gathered
    assert [failure["step"] for failure in beside.unsent] == [1]
    for name in ("train/loss", "train/grad_norm", "train/kl"):
        assert [beside.metrics[step][name] for step in (1, 2, 3)] == [run.metrics[step][name] for step in (1, 2, 3)]
    assert beside.digests == {label: str(digest(tensors)) for label, tensors in beside.versions.items()} == digests
    assert all(told == held and len(set(told)) == WORKERS for told, held in beside.lanes.values())

    heard = beside.heard
    assert heard.index("trained 1") < heard.index("next_step 2") < heard.index("unsent 0:1") < heard.index("sent 0:1")
    assert heard.index("sent 0:1") < heard.index("trained 2")  # its optimizer has waited
    assert beside.metrics[2][names.SEND_S] > 1.0
    assert beside.metrics[2][names.WAIT_S] < beside.metrics[2][names.SEND_S]  # the step file was not waited for
    assert heard.index("trained 3") < heard.index("sent 0:3") < heard.index("finished 3")
    assert all(other_time_s(metrics) >= 0 for metrics in beside.metrics.values())
    assert beside.checkpoints == [2, 3]
    exported = load_file(beside.folder.export / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in beside.versions["0:3"].items())


@pytest.mark.slow
def test_what_ends_the_trainer_does_not_wait_for_a_version_on_its_way(run, model_folders, tmp_path):
    """Another run's step file is read while the sampler takes none of version 1."""
    beside = new_run(tmp_path / "beside", model_folders, run.train, transport="lanes", overlap=True)
    beside.holds = "0:1"
    beside.files[1] = {**run.files[1], "path": str(run.folder.path / run.files[1]["path"])}
    beside.files[2] = step_file(beside.folder, 2, "another")
    assert asyncio.run(start_and_serve(beside)) == [1, 1]
    assert all(failure.startswith("DamagedStep: step 2 cannot be trained: ") for failure in beside.failures)
    assert len(beside.failures) == RANKS
    assert beside.offered == ["0:0", "0:1"]
    assert "sent 0:1" not in beside.heard


def test_a_run_without_samplers_trains_from_another_runs_step_files(run, results, model_folders, tmp_path):
    replayed = new_run(tmp_path / "replay", model_folders, run.train, "replay", str(run.folder))
    replayed.has_samplers, replayed.stop_after = False, 2
    for step in (1, 2):
        replayed.files[step] = {**run.files[step], "path": str(run.folder.path / run.files[step]["path"])}
    assert asyncio.run(start_and_serve(replayed)) == [0, 0]

    assert replayed.failures == []
    assert replayed.offered == ["0:0", "0:1", "0:2"]
    expected = results[RANKS, "step_reference"]
    for step in (1, 2):
        for name in ("train/loss", "train/grad_norm", "train/kl"):
            assert replayed.metrics[step][name] == run.metrics[step][name]  # bit for bit
        assert replayed.metrics[step]["train/loss"] == pytest.approx(float(expected[f"{step}:train/loss"]), abs=1e-6)
    assert replayed.checkpoints == replayed.finished == [2]
