"""How files of a new run lie on a parallel filesystem."""

import os

from prl.runfolder.paths import RunFolder


def test_streams_lie_on_one_target_and_weights_on_several(tmp_path, monkeypatch):
    lfs = tmp_path / "bin" / "lfs"
    lfs.parent.mkdir()
    lfs.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\nls "$4" >> {tmp_path}/there\nexit 25\n')
    lfs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{lfs.parent}:{os.environ['PATH']}")
    run = RunFolder(tmp_path / "run")
    run.create()
    assert (tmp_path / "said").read_text().splitlines() == [
        f"setstripe -c 1 {run.path}/streams",
        f"setstripe -c 4 {run.weights}",
        f"setstripe -c 4 {run.checkpoints}",
    ]
    assert (tmp_path / "there").read_text() == ""  # folders inherit it that are made in it afterwards
    assert run.steps.is_dir()
    assert run.rollouts.is_dir()
