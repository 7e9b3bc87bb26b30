"""The run folder that an actor works in."""

from pathlib import Path

import pytest

from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.trainer.options import ModelOptions


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    write_model_folder(ModelOptions(init="random", architecture="qwen2"), run.model)
    return run
