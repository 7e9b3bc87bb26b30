"""Whole runs under Slurm that lose their nodes: each attempt says why it ended, the next one goes on from what was saved, every
rollout has one end, and nothing is left on any node."""

import lab_cluster
import pytest
from lab_runs import LabRun, said, submitted

from prl.report.audit import audit, render

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.slurm_netns]
START_S = 300.0  # from a start to its steps on two busy cores
LASTING = ("run.steps=100000", "run.stop_at_reward=null", "run.evaluate_every_steps=0", "control.lost_after_s=15")


def wait_for_steps(run: LabRun, attempt: int, count: int = 3) -> None:
    lab_cluster.wait_until(lambda: len(run.steps(attempt)) >= count, START_S, lambda: run.logs(attempt))


def next_that_trains(run: LabRun, after: int) -> int:
    """The attempt that goes on. Slurm may end one that has begun on a node which came back: what it could not tell that node
    before, it tells it then. Such attempts are put into the queue again."""

    def found() -> list[int]:
        return [attempt for attempt in run.folder.attempts() if attempt > after and len(run.steps(attempt)) >= 3]

    lab_cluster.wait_until(found, START_S, lambda: run.logs(run.folder.attempts()[-1]))
    for lost in range(after + 1, found()[0]):
        assert said(run.ended(lost)) in [("failed", reason, "requeue") for reason in ("killed", "node failure")]
    return found()[0]


def preempt(nodes: list[str]) -> None:
    """A job that takes the nodes of all others for some seconds."""
    lab_cluster.slurm(
        "sbatch", "--partition=urgent", "--exclusive", f"--nodes={len(nodes)}", "--output=/dev/null", "--wrap=sleep 3"
    )


@pytest.mark.deadline(1800)
def test_a_run_goes_on_after_a_preemption_and_after_the_loss_of_each_node(tmp_path, nodes):
    with submitted(tmp_path / "run", nodes, *LASTING, "cluster.requeue=true", "train.checkpoint_every_steps=5") as run:
        wait_for_steps(run, 1)
        preempt(nodes)
        left = run.ended(1)
        assert said(left) == ("left", "preempted", "requeue")
        assert run.folder.manifests()[-1][0] == left.steps

        wait_for_steps(run, 2, 12)
        assert run.steps(2)[0] == left.steps + 1  # nothing is trained twice
        _, sampler = run.hosts(2)
        lab_cluster.to_node("kill-node", sampler)
        assert said(run.ended(2)) == ("failed", "node failure", "requeue")
        lab_cluster.wait_until(lambda: sampler in lab_cluster.nodes_that_are("down"), 120, lambda: lab_cluster.slurm("sinfo"))
        lab_cluster.to_node("start-node", sampler)

        third = next_that_trains(run, 2)
        assert run.steps(third)[0] > left.steps + 1  # from a checkpoint of the second attempt
        trainer, _ = run.hosts(third)
        lab_cluster.to_node("kill-node", trainer)
        lab_cluster.wait_until(lambda: trainer in lab_cluster.nodes_that_are("down"), 120, lambda: lab_cluster.slurm("sinfo"))
        lab_cluster.to_node("start-node", trainer)

        last = next_that_trains(run, third)
        silent = run.ended(third)
        assert said(silent) == ("failed", "node failure", "requeue")
        assert silent.steps == run.steps(third)[-1]
        run.folder.stop.touch()
        assert said(run.ended(last)) == ("done", "stopped", "stop")
        result = audit(run.folder.path)
        assert result.passed, render(result)


@pytest.mark.deadline(900)
@pytest.mark.parametrize("blow", ["kill-node", "cut"])
def test_a_lost_node_of_several_that_train_is_named(tmp_path, nodes, blow):
    """The ranks on the others fail first, or wait for it, and nothing begins again here. Slurm may notice it first."""
    settings = (*LASTING, "control.restarts=0", "train.tensor_parallel=1")
    with submitted(tmp_path / "run", nodes, *settings, training=2) as run:
        wait_for_steps(run, 1)
        _, trainer, _ = run.hosts()
        lab_cluster.to_node(blow, trainer)
        ended = run.ended()
        assert said(ended) == ("failed", "node failure", "stop")
        own = ended.cause.startswith(f"agent 1 on {trainer} was silent for 15 s") and ended.host == trainer
        assert own or ended.cause.endswith(f"node failure (nothing is heard of {trainer})"), ended
        run.is_clean(dead=1 if blow == "kill-node" else None)


@pytest.mark.deadline(900)
@pytest.mark.parametrize("blow", ["cut", "cancel", "kill"])
def test_a_sampler_of_two_workers_leaves_nothing_behind(tmp_path, nodes, blow):
    """It has rings in shared memory and sockets, which it cannot remove itself where it is killed."""
    with submitted(tmp_path / "run", nodes, *LASTING, "sample.tensor_parallel=2", "sample.restarts=0") as run:
        wait_for_steps(run, 1)
        _, sampler = run.hosts()
        assert any("/dev/shm/" in name for name in lab_cluster.census([sampler], run.temporary)[sampler])
        if blow == "cut":
            lab_cluster.to_node("cut", sampler)
            assert said(run.ended()) == ("failed", "node failure", "stop")
        elif blow == "cancel":
            lab_cluster.slurm("scancel", str(int(run.job) + 1))
            assert said(run.ended()) == ("cancelled", "cancelled", "stop")
        else:
            run.agent(sampler).kill()
            assert run.ended().outcome == "failed"
        run.is_clean()
