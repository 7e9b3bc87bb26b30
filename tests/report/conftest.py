"""A run that was played, for audits."""

import shutil

import pytest
from played_run import play

from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """Two attempts: the first crashed behind a checkpoint, so that steps were trained again and groups issued again."""
    folder = play(tmp_path_factory.mktemp("good") / "run", [70])
    result = audit(folder.path)
    assert result.passed, render(result)
    assert result.attempts == result.lineages == 2
    assert result.trained_again
    assert sum(result.issued_again.values())
    assert sum(result.discarded.values())
    return folder


@pytest.fixture
def run(good, tmp_path):
    shutil.copytree(good.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")
