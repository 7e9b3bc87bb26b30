"""The running lab cluster (tools/slurmlab.sh up), which SLURM_CONF points to."""

import subprocess

import pytest


@pytest.fixture(scope="session")
def slurm_cluster():
    """Names of the idle nodes, of which there are at least 3."""
    asked = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
    idle = sorted(set(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.split()))
    assert len(idle) >= 3, f"only {idle} are idle: is a job left in the queue of the lab cluster?"
    return idle
