"""The scripts that people start first, and what pip is told."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["quickstart", "setup", "test"])
@pytest.mark.parametrize("place", ["/tmp", "tools"])
def test_help_from_any_folder(name, place):
    folder = Path(place) if place.startswith("/") else ROOT / place
    script = ROOT / "tools" / f"{name}.sh" if place.startswith("/") else Path(f"{name}.sh")
    done = subprocess.run(["bash", script, "--help"], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert f"bash tools/{name}.sh" in done.stdout
    assert "#" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "folder"),
    [([], "runs/quickstart-2"), (["--set", "run.seed=2", "run.folder=other"], "other"), (["--set=run.folder=other"], "other")],
)
def test_the_quickstart_names_the_folder_in_which_it_trains(tmp_path, options, folder):
    """Its parts stand in for themselves and say what they were asked."""
    for name in ("tools/setup.sh", ".venv/bin/prl-submit", ".venv/bin/prl-report"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
        path.chmod(0o755)
    for taken in ("runs/quickstart", "other"):
        (tmp_path / taken).mkdir(parents=True)
    script = shutil.copy(ROOT / "tools/quickstart.sh", tmp_path / "tools")
    out = subprocess.run(["bash", script, *options], capture_output=True, text=True, timeout=30, check=True).stdout
    assert f"quickstart: training into {folder} (" in out
    assert ("prl-report other\n" in out) == (folder == "other")
    assert f"{' '.join(['prl-submit configs/quickstart.yaml --set', f'run.folder={folder}', *options])}\n" in out


def test_a_shard_needs_a_name():
    done = subprocess.run(
        ["bash", "tools/test.sh", "--shard"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (1, "test: error: --shard needs the name of a folder of tests/\n")


def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(tmp_path):
    for step in (10, 20):
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step_{step:06d}/manifest.json").write_text("{}")
    command = [sys.executable, "tools/export_checkpoint.py", tmp_path, tmp_path / "to", "--step", "15"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        f"export_checkpoint: {tmp_path}: has no checkpoint of step 15; it has 10, 20\n",
    )


def test_pip_refuses_the_gpu_extra_where_it_cannot_be_had():
    """A marker would make pip leave out the engines without a word, where Python is too old for them."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    gpu = [Requirement(line) for line in settings["options.extras_require"]["gpu"].split("\n") if line]
    assert {"vllm", "megatron-core"} <= {requirement.name for requirement in gpu}
    assert all(requirement.marker is None for requirement in gpu)


def test_the_lab_says_whether_its_nodes_have_networks_of_their_own():
    arguments = ["bash", "tools/slurmlab.sh", "env"]
    told = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    assert told.startswith("export SLURM_CONF=")
    assert told.split()[-1] in ("PRL_LAB_MODE=netns", "PRL_LAB_MODE=flat")


LEFT_OUT = """
import pytest
@pytest.mark.slurm
def test_cluster(): pass
@pytest.mark.slurm
@pytest.mark.slurm_netns
def test_networks(): pass
def test_plain(): pass
"""


@pytest.mark.parametrize(
    ("environment", "passed"),
    [
        ({}, 1),
        ({"SLURM_CONF": "/etc/slurm.conf", "PRL_LAB_MODE": "flat"}, 2),
        ({"SLURM_CONF": "/etc/slurm.conf", "PRL_LAB_MODE": "netns"}, 3),
    ],
)
def test_what_a_machine_cannot_run_is_left_out_and_not_skipped(tmp_path, environment, passed):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "setup.cfg").write_text((ROOT / "setup.cfg").read_text())
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(LEFT_OUT)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    words = f"{passed} passed" + (f", {3 - passed} deselected" if passed < 3 else "")
    assert words in done.stdout
    assert "skipped" not in done.stdout
