"""The quickstart is run once for all tests that look at it."""

import pytest
from whole_runs import Ended, submit


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory) -> Ended:
    """The quickstart, whole: seed 1, from random weights to a held-out reward of 0.9."""
    return submit(tmp_path_factory.mktemp("quickstart") / "run", "configs/quickstart.yaml")
