"""The batch scripts of every mode and site profile are those in golden/, letter by letter, and bash can read them.

After a change that is meant: PRL_WRITE_GOLDEN=1 python -m pytest tests/cluster/test_golden_scripts.py, then git diff.
"""

import os
import subprocess
from pathlib import Path

import pytest

from prl.cluster.requests import request_problems
from prl.cluster.run import ProgramError, run
from prl.cluster.script import render, site_folder
from prl.cluster.split import make_split
from prl.config.cluster_checks import cluster_problems
from prl.config.load import load
from prl.runfolder.paths import RunFolder

GOLDEN = Path(__file__).parent / "golden"
SITES = sorted(path.stem for path in site_folder().glob("*.yaml"))
HET, PLAIN = ["cluster.mode=het", "cluster.nodes=3"], ["cluster.mode=plain", "cluster.nodes=3"]
SCRIPTS = {
    "het": HET,
    "plain_1": ["cluster.mode=plain", "cluster.nodes=1"],
    "plain_3": [*PLAIN, "cluster.train_nodes=2"],
    "het_unlike": [
        *(*HET, "cluster.partition=a100", "cluster.sbatch={constraint: any, exclusive: true}"),
        "cluster.sbatch_train={partition: h200, mem: 900G, exclusive: false}",
    ],
    "het_pyxis_efa": [
        *(*HET, "cluster.gpus_per_node=8", "cluster.gpu_type=h100", "cluster.container=pyxis", "cluster.fabric=efa"),
        *("cluster.container_image=nvcr.io#nvidia/pytorch:26.01-py3", "cluster.container_mounts=[/data]"),
    ],
    "plain_apptainer_ethernet": [
        *(*PLAIN, "cluster.gpus_per_node=4", "cluster.container=apptainer", "cluster.container_image=/images/prl.sif"),
        *("cluster.fabric=ethernet", "cluster.modules=[cuda/12.8, apptainer]", "cluster.setup=['ulimit -n 65536']"),
        "cluster.environment={NCCL_DEBUG: INFO}",
    ],
    **{f"site_{name}": [*HET, f"cluster.profile={name}", "cluster.account=me"] for name in SITES},
    **{f"site_{name}_plain": [*PLAIN, f"cluster.profile={name}", "cluster.account=me"] for name in SITES},
}


FOLLOWERS = {"het_follower": HET, "plain_follower": PLAIN}  # jobs of a chain behind the first


def rendered(tmp_path, overrides, after=None):
    (tmp_path / "c.yaml").write_text("run: {name: golden}\nmodel: {path: /models/a}\n")
    image = ["cluster.container_image=/images/prl.sif"] if "cluster.profile=lumi-g" in overrides else []
    python = [] if image or any("container=" in override for override in overrides) else ["cluster.python=/venv/bin/python"]
    config = load(tmp_path / "c.yaml", [*overrides, *image, *python], site_folder())

    def no_sbatch(arguments, **given):
        if arguments[0] == "bash":
            return run(arguments, **given)
        raise ProgramError("sbatch: no such program on PATH")

    assert [*cluster_problems(config), *request_problems(config, make_split(config), no_sbatch)] == []
    return render(config, make_split(config), RunFolder("/scratch/me/runs/golden"), 1, after=after)


def test_there_are_profiles_of_several_sites_and_each_says_that_it_was_never_run_there():
    assert len(SITES) >= 5
    for name in SITES:
        comments = [line for line in (site_folder() / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
        assert any("NEVER RUN THERE" in line for line in comments), name


@pytest.mark.parametrize("name", [*SCRIPTS, *FOLLOWERS])
def test_a_script_is_the_golden_one(tmp_path, name):
    path = GOLDEN / f"{name}.sh"
    text = rendered(tmp_path, SCRIPTS[name]) if name in SCRIPTS else rendered(tmp_path, FOLLOWERS[name], after="4711")
    if "PRL_WRITE_GOLDEN" in os.environ:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text
    subprocess.run(["bash", "-n", path], check=True, timeout=30)


def test_there_is_no_other_golden_script():
    assert sorted(path.stem for path in GOLDEN.glob("*")) == sorted([*SCRIPTS, *FOLLOWERS])
