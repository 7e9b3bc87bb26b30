"""kill -9 of who writes and who reads rollouts, in a run whose rollouts go through Redis."""

import pytest
from faulty_runs import STEPS, FaultyRun

from prl.report.audit import audit
from prl.runfolder.paths import RunFolder
from prl.streams.folder import rollout_files
from prl.streams.steps import find_steps

pytestmark = pytest.mark.redis


def death(role: str, point: str, after_step: int) -> dict:
    return {"role": role, "point": point, "fault": "kill", "after_step": after_step}


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_a_run_over_redis_goes_on_after_deaths_of_both_its_sides(tmp_path):
    run = FaultyRun(RunFolder(tmp_path / "run"))
    settings = ("streams.backend=redis", "streams.redis.start=true")
    run.start(death("preprocess", "rename streams/steps/.*", STEPS - 1), settings=settings)
    assert [fault["process"] for fault in run.fired] == ["preprocess-0"], run.words()
    run.check()
    run.resume(death("actor", r"write metrics/actor-N\.jsonl.*", run.checkpoint + 3))
    assert [fault["process"] for fault in run.fired] == ["actor-0"], run.words()
    run.check()
    run.resume()
    run.check_ended()
    assert rollout_files(run.folder) == {}
    assert 1 not in find_steps(run.folder.steps)  # it lies behind a checkpoint
    assert not audit(run.folder.path).rollouts_kept
