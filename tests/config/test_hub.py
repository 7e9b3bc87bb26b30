"""Models by their names on the hub, in a cache as huggingface_hub itself lays it out."""

import json
from pathlib import Path

import pytest

from prl.cluster.script import render
from prl.cluster.split import make_split
from prl.config.hub import cached_model
from prl.config.load import replace
from prl.config.model_checks import model_and_problems
from prl.config.paths import resolve_paths
from prl.config.schema import Config
from prl.runfolder.paths import RunFolder

COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """With two commits of one model, of which `main` is the second."""
    folder = tmp_path / "hub/models--ann--small-1.5B"
    for commit in COMMITS:
        (folder / "snapshots" / commit).mkdir(parents=True)
        blob = folder / "blobs" / commit[:8]
        blob.parent.mkdir(exist_ok=True)
        blob.write_text(json.dumps({"model_type": commit[0]}))
        (folder / "snapshots" / commit / "config.json").symlink_to(f"../../blobs/{blob.name}")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMITS[1])
    (folder / "refs/v1").write_text(COMMITS[0])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder / "snapshots"


def model(path, base):
    return resolve_paths(replace(Config(), model={"path": path}), Path(base)).model.path


def test_a_models_name_becomes_the_folder_of_its_commit(cache, tmp_path):
    assert model("ann/small-1.5B", tmp_path) == str(cache / COMMITS[1])
    assert model("ann/small-1.5B@v1", tmp_path) == str(cache / COMMITS[0])
    assert model(f"ann/small-1.5B@{COMMITS[0]}", tmp_path) == str(cache / COMMITS[0])


def test_a_folder_that_is_there_counts_more(cache, tmp_path):
    (tmp_path / "ann/small-1.5B").mkdir(parents=True)
    assert model("ann/small-1.5B", tmp_path) == str(tmp_path / "ann/small-1.5B")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ann/small", "has no model of this name"),
        ("bob/small-1.5B", "has no model of this name"),
        ("a/b/c", "has no model of this name"),
        ("ann/small-1.5B@v2", "has ann/small-1.5B, but not its revision v2, only main, v1"),
        ("ann/small-1.5B@refs/pr/1", "has ann/small-1.5B, but not its revision refs/pr/1, only main, v1"),
    ],
)
def test_what_the_cache_lacks_is_said_with_what_to_do(cache, tmp_path, name, words):
    path = model(name, tmp_path)
    assert path == str(tmp_path / name)
    _, (problem,) = model_and_problems(replace(Config(), model={"path": path}))
    assert problem.startswith(f"model.path = {path}: no such folder, and the cache {tmp_path}/hub {words}; give the folder")
    assert "hf download ORG/NAME" in problem


def test_a_model_of_which_the_cache_has_another_commit_alone(cache, tmp_path):
    for name in ("main", "v1"):
        (cache.parent / "refs" / name).unlink()
    _, (problem,) = model_and_problems(replace(Config(), model={"path": model("ann/small-1.5B", tmp_path)}))
    assert f"has ann/small-1.5B, but not its revision main, only {', '.join(COMMITS)};" in problem


@pytest.mark.parametrize("name", ["", "small", "/ann/small", "../ann/small", "a/b/c", "ann/small--1@", "ann/sm all", "~/small"])
def test_no_other_path_is_taken_for_a_name(cache, name):
    assert cached_model(name) is None


def test_a_container_sees_what_the_links_of_a_cached_model_lead_to(cache, tmp_path):
    cluster = {"nodes": 1, "container": "apptainer", "container_image": "/images/a.sif"}
    for path, seen in (
        (str(cache / COMMITS[0]), str(cache.parent)),
        ("/models/a", "/models/a"),
    ):
        config = replace(Config(), cluster=cluster, model={"path": path})
        text = render(config, make_split(config), RunFolder(tmp_path / "run"), 1)
        assert f"--bind {tmp_path}/run:{tmp_path}/run,{seen}:{seen} " in text
