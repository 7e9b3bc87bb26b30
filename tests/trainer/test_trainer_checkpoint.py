"""Checkpoints: in another split, written while training goes on, interrupted at every file; steps that are skipped."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_layouts import LAYOUTS, MODELS, OPTIONS, SHARED, origins
from ranks import Results, run_ranks
from same_state import assert_exported, assert_goes_on, assert_same_state
from written_bytes import bytes_of_tensors, largest_state

from prl.config.memory import saved_bytes

WORKER = Path(__file__).with_name("checkpoint_worker.py")
SPLITS = [(model, layout) for model, splits in LAYOUTS.items() for layout in splits]
RESUMES = [(2, *split, *saved) for split in SPLITS for saved in origins(*split)]
RESUMES += [(1, model, "one_shared" if layout.endswith("_shared") else "one", 2, layout) for model, layout in SPLITS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What one rank did."""
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "ranks_1").mkdir()
    run_ranks([sys.executable, str(WORKER), str(folder)], 1)
    return Results(folder)


@pytest.fixture(scope="module")
def split(saved: Results) -> Results:
    """And what two did, in one split after another."""
    (saved.folder / "ranks_2").mkdir()
    run_ranks([sys.executable, str(WORKER), str(saved.folder)], 2)
    return saved


@pytest.mark.parametrize(
    "name", ["dense_one", "proximal_one", "value_head_one", "value_head_one_shared", "half_one", "half_one_shared"]
)
def test_one_rank_goes_on_bit_for_bit(saved, name):
    layout = name[name.index("one") :]
    assert np.array_equal(saved[1, f"resumed_{name}_from_1_{layout}"]["steps"], saved[1, f"went_on_{name}"]["steps"])


def test_a_checkpoint_may_have_a_proximal_policy_that_is_not_asked_for_or_lack_one_that_is(saved):
    found = saved[1, "other_proximal"]
    np.testing.assert_allclose(found["asked"], found["own"], rtol=1e-6)
    assert np.isfinite(found["unasked"]).all()
    went_on = saved[1, "went_on_proximal_one"]["steps"]
    assert abs(found["own_instead"][0, 1] / went_on[0, 1] - 1) > 0.01  # so that the tests above see whether it is there


@pytest.mark.parametrize(
    ("model", "layout"), [*((model, "one") for model in MODELS), ("dense", "one_shared"), ("experts", "one_shared")]
)
def test_a_checkpoint_has_the_bytes_that_were_said(saved, model, layout):
    options = replace(OPTIONS[model], **(SHARED if layout == "one_shared" else {}))
    found = bytes_of_tensors(saved.folder / "ranks_1" / model / layout / "trainer", 1)
    assert found == [saved_bytes(MODELS[model], options, 1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), SPLITS)
def test_each_rank_writes_what_was_said(split, model, layout):
    """But for norms, of which one tensor-parallel rank writes all, a tied output layer, which the first stage writes, and a
    tensor that two ranks' shares of an optimizer have parts of, which one of them writes."""
    found = bytes_of_tensors(split.folder / "ranks_2" / model / layout / "trainer", 2)
    options = replace(OPTIONS[model], **LAYOUTS[model][layout])
    said = [saved_bytes(MODELS[model], options, 2, rank) for rank in range(2)]
    largest = largest_state(MODELS[model]) if layout.endswith("_shared") else 0
    assert 0.9 * sum(said) <= sum(found) <= sum(said)
    for rank in range(2):
        assert 0.9 * said[rank] - largest <= found[rank] <= said[rank] + largest


@pytest.mark.slow
@pytest.mark.deadline(1800)
@pytest.mark.parametrize(("ranks", "model", "layout", "saved_by", "origin"), RESUMES)
def test_any_split_has_the_weights_and_moments_of_another_bit_for_bit(split, ranks, model, layout, saved_by, origin):
    resumed = split[2, f"resumed_{model}_{layout}_from_{saved_by}_{origin}"]
    assert_same_state(model, resumed, split[saved_by, f"went_on_{model}_{origin}"])


@pytest.mark.slow
@pytest.mark.deadline(1800)
@pytest.mark.parametrize(("ranks", "model", "layout", "saved_by", "origin"), RESUMES)
def test_any_split_goes_on_from_the_checkpoint_of_another(split, ranks, model, layout, saved_by, origin):
    resumed = split[2, f"resumed_{model}_{layout}_from_{saved_by}_{origin}"]
    assert_goes_on(model, resumed, split[saved_by, f"went_on_{model}_{origin}"], same_layout=layout == origin)


@pytest.mark.parametrize(
    ("model", "layout"), [(model, "one_shared") for model in ("dense", "value_head", "half", "half_experts")]
)
def test_an_export_has_the_weights_of_the_rank(saved, tmp_path, model, layout):
    assert_exported(model, saved.folder / "ranks_1" / model / layout, saved[1, f"went_on_{model}_{layout}"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), SPLITS)
def test_an_export_has_the_weights_of_the_ranks(split, tmp_path, model, layout):
    assert_exported(model, split.folder / "ranks_2" / model / layout, split[2, f"went_on_{model}_{layout}"], tmp_path)


@pytest.mark.slow
def test_what_the_optimizers_state_depends_on_must_be_as_it_was(split):
    found = split[2, "refused"]
    assert re.search(
        r"train\.distributed_optimizer = False: it was True when .*data_shared was", str(found["distributed_optimizer"])
    )
    assert re.search(r"train\.dtype = bfloat16: it was float32 when .*data was written.* set it as it was", str(found["dtype"]))
    assert re.search(r"train\.value_head = True: it was False when .*data was written", str(found["value_head"]))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "values", "shared", "proximal"])
