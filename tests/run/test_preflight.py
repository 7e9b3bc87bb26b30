"""Whole runs that the preflight ends before anything heavy is loaded: on this machine, and on nodes of the lab cluster."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import lab_cluster
import pytest
from whole_runs import ROOT, command, submit

from prl.report.read import read_run
from prl.report.render import render
from prl.report.summary import summarize
from prl.runfolder.paths import RunFolder

CONFIG = "configs/quickstart.yaml"


def test_a_local_run_without_enough_room_ends_before_anything_is_loaded(tmp_path):
    ended = submit(tmp_path / "run", CONFIG, "--set", "cluster.preflight.disk_gib=900000")
    assert ended.code == 1
    said = ended.exit
    assert (said["outcome"], said["reason"], said["next"], said["steps"]) == ("failed", "quota", "stop", 0)
    assert (said["role"], said["host"]) == ("agent", "localhost")
    for folder, purpose in ((ended.folder.path, "for the run"), (Path(tempfile.gettempdir()), "for temporary files")):
        assert f"GiB are free in {folder} {purpose}, less than cluster.preflight.disk_gib = 900000" in said["cause"]
    assert "--exclude" not in said["cause"]  # there is no other machine
    assert said["cause"] in ended.output
    logs = [path.name for path in ended.folder.logs(1).iterdir()]
    assert not [name for name in logs if name.startswith(("trainer", "sampler", "actor"))]
    report = render(summarize(read_run(ended.folder.path), time.time()))
    assert "preflight   1 node in " in report


def on_node(node, *program):
    """Run a program in the mount namespace of a node, in which its jobs are, too."""
    lab = Path(os.environ["SLURM_CONF"]).parents[1]
    pid = (lab / "run" / f"slurmd.{node}.pid").read_text().strip()
    subprocess.run(["nsenter", "--mount", "--target", pid, *map(str, program)], check=True, timeout=30)


def held(folder, *overrides):
    """Submit a run on three nodes, of which n1 trains, and keep it from starting; the job's id."""
    where = ["cluster.sbatch={hold: true}", "cluster.sbatch_train={nodelist: n1}", *overrides]
    program = command(CONFIG, "--nodes", "3", "--set", *where, folder=folder.path)
    subprocess.run(program, cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)
    return json.loads(folder.submission(1).read_text())["job_id"]


def released(folder, job):
    """What the job's exit.json says once it has been let go."""
    subprocess.run(["scontrol", "release", job], check=True, timeout=30)
    end = time.monotonic() + 90
    try:
        while not folder.exit(1).exists():
            assert time.monotonic() < end, "the run did not end"
            time.sleep(0.2)
    finally:
        subprocess.run(["scancel", job], check=False, timeout=30)
    return json.loads(folder.exit(1).read_text())


@pytest.mark.slurm
@pytest.mark.slurm_netns
def test_nodes_with_a_full_disk_and_without_the_run_folder_are_named_to_be_left_out(tmp_path):
    folder, scratch, stale = RunFolder(tmp_path / "run"), tmp_path / "scratch", tmp_path / "stale"
    scratch.mkdir()
    stale.write_text("what an older run wrote")
    job = held(folder, f"cluster.environment={{TMPDIR: {scratch}}}")
    mounts = [("n2", scratch), ("n3", folder.canary(1))]
    on_node("n2", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", scratch)
    on_node("n3", "mount", "--bind", stale, folder.canary(1))
    try:
        said = released(folder, job)
    finally:
        for node, place in mounts:
            on_node(node, "umount", place)
    assert (said["role"], said["host"], said["reason"], said["next"]) == ("agent", "n2,n3", "bad node", "stop")
    assert f"n2: 0.00 GiB are free in {scratch} for temporary files" in said["cause"]
    assert "n3: the run folder that it sees is not the one that rank 0 sees" in said["cause"]
    assert said["cause"].endswith("To submit the run again without them: --exclude=n2,n3")
    written = json.loads(folder.preflight(1).read_text())
    assert list(written["nodes"]) == ["n1", "n2", "n3"]
    assert not [path for path in folder.logs(1).iterdir() if path.name.startswith(("trainer", "sampler"))]


@pytest.mark.slurm
@pytest.mark.slurm_netns
def test_a_node_behind_a_slow_link_is_told_from_its_neighbours(tmp_path):
    folder = RunFolder(tmp_path / "run")
    job = held(folder)
    with lab_cluster.slow(["n3"], "16mbit"):
        said = released(folder, job)
    assert (said["host"], said["reason"]) == ("n3", "bad node"), said["cause"]
    assert "between n3 and n1" in said["cause"]
    assert said["cause"].endswith(
        "MiB/s go over TCP, less than cluster.preflight.bandwidth_mib_per_s = 20. To submit the run "
        "again without it: --exclude=n3"
    )
    links = {link["node"]: link for link in json.loads(folder.preflight(1).read_text())["links"]}
    assert links["n2"]["from_peer_mib_per_s"] > 20 > links["n3"]["from_peer_mib_per_s"]
