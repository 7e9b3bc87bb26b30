"""What lies in a run folder: numbered folders, in order, and never nothing where it may not be looked."""

import pytest
from unprivileged import unprivileged

from prl.runfolder.paths import RunFolder, listed


def test_names_that_match_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "a.json", "c.jsonl.tmp"):
        (tmp_path / name).touch()
    assert listed(tmp_path, "*.jsonl") == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert listed(tmp_path / "absent", "*") == []
    assert listed(tmp_path / "a.json", "*") == []


def test_a_folder_that_may_not_be_read_is_told(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.path.chmod(0o755)
    run.checkpoint(5).mkdir()
    run.manifest(5).touch()
    assert run.manifests() == [(5, run.manifest(5))]
    run.checkpoints.chmod(0)
    with unprivileged(tmp_path), pytest.raises(PermissionError, match="checkpoints"):
        run.manifests()