def test_what_is_trained_while_a_checkpoint_is_written_is_not_in_it(saved, name):
    found = saved[1, f"copied_{name}"]
    assert not found["early"]
    assert np.array_equal(found["resumed"], found["went_on"])


def check_skipped(found) -> None:
    """A step whose gradient is not finite changes nothing and is counted; a run that has only such steps can be saved."""
    assert found["first"][0, 2] == 0
    assert found["skip"][0, 2] == 1
    assert not np.isfinite(found["skip"][0, 1])
    assert found["same"]
    assert np.isfinite(found["then"]).all()
    assert (found["then"][:, 2] == 0).all()
    assert np.array_equal(found["resumed"], found["then"])
    assert found["only"][0, 2] == 1
    assert (found["only_then"][:, 2] == 0).all()
    assert np.array_equal(found["only_resumed"], found["only_then"])


def test_a_step_whose_gradient_is_not_finite_is_skipped(saved):
    check_skipped(saved[1, "skipped_one"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stages", "data", "data_half"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(split, name):
    """With data parallelism one rank alone has the micro-batch that spoils it."""
    check_skipped(split[2, f"skipped_{name}"])


def test_a_resume_goes_by_the_options_that_it_is_given(saved):
    found = saved[1, "other_options"]
    assert set(found["lr"]) == {2e-3 * 3 / 5}
    assert set(map(tuple, found["betas"])) == {(0.8, 0.9)}
    assert set(found["eps"]) == {1e-7}
    assert set(found["weight_decay"]) == {0.0, 0.1}


@pytest.mark.parametrize("name", ["plain", "shared"])
def test_a_value_heads_rate_factor_may_change_with_a_resume(saved, name):
    """Ten times the rate is ten times the step: of the head, which does not decay, and of nothing else."""
    found = saved[1, f"value_rate_{name}"]
    rate = 1e-3 * 3 / 5
    assert set(found["rates_1"]) == {rate}
    assert sorted(found["rates_10"]) == pytest.approx([rate] * (len(found["rates_10"]) - 1) + [10 * rate])
    np.testing.assert_allclose(found["head_10"], 10 * found["head_1"], rtol=1e-3, atol=1e-6)
    assert np.abs(found["head_1"]).max() > 1e-4
    assert np.array_equal(found["norm_10"], found["norm_1"])


def test_files_that_cannot_be_read_are_told_in_a_line(saved):
    found = {name: str(words) for name, words in saved[1, "unreadable"].items()}
    for name, words in found.items():
        kind, _, file = name.partition(" ")
        if file:
            assert f"/{kind}{file}/trainer cannot be read: " in words
            assert "\n" not in words
    assert "/missing.metadata/trainer/.metadata'" in found["missing .metadata"]
    assert "No such file or directory" in found["missing __0_0.distcp"]
    assert "Ran out of input" in found["empty .metadata"]
    assert "JSONDecodeError" in found["half metadata.json"]


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("rope_theta", "rope_theta = 5.0, which was 10000.0"),
        ("architecture", "architecture = llama, which was qwen3"),
        ("vocabulary", "vocabulary = 52, which was 51"),
        ("layers", "layers = 2, which was 4"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved, key, change):
    assert f"dense/one was written: {change}; restore its config.json" in str(saved[1, "unreadable"][key])


def test_a_save_whose_plan_fails_says_so_and_leaves_nothing(saved):
    found = saved[1, "unplanned"]
    assert re.fullmatch(r"\S*/unplanned: the checkpoint could not be written: PermissionError: .*", str(found["words"]))
    assert not found["left"]


def test_a_save_that_was_given_up_begins_no_file_where_the_next_one_writes(saved):
    found = saved[1, "given_up"]
    assert str(found["words"]).endswith("its files were not written within 0 s")
    assert found["opened"].tolist() == ["first"]


def test_a_save_that_is_interrupted_or_fails_at_any_file_leaves_what_counted_and_the_next_one_succeeds(saved):
    """The worker asserts it at each point; here is what the points were."""
    found = saved[1, "interrupted"]
    points = [str(point) for point in found["points"]]
    for file in (r"__N_N\.distcp", r"\.metadata\.tmp", r"metadata\.json"):
        for kind in ("create", "write", "fsync"):
            assert any(re.match(rf"{kind} checkpoints/step_N/\.tmp-trainer/{file} ", point) for point in points), (kind, file)
    assert "unlink checkpoints/step_N/manifest.json (prl.trainer.checkpoint)" in points
    assert "rename checkpoints/step_N/.tmp-trainer -> checkpoints/step_N/trainer (prl.trainer.checkpoint)" in points
    for point, end in zip(points, found["failed"].tolist(), strict=True):
        # Made twice, the second time for nothing; and the checkpoint is whole by the time that the old one is cleaned away.
        may_succeed = point.startswith(("mkdir", "unlink checkpoints/step_N/.old-trainer"))
        assert (may_succeed and end == "saved") or ("no space is left" in end and "step_000004" in end), (point, end)
    killed = found["killed"].tolist()
    assert set(killed) <= {"killed", "saved", *found["failed"].tolist()}
    assert killed.count("killed") > 0.75 * len(points)  # behind the others' faults nothing more is written, which would kill
