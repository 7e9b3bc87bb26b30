"""Checkpoints of four ranks that share a model along several axes: what ranks that share it otherwise, one rank alone, and an
export make of them."""

import sys
from pathlib import Path

import pytest
from checkpoint_layouts import MODELS, RESHARDED, reshardings
from ranks import Results, run_ranks
from same_state import assert_exported, assert_goes_on, assert_same_state
from written_bytes import bytes_of_tensors, largest_state

WORKER = Path(__file__).with_name("resharding_worker.py")
SPLITS = [(model, layout) for model, splits in RESHARDED.items() for layout in splits]
RESUMES = [(model, layout, origin) for model, own in SPLITS for layout, origin in ((own, own), ("one", own))]
RESUMES += [(model, layout, origin) for model in RESHARDED for layout, origin in reshardings(model)]
pytestmark = [pytest.mark.slow, pytest.mark.deadline(1800)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("resharding")
    (folder / "ranks_4").mkdir()
    run_ranks([sys.executable, str(WORKER), str(folder)], 4)
    return Results(folder)


@pytest.mark.parametrize(("model", "layout", "origin"), RESUMES)
def test_weights_and_moments_are_those_that_were_saved(saved, model, layout, origin):
    assert_same_state(model, saved[4, f"resumed_{model}_{layout}_from_{origin}"], saved[4, f"went_on_{model}_{origin}"])


@pytest.mark.parametrize(("model", "layout", "origin"), RESUMES)
def test_steps_go_on_from_there(saved, model, layout, origin):
    resumed, went_on = saved[4, f"resumed_{model}_{layout}_from_{origin}"], saved[4, f"went_on_{model}_{origin}"]
    assert_goes_on(model, resumed, went_on, same_layout=layout == origin)


@pytest.mark.parametrize(("model", "layout"), SPLITS)
def test_the_export_has_the_weights_of_the_ranks(saved, tmp_path, model, layout):
    assert_exported(model, saved.folder / "ranks_4" / model / layout, saved[4, f"went_on_{model}_{layout}"], tmp_path)


def test_a_save_takes_each_rank_the_memory_of_its_own_part(saved):
    """Of an optimizer that four ranks share none has more than a quarter, and the tensor that begins at its end."""
    folder = saved.folder / "ranks_4" / "half" / "watched" / "trainer"
    written, shares = bytes_of_tensors(folder, 4), bytes_of_tensors(folder, 4, "optimizer.")
    largest = largest_state(MODELS["half"])
    assert largest < sum(shares) / 8
    assert all(abs(share - sum(shares) / 4) <= largest for share in shares)
    for peak, own in zip(saved[4, "memory_of_a_save"]["peaks"], written, strict=True):
        assert peak == pytest.approx(own, rel=0.02, abs=2**14)
