"""A job that is ended while its nodes are at the preflight, which waits for a file of the run folder that is not there."""

import lab_cluster
import pytest
from lab_runs import LabRun, submitted

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.slurm_netns]
JOINED_S = 60.0
ENDED_S = 12.0  # sooner than Slurm kills


def wait_for_preflight(run: LabRun) -> None:
    """An agent makes its folder for temporary files between its join and the preflight."""

    def both() -> bool:
        return all(list(run.temporary.glob(f"prl-{run.job}-{node}-*")) for node in (0, 1))

    lab_cluster.wait_until(both, JOINED_S, lambda: run.logs(1))


@pytest.mark.parametrize("blow", ["job", "component", "signal"])
def test_it_ends_at_once_and_says_why(tmp_path, slurm_cluster, blow):
    """By scancel of the job, of the component that samples, or with SIGTERM to the tasks of that one alone."""
    with submitted(
        tmp_path / "run", slurm_cluster, "cluster.sbatch.hold=true", "cluster.preflight.visible_s=200", "cluster.requeue=true"
    ) as run:
        run.folder.canary(1).unlink()
        lab_cluster.slurm("scontrol", "release", run.job)
        wait_for_preflight(run)
        other = str(int(run.job) + 1)
        lab_cluster.slurm("scancel", *{"job": [run.job], "component": [other], "signal": ["--signal=TERM", other]}[blow])
        ended = run.ended(deadline_s=ENDED_S)
        assert (ended.outcome, ended.reason, ended.next, ended.steps) == ("cancelled", "cancelled", "stop", 0)
        assert ended.cause == "cancelled by SIGTERM"
        run.is_clean()
        assert not [path for path in run.folder.logs(1).iterdir() if path.name.startswith(("trainer", "sampler", "actor"))]
