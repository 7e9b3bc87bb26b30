"""The quickstart is run once for all tests that look at it; other runs are ended with the test that started them."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import lab_cluster
import pytest
from struck_runs import SHORT
from whole_runs import ROOT, Ended, command, submit

from prl.runfolder.paths import RunFolder


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory) -> Ended:
    """The quickstart, whole: seed 1, from random weights to a held-out reward of 0.9."""
    return submit(tmp_path_factory.mktemp("quickstart") / "run", "configs/quickstart.yaml")


@pytest.fixture
def start():
    """Starts runs, which end with the test at the latest. `options` are of the command."""
    started = []

    def start(folder: RunFolder, *overrides: str, options: Sequence[str | Path] = ()) -> subprocess.Popen:
        arguments = command(*options, *SHORT, *overrides, folder=folder.path)
        started.append(subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()  # nothing happens where it has ended; the run ends with it
        process.communicate(timeout=30)


@pytest.fixture
def nodes():
    """The lab cluster's nodes, for tests of whole runs that lose some."""
    idle = sorted(lab_cluster.nodes_that_are("idle"))
    assert len(idle) >= 3
    return idle
