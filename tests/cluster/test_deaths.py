"""What ends a job under Slurm: who ends it or what fails, what the run says of it, and that nothing is left on any node."""

import contextlib
import signal

import lab_cluster
import pytest
from lab_runs import CONFIG, LabRun, said
from small_runs import ROLES, small_run, wait_for_processes

from prl.cli import submit
from prl.cluster.record import read_record
from prl.cluster.slurm import job_state, jobs_in_queue

pytestmark = [pytest.mark.slurm, pytest.mark.slurm_netns, pytest.mark.deadline(600)]
AGAIN_S = 120.0  # until a job that was put into the queue again has started: Slurm holds it off for a while
LOST_S = 120.0  # until Slurm has noticed that a node is gone


@pytest.fixture
def start(tmp_path, slurm_cluster):
    """Starts a run of small processes; afterwards the cluster is as it was."""
    with contextlib.ExitStack() as stack:
        yield lambda *overrides: stack.enter_context(small_run(tmp_path / "run", slurm_cluster, *overrides))


def status(run: LabRun, capsys) -> str:
    capsys.readouterr()
    assert submit.main(["--status", str(run.folder)]) == 0
    return capsys.readouterr().out


def preempt(nodes: int) -> str:
    """A job that takes the nodes of all others for some seconds; its id."""
    line = [
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--exclusive",
        f"--nodes={nodes}",
        "--output=/dev/null",
        "--wrap=sleep 3",
    ]
    return lab_cluster.slurm(*line).strip()


def test_a_preempted_job_leaves_and_goes_on_as_the_next_attempt_until_it_is_cancelled(start, slurm_cluster):
    run = start("cluster.requeue=true")
    wait_for_processes(run)
    preempt(len(slurm_cluster))
    assert said(run.ended()) == ("left", "preempted", "requeue")
    wait_for_processes(run, 2, AGAIN_S)
    lab_cluster.slurm("scancel", run.job)
    assert said(run.ended(2)) == ("cancelled", "cancelled", "stop")
    run.is_clean()
    assert run.states() == ["CANCELLED"] * 2


def test_a_preempted_job_that_may_not_be_queued_again_leaves(start, slurm_cluster):
    run = start()
    wait_for_processes(run)
    preempt(len(slurm_cluster))
    ended = run.ended()
    assert said(ended) == ("left", "preempted", "stop")
    assert "cluster.requeue" in ended.next_words
    run.is_clean()


def test_where_a_preemption_is_told_by_the_warning_signal(start, slurm_cluster):
    with lab_cluster.configured("SlurmctldParameters=preempt_send_user_signal"):
        run = start()
        wait_for_processes(run)
        preempt(len(slurm_cluster))
        assert said(run.ended()) == ("left", "preempted", "stop")
        run.is_clean()


def test_where_one_component_is_cancelled_the_run_ends(start):
    run = start("cluster.requeue=true")
    wait_for_processes(run)
    lab_cluster.slurm("scancel", str(int(run.job) + 1))
    assert said(run.ended(deadline_s=12)) == ("cancelled", "cancelled", "stop")
    run.is_clean()
    assert run.states() == ["FAILED", "CANCELLED"]


def test_what_follows_in_a_chain_is_taken_out_of_the_queue_when_the_run_ends(start):
    run = start("cluster.chain=3")  # the others are held: they leave the queue by nothing else
    wait_for_processes(run)
    chain = read_record(run.folder, 1).chain
    lab_cluster.slurm("scancel", run.job)
    assert said(run.ended()) == ("cancelled", "cancelled", "stop")
    lab_cluster.wait_until(lambda: not jobs_in_queue(chain), 60, lambda: run.logs(1))
    assert [job_state(job) for job in chain] == ["CANCELLED"] * 3
    assert run.folder.attempts() == [1]
    run.is_clean()


def test_a_job_that_is_requeued_by_hand_goes_on_as_the_next_attempt(start):
    run = start("cluster.requeue=true")
    wait_for_processes(run)
    lab_cluster.slurm("scontrol", "requeue", run.job)
    wait_for_processes(run, 2, AGAIN_S)
    assert said(run.ended()) == ("left", "requeued", "requeue")
    lab_cluster.slurm("scancel", run.job)
    run.is_clean()


def test_a_job_over_its_time(start):
    run = start()
    wait_for_processes(run)
    lab_cluster.slurm("scontrol", "update", f"jobid={run.job}", "EndTime=now+1")
    assert said(run.ended()) == ("left", "time limit", "stop")
    run.is_clean()


@pytest.mark.slow
@pytest.mark.parametrize("lost_after_s", [3, 300])
def test_a_node_of_samplers_that_is_gone_is_noticed(start, lost_after_s):
    """By the run itself, or by Slurm before."""
    run = start(f"control.lost_after_s={lost_after_s}")
    wait_for_processes(run)
    _, second = run.hosts()
    lab_cluster.to_node("kill-node", second)
    ended = run.ended(deadline_s=LOST_S)
    assert said(ended) == ("failed", "node failure", "stop")
    assert (second in ended.cause) == (lost_after_s < 300)  # Slurm does not say which one
    assert ended.host == (second if lost_after_s < 300 else None)
    run.is_clean(dead=1)


