"""An optimizer in the host's memory, by Megatron's own code but for the accelerator from which it would come."""

import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import Results, run_ranks

WORKER = Path(__file__).with_name("offload_worker.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("offload")
    (folder / "ranks_2").mkdir()
    run_ranks([sys.executable, str(WORKER), str(folder)], 2)
    return Results(folder)


@pytest.mark.parametrize("adapters", ["", "adapters_"])
def test_it_makes_the_steps_of_one_beside_the_parameters(found, adapters):
    """To the last bit but one of bfloat16: torch's AdamW rounds its float32 otherwise when it is fused."""
    host, beside = found[2, f"{adapters}host"], found[2, f"{adapters}beside"]
    assert host["held"] == host["moved"] > 0
    for name in ("first", "went_on"):
        np.testing.assert_allclose(host[name], beside[name], rtol=2e-3)
    assert (beside["first"][:, 1] > 2 * 0.05).all()  # the gradient is clipped
    changed = np.abs(beside["last"] - beside["start"])
    assert np.abs(host["last"] - beside["last"]).mean() < 0.01 * changed.mean()


def test_of_a_model_with_adapters_it_holds_these_alone(found):
    assert found[2, "adapters_host"]["held"] < 0.5 * found[2, "host"]["held"]


@pytest.mark.parametrize("name", ["host", "beside", "adapters_host", "adapters_beside"])
def test_it_goes_on_from_a_checkpoint_bit_for_bit(found, name):
    assert np.array_equal(found[2, name]["resumed"], found[2, name]["went_on"])
    assert np.array_equal(found[2, name]["resumed_last"], found[2, name]["last"])


@pytest.mark.parametrize("adapters", ["", "adapters_"])
def test_a_checkpoint_does_not_depend_on_where_the_state_is_nor_on_the_split(found, adapters):
    crossed = found[2, "crossed"]
    for name, saved in (("host_from_beside", "beside"), ("beside_from_host", "host"), ("host_in_another_split", "host")):
        if adapters:
            name = name.replace("_from_", "_from_adapters_")
        went_on = found[2, adapters + saved]["went_on"]
        np.testing.assert_allclose(crossed[adapters + name], went_on, rtol=1e-2, err_msg=adapters + name)


def test_adapters_beside_a_distributed_optimizer_go_on_in_another_split(found):
    crossed, went_on = found[2, "crossed"]["adapters_beside_in_another_split"], found[2, "adapters_beside"]["went_on"]
    np.testing.assert_allclose(crossed, went_on, rtol=1e-2)


def test_a_step_without_a_finite_gradient_is_skipped_and_can_be_saved(found):
    host = found[2, "host"]
    assert host["only"][0, 2] == 1
    assert (host["only_then"][:, 2] == 0).all()
    assert np.array_equal(host["only_resumed"], host["only_then"])
