"""The audit of runs whose trainer dies again and again within an attempt, at any moment of the run."""

import pytest
from played_run import play, trained_sequence

from prl.report.audit import audit, render
from prl.runfolder.plan import read_plan

STEPS, DEATHS = 12, 4


@pytest.mark.parametrize("keep", ["all", "needed"])
@pytest.mark.parametrize("order", ["dispatch", "arrival"])
@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_that_dies_and_begins_again_loses_and_doubles_nothing(tmp_path, seed, order, keep):
    run = play(tmp_path / "run", seed=seed, deaths=DEATHS, steps=STEPS, order=order, keep=keep)
    result = audit(run.path)
    assert result.passed, render(result)
    assert (result.attempts, result.steps, result.open) == (1, STEPS, 0)
    assert result.issued_again["trainer ended"]
    plan = read_plan(run.plan(1))
    assert plan.lineage == DEATHS
    assert list(plan.forks) == [1, 2, 3, 4]


def test_in_the_order_of_dispatch_deaths_of_the_trainer_change_no_step(tmp_path):
    wanted = trained_sequence(play(tmp_path / "whole", steps=STEPS))
    trained_again = 0
    for seed in range(4):
        run = play(tmp_path / str(seed), seed=seed, deaths=DEATHS, steps=STEPS)
        assert trained_sequence(run) == wanted
        trained_again += audit(run.path).trained_again
    assert trained_again


def test_the_trainer_dies_in_attempts_that_crash(tmp_path):
    run = play(tmp_path / "run", [90, 90], deaths=2, steps=STEPS)
    result = audit(run.path)
    assert result.passed, render(result)
    assert (result.attempts, result.steps) == (3, STEPS)