@pytest.mark.slow
def test_a_node_that_is_cut_off_ends_what_runs_on_it(start):
    run = start("control.lost_after_s=3")
    wait_for_processes(run)
    _, second = run.hosts()
    lab_cluster.to_node("cut", second)
    ended = run.ended()
    assert said(ended) == ("failed", "node failure", "stop")
    run.is_clean()


@pytest.mark.slow
def test_the_next_attempt_says_of_a_dead_batch_host_what_it_could_not_say_itself(start):
    run = start("control.lost_after_s=3", "cluster.requeue=true")
    wait_for_processes(run)
    first, _ = run.hosts()
    lab_cluster.to_node("kill-node", first)
    run.is_clean(dead=0)
    wait_for_processes(run, 2, LOST_S + AGAIN_S)
    assert first not in run.hosts(2)
    assert said(run.ended()) == ("failed", "node failure", "requeue")


@pytest.mark.slow
def test_a_dead_batch_host_of_a_job_that_ends_with_it(start, capsys):
    run = start("control.lost_after_s=3")
    wait_for_processes(run)
    first, _ = run.hosts()
    lab_cluster.to_node("kill-node", first)
    run.is_clean(dead=0)
    lab_cluster.wait_until(lambda: set(run.states()) == {"NODE_FAIL"}, LOST_S, run.states)
    assert "node failure" in status(run, capsys)


@pytest.mark.parametrize("killed", [((0,), (1, 0)), pytest.param(((1,), (1,)), marks=pytest.mark.slow)], ids=str)
def test_killed_agents(start, killed):
    """Rank 0's has the orchestrator beside it. The run goes on as the next attempt, until attempts trained no step."""
    run = start("control.lost_after_s=3", "cluster.stage_model=always", "cluster.requeue=true")
    for attempt, ranks in enumerate(killed, 1):
        wait_for_processes(run, attempt, AGAIN_S)
        for agent in [run.agent(run.hosts(attempt)[rank]) for rank in ranks]:
            agent.send_signal(signal.SIGKILL)
        ended = run.ended(attempt)
        assert said(ended) == ("failed", "killed", "requeue" if attempt == 1 else "stop")
        if 0 in ranks:
            assert ended.cause.startswith("the orchestrator was killed before it could say why (srun's exit code: 1")
        else:
            assert ended.cause.startswith(f"agent 1 on {run.hosts(attempt)[1]} has ended without a word")
    run.is_clean()
    lab_cluster.wait_until(lambda: set(run.states()) == {"FAILED"}, LOST_S, run.states)
    assert "2 attempts in a row trained no step" in ended.next_words


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_a_process_that_is_killed_before_it_has_joined_is_not_started_again(start, role):
    """It would only fail again."""
    run = start("cluster.requeue=true")
    wait_for_processes(run)
    run.children()[f"{role} 0"].kill()
    ended = run.ended()
    assert said(ended) == ("failed", "error", "stop")
    assert (ended.cause, ended.role) == (f"{role} 0 was ended by SIGKILL", role)
    run.is_clean()
    lab_cluster.wait_until(lambda: set(run.states()) == {"FAILED"}, LOST_S, run.states)
    assert run.folder.attempts() == [1]


def test_what_can_never_start_is_refused_before_anything_is_made_or_sent(tmp_path, slurm_cluster, capsys):
    first, *others = slurm_cluster
    total = len(slurm_cluster)

    def refused(*overrides: str, nodes: int = 2) -> str:
        given = [f"run.folder={tmp_path / 'run'}", *overrides]
        assert submit.main([str(CONFIG), "--nodes", str(nodes), "--set", *given]) == 2
        assert not (tmp_path / "run").exists()
        assert lab_cluster.slurm("squeue", "-h") == ""
        return capsys.readouterr().err

    with (
        lab_cluster.partition("one", first),
        lab_cluster.partition("left", f"{first},{others[0]}"),
        lab_cluster.partition("right", ",".join(others)),
    ):
        assert f"asks for {total + 1} nodes that sample, but the cluster has {total}" in refused(nodes=total + 2)
        assert f"asks for {total + 1} Slurm nodes, but the cluster has {total} that fit" in refused(nodes=total + 1)
        said = refused("cluster.partition=one")
        assert "asks for 2 Slurm nodes, but partition one has 1 that fit; the job would wait for ever" in said
        pair = ("cluster.partition=left", "cluster.train_nodes=2", "cluster.sbatch_sample.partition=right")
        said = refused(*pair, nodes=2 + total - 1)
        assert f"but partition left and partition right have {total} that fit; the job would wait for ever" in said
