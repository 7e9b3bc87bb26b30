"""An optimizer in the host's memory, by Megatron's own code but for the accelerator from which it would come."""

import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import Results, run_ranks

WORKER = Path(__file__).with_name("offload_worker.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("offload")
    (folder / "ranks_2").mkdir()
    run_ranks([sys.executable, str(WORKER), str(folder)], 2)
    return Results(folder)


def test_it_makes_the_steps_of_one_beside_the_parameters(found):
    """To the last bit but one of bfloat16: torch's AdamW rounds its float32 otherwise when it is fused."""
    host, beside = found[2, "host"], found[2, "beside"]
    assert host["held"] == host["moved"] > 0
    for name in ("first", "went_on"):
        np.testing.assert_allclose(host[name], beside[name], rtol=2e-3)
    assert (beside["first"][:, 1] > 2 * 0.05).all()  # the gradient is clipped
    changed = np.abs(beside["last"] - beside["start"])
    assert np.abs(host["last"] - beside["last"]).mean() < 0.01 * changed.mean()


@pytest.mark.parametrize("name", ["host", "beside"])
def test_it_goes_on_from_a_checkpoint_bit_for_bit(found, name):
    assert np.array_equal(found[2, name]["resumed"], found[2, name]["went_on"])
    assert np.array_equal(found[2, name]["resumed_last"], found[2, name]["last"])


def test_a_checkpoint_does_not_depend_on_where_the_state_is_nor_on_the_split(found):
    crossed = found[2, "crossed"]
    for name, saved in (("host_from_beside", "beside"), ("beside_from_host", "host"), ("host_in_another_split", "host")):
        np.testing.assert_allclose(crossed[name], found[2, saved]["went_on"], rtol=1e-2, err_msg=name)


def test_a_step_without_a_finite_gradient_is_skipped_and_can_be_saved(found):
    host = found[2, "host"]
    assert host["only"][0, 2] == 1
    assert (host["only_then"][:, 2] == 0).all()
    assert np.array_equal(host["only_resumed"], host["only_then"])
