"""Paths become absolute; what may not be read or written is told with its key."""

import dataclasses
import re
from pathlib import Path

import pytest
from checked import GIB, model_folder, problems
from unprivileged import unprivileged

from prl.config.checks import check
from prl.config.load import ConfigError, load, replace
from prl.config.paths import resolve_paths
from prl.domains.options import DomainOptions
from prl.runfolder.model import write_model_folder
from prl.streams.options import RedisOptions


def with_options(config, **options):
    return dataclasses.replace(config, domains=(DomainOptions(name="gsm8k", options=options),))


def test_the_run_folder_may_start_at_home_and_must_be_a_path(good, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = resolve_paths(replace(good, run={"folder": "~/runs/a"}), Path("/base"))
    assert found.run.folder == "/home/me/runs/a"
    assert resolve_paths(replace(good, model={"path": "~/m"}), Path("/base")).model.path == "/home/me/m"
    for path, words in (("~nobody-of-this-name/a", "there is no such user"), ("a\0b", "no path can hold NUL")):
        for key, config in (
            ("run.folder", replace(good, run={"folder": path})),
            ("model.path", replace(good, model={"path": path})),
            ("run.replay", replace(good, run={"replay": path})),
            ("streams.redis.password_file", replace(good, streams={"redis": RedisOptions(password_file=path)})),
            ("domains[0].options.paths", with_options(good, paths=["a", path])),
            ("domains[0].options.other_path", with_options(good, other_path=path)),
        ):
            with pytest.raises(ConfigError, match=rf"^{re.escape(key)} = .*: {words}"):
                resolve_paths(config, Path("/base"))


def test_paths_become_absolute_and_survive_the_yaml(tmp_path):
    text = "run: {name: one}\nmodel: {path: models/a}\ndomains: [{name: gsm8k, options: {paths: [a, /b], template: a}}]\n"
    (tmp_path / "c.yaml").write_text(text)
    config = resolve_paths(load(tmp_path / "c.yaml"), Path("/base"))
    assert config.run.folder == "/base/runs/one"
    assert config.model.path == "/base/models/a"
    assert config.domains[0].options == {"paths": ["/base/a", "/b"], "template": "a"}


def test_a_folder_that_holds_another_run(good):
    folder = Path(good.run.folder)
    folder.mkdir(parents=True)
    assert check(good, memory_bytes=16 * GIB) == []
    (folder / "notes.txt").touch()
    assert problems(good) == [f"run.folder = {folder}: is not empty and holds no run; choose another run.folder or run.name"]
    (folder / "config.yaml").touch()  # of another program
    assert problems(good) == [f"run.folder = {folder}: is not empty and holds no run; choose another run.folder or run.name"]
    (line,) = problems(replace(good, run={"folder": str(folder / "notes.txt")}))
    assert line.startswith(f"run.folder = {folder}/notes.txt: {folder}/notes.txt is no folder; choose another")
    (line,) = problems(replace(good, run={"folder": str(folder / "notes.txt/under")}))
    assert line.startswith(f"run.folder = {folder}/notes.txt/under: {folder}/notes.txt is no folder")
    (folder / "attempt_001").mkdir()
    (folder / "attempt_001/config.yaml").touch()
    (folder / "latest").symlink_to("attempt_001")
    for inner in ("attempt_001", "latest", "checkpoints/step_000005", "new"):
        (line,) = problems(replace(good, run={"folder": str(folder / inner)}))
        assert line.startswith(f"run.folder = {folder}/{inner}: lies in the folder of another run, {folder}; choose another")
    (line,) = problems(good)
    assert line.startswith(f"run.folder = {folder}: already holds another run, which has no checkpoint to go on from; delete")
    (folder / "checkpoints/step_000005").mkdir(parents=True)
    (folder / "checkpoints/step_000005/manifest.json").touch()
    (line,) = problems(good)
    assert line.startswith(f"run.folder = {folder}: already holds another run; go on with it by prl-submit --resume {folder}")
    write_model_folder(good.model, folder / "model")
    assert check(good, resume=True, memory_bytes=16 * GIB) == []


def test_a_folder_that_cannot_be_written(good, tmp_path):
    parent = tmp_path / "mine"
    (parent / "runs").mkdir(parents=True)
    (parent / "begun").mkdir()
    write_model_folder(good.model, parent / "begun/model")
    for folder in (parent, parent / "runs", parent / "begun", parent / "begun/model", tmp_path):
        folder.chmod(0o555)
    with unprivileged(tmp_path):
        (new,) = problems(replace(good, run={"folder": str(parent / "one" / "two")}))
        (there,) = problems(replace(good, run={"folder": str(parent / "runs")}))
        (resumed,) = problems(replace(good, run={"folder": str(parent / "begun")}), resume=True)
    assert new.startswith(f"run.folder = {parent}/one/two: {parent} cannot be written; choose another run.folder or run.name")
    assert resumed == f"--resume {parent}/begun: the run's folder cannot be written; have its owner permit it (chmod)"
    assert there.startswith(f"run.folder = {parent}/runs: cannot be written; choose another run.folder or run.name, or have")


def test_no_run_is_kept_among_the_kernel_s_own_files(good, tmp_path, monkeypatch):
    """Where root may write, as access(2) has it."""
    (tmp_path / "link").symlink_to("/sys")
    monkeypatch.chdir(tmp_path)
    for folder, kernels in (("/proc/x", "/proc"), (f"{tmp_path}/link/x/y", "/sys"), ("/dev/x", "/dev")):
        (line,) = problems(replace(good, run={"folder": folder}))
        assert line.startswith(
            f"run.folder = {folder}: {kernels} is the kernel's, and keeps no files; choose another run.folder"
        )
    for folder in ("/dev/shm/no such run", "/proc/self/cwd/run"):
        assert check(replace(good, run={"folder": folder}), memory_bytes=16 * GIB) == []


def test_a_suggested_command_can_be_copied(good, tmp_path):
    folder = tmp_path / "my run"
    (folder / "checkpoints/step_000005").mkdir(parents=True)
    (folder / "checkpoints/step_000005/manifest.json").touch()
    (folder / "config.yaml").touch()
    (folder / "attempt_001").mkdir()
    (line,) = problems(replace(good, run={"folder": str(folder)}))
    assert f"go on with it by prl-submit --resume '{folder}', or choose" in line


def test_what_may_not_be_read_is_told_with_its_key(good, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    model = replace(good, model=model_folder(locked / "model"), train={"tensor_parallel": 1})
    data = dataclasses.replace(good, domains=(DomainOptions(name="gsm8k", options={"paths": [f"{locked}/rows.jsonl"]}),))
    Path(good.run.folder).parent.mkdir(mode=0o777)
    Path(good.run.folder).parent.chmod(0o777)
    locked.chmod(0)
    with unprivileged(tmp_path):
        told = [problems(config) for config in (model, data, replace(model, model={"path": str(locked)}))]
    assert told == [
        [f"model.path = {locked}/model: Permission denied; have its owner permit it (chmod), or name another folder"],
        [f"domains[0].options.paths = {locked}/rows.jsonl: Permission denied; name the data of domain gsm8k"],
        [f"model.path = {locked}: Permission denied; have its owner permit it (chmod), or name another folder"],
    ]
