"""A trainer rank that is killed or stands still: all of them begin again at the newest checkpoint, in a new lineage, while the
samplers and actors stay; the run trains all of its steps, and every rollout has one end."""

import json
import signal
import subprocess

import psutil
import pytest
from children import children_of
from struck_runs import wait_for_checkpoint, wait_for_lineage, wait_for_steps
from whole_runs import SUBMIT, Ended

from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder
from prl.runfolder.plan import read_plan

STAY = ("sampler 0", "actor 0", "verifier 0")


def pids_of(children: dict[str, psutil.Process], *names: str) -> dict[str, int]:
    return {name: children[name].pid for name in names}


def check_lineage(ended: Ended, lineage: int, fork: int) -> None:
    """The samplers verified the checkpoint's version, with the digest that it had before, and what was sampled since is of its
    lineage."""
    first = next(event for event in ended.events("weights") if event.labels["version"].startswith(f"{lineage}:"))
    assert first.labels["version"] == f"{lineage}:{fork}"
    before = {event.labels["digest"] for event in ended.events("weights") if event.step == fork and event.time < first.time}
    assert before <= {first.labels["digest"]}  # it may have been passed over then
    turns = [turn for group in ended.groups() for rollout in group.rollouts for turn in rollout.turns]
    of_lineage = [turn for turn in turns if turn.started >= first.time]
    assert of_lineage
    assert min(span.version.lineage for turn in of_lineage for span in turn.versions) >= lineage


@pytest.mark.parametrize(
    ("victim", "transport", "every"),
    [("trainer 1", "lanes", 3), pytest.param("trainer 0", "gather", 0, marks=pytest.mark.slow)],
)
@pytest.mark.deadline(600)
def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(tmp_path, start, victim, transport, every):
    """`every` 0: there is no checkpoint, and they begin at the model."""
    folder = RunFolder(tmp_path / "run")
    settings = (f"train.checkpoint_every_steps={every}", f"weights.transport={transport}", "control.restart_pause_s=0.2")
    process = start(folder, "run.steps=100000", "streams.keep=needed", *settings)
    wait_for_steps(process, folder, 4)
    if every:
        wait_for_steps(process, folder, wait_for_checkpoint(process, folder) + 2)
    before = children_of(process.pid, folder)
    before[victim].send_signal(signal.SIGKILL)
    wait_for_lineage(process, folder, 1)
    struck = max(event.step for event in Ended(folder, 0, "").events("step"))
    wait_for_steps(process, folder, struck + 5)
    after = children_of(process.pid, folder)
    assert pids_of(after, *STAY) == pids_of(before, *STAY)
    for name in ("trainer 0", "trainer 1", "preprocess 0"):
        assert not before[name].is_running()
        assert after[name].pid != before[name].pid
    folder.stop.touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"{victim} was ended by SIGKILL; all trainer ranks are started again" in output
    ended = Ended(folder, process.returncode, output)
    plan = read_plan(folder.plan(1))
    assert plan.lineage == 1
    steps = [event.step for event in ended.events("step")]
    fell = [n for n in range(1, len(steps)) if steps[n] <= steps[n - 1]]  # back to the step after the checkpoint
    assert len(fell) == 1
    assert steps[fell[0]] == plan.forks[1] + 1
    assert (plan.forks[1] > 0) == (every > 0)
    assert steps == [*range(1, steps[fell[0] - 1] + 1), *range(plan.forks[1] + 1, steps[-1] + 1)]
    check_lineage(ended, 1, plan.forks[1])
    result = audit(folder.path)
    assert result.passed, render(result)
    assert (result.ended, result.attempts, result.lineages, result.steps) == ("done", 1, 2, steps[-1])
    assert result.trained_again
    report = subprocess.run([SUBMIT.with_name("prl-report"), folder.path, "--json"], capture_output=True, text=True, check=True)
    told = json.loads(report.stdout)
    assert told["rollouts"] == steps[-1] * 512  # none is counted twice
    assert any("1 restarts of actors, verifiers, preprocessors and the trainer" in note for note in told["notes"])


@pytest.mark.slow
@pytest.mark.deadline(900)
def test_ranks_that_stand_still_or_die_again_begin_again_up_to_the_limit(tmp_path, start):
    """First one is silent, then both are killed, then the third failure ends the run as the first would without restarts."""
    folder = RunFolder(tmp_path / "run")
    settings = (
        "train.checkpoint_every_steps=4",
        "control.restarts=2",
        "control.restart_pause_s=0.2",
        "control.lost_after_s=10",
    )
    process = start(folder, "run.steps=100000", *settings)
    wait_for_steps(process, folder, 5)
    first = children_of(process.pid, folder)
    first["trainer 1"].suspend()
    wait_for_lineage(process, folder, 1)
    wait_for_steps(process, folder, wait_for_checkpoint(process, folder) + 2)
    for name in ("trainer 0", "trainer 1"):
        children_of(process.pid, folder)[name].kill()
    wait_for_lineage(process, folder, 2)
    wait_for_steps(process, folder, max(event.step for event in Ended(folder, 0, "").events("step")) + 2)
    last = children_of(process.pid, folder)
    assert pids_of(last, *STAY) == pids_of(first, *STAY)
    last["trainer 1"].kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "trainer 1 on " in output
    assert "was silent for 10 s" in output
    cause = json.loads(folder.exit(1).read_text())["cause"]
    assert cause == "trainer 1 was ended by SIGKILL; the trainer had been started again 2 times (control.restarts)"
    result = audit(folder.path)
    assert result.passed, render(result)
    assert read_plan(folder.plan(1)).lineage == 2


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_a_trainer_that_hangs_without_falling_silent_is_started_again(tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    process = start(folder, "run.steps=100000", "control.no_progress_s=20", "actor.rollout_s=20", "control.lost_after_s=300")
    wait_for_steps(process, folder, 2)
    children_of(process.pid, folder)["trainer 1"].suspend()  # rank 0 beats, and waits for it in a collective
    wait_for_lineage(process, folder, 1)
    wait_for_steps(process, folder, max(event.step for event in Ended(folder, 0, "").events("step")) + 3)
    folder.stop.touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "no progress for 20 s at step" in output
    assert "train_step" in (folder.logs(1) / "trainer-0.log").read_text()
    result = audit(folder.path)
    assert result.passed, render(result)
