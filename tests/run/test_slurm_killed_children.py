"""Whole runs under Slurm one of whose processes is killed, of each kind: it heals, and the records say so, or the run ends with
the cause in exit.json."""

import lab_cluster
import psutil
import pytest
from lab_runs import LabRun, said, submitted
from whole_runs import Ended

from prl.report.audit import audit, render
from prl.runfolder.plan import read_plan

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.slurm_netns]
START_S = 300.0  # from a start to its steps on two busy cores
AGAIN_S = 150.0  # until a job that was put into the queue again has started: Slurm holds it off for a while
LASTING = (
    *("run.steps=100000", "run.stop_at_reward=null", "run.evaluate_every_steps=0", "train.checkpoint_every_steps=3"),
    *("verifier.processes=1", "control.restarts=1", "sample.restarts=1", "control.restart_pause_s=0.2"),
)
BY_THEMSELVES = ("actor 0", "verifier 0", "preprocess 0")  # each is started again alone


def wait_for_more_steps(run: LabRun, attempt: int, count: int) -> None:
    """So many that end from now on."""
    before = len(run.steps(attempt))

    def there() -> bool:
        assert not run.folder.exit(attempt).exists(), run.logs(attempt)
        return len(run.steps(attempt)) >= before + count

    lab_cluster.wait_until(there, START_S, lambda: run.logs(attempt))


def wait_for_words(run: LabRun, kind: str, words: str) -> None:
    """Of what the run records of its processes or its samplers."""

    def told() -> list[str]:
        return [event.labels["event"] for event in Ended(run.folder, 0, "").events(kind)]

    def there() -> bool:
        assert not run.folder.exit(1).exists(), run.folder.exit(1).read_text()
        return any(event.startswith(words) for event in told())

    lab_cluster.wait_until(there, START_S, told)


def kill(run: LabRun, name: str) -> psutil.Process:
    struck = run.children()[name]
    struck.kill()
    return struck


@pytest.mark.deadline(1800)
def test_a_run_heals_from_the_death_of_each_of_its_kinds_of_processes(tmp_path, nodes):
    """The orchestrator last, after which the next attempt goes on."""
    with submitted(tmp_path / "run", nodes, *LASTING, "cluster.requeue=true") as run:
        wait_for_more_steps(run, 1, 4)
        for name in BY_THEMSELVES:
            kill(run, name)
            wait_for_words(run, "processes", f"{name} was ended by SIGKILL; it is started again in 0.2 s")
            wait_for_words(run, "processes", f"{name} is there again")
            wait_for_more_steps(run, 1, 2)

        kill(run, "sampler 0")
        wait_for_words(run, "samplers", "sampler 0 was ended by SIGKILL; it is started again in 1 s")
        wait_for_more_steps(run, 1, 6)  # more than what it had sampled before could make
        served = Ended(run.folder, 0, "").events("samplers")[-1].values
        assert (served["samplers/restarts"], served["samplers/fenced_died"], served["samplers/serving"]) == (1, 1, 1)

        before = run.children()
        kill(run, "trainer 1")
        wait_for_words(run, "processes", "trainer 1 was ended by SIGKILL; all trainer ranks are started again")
        wait_for_words(run, "processes", "all trainer ranks are there again")
        wait_for_more_steps(run, 1, 4)
        after = run.children()
        assert {name for name in before if after[name].pid == before[name].pid} == {"sampler 0", "actor 0", "verifier 0"}
        plan = read_plan(run.folder.plan(1))
        assert plan.lineage == 1
        assert plan.forks[1] > 0  # the step of a checkpoint

        run.agent(run.hosts()[0]).kill()  # and with it the orchestrator
        killed = run.ended()
        assert said(killed) == ("failed", "killed", "requeue")
        assert killed.cause.startswith("the orchestrator was killed before it could say why (srun's exit code: 1")
        lab_cluster.wait_until(lambda: run.folder.attempts() == [1, 2], AGAIN_S, lambda: run.logs(1))
        wait_for_more_steps(run, 2, 3)
        run.folder.stop.touch()
        assert said(run.ended(2)) == ("done", "stopped", "stop")
        result = audit(run.folder.path)
        assert result.passed, render(result)
        assert (result.ended, result.attempts) == ("done", 2)
        run.is_clean()


@pytest.mark.deadline(900)
def test_a_process_that_is_killed_more_often_than_it_may_be_started_again_ends_the_run(tmp_path, nodes):
    with submitted(tmp_path / "run", nodes, *LASTING) as run:
        wait_for_more_steps(run, 1, 1)
        kill(run, "actor 0")
        wait_for_words(run, "processes", "actor 0 is there again")
        kill(run, "actor 0")
        ended = run.ended()
        assert said(ended) == ("failed", "error", "stop")
        assert ended.cause == "actor 0 was ended by SIGKILL; it had been started again 1 times (control.restarts)"
        assert (ended.role, ended.code) == ("actor", 1)
        run.is_clean()
        lab_cluster.wait_until(lambda: set(run.states()) == {"FAILED"}, 60, run.states)
