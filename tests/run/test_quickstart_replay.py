"""A replay of the quickstart's first steps, and its audit."""

import pytest
from whole_runs import submit

from prl.report.audit import audit, render

STEPS = 10

pytestmark = pytest.mark.deadline(600)


def test_the_audit_passes(quickstart):
    result = audit(quickstart.folder.path)
    assert result.passed, render(result)
    assert result.ended == "done"
    assert result.trained == quickstart.exit["steps"] * 512
    assert 1 <= result.lag_max <= quickstart.config.run.max_lag


@pytest.mark.parametrize("source", ["steps", "rollouts"])
def test_a_replay_has_the_losses_of_the_original(quickstart, tmp_path, source):
    again = ["--replay", quickstart.folder.path, *(["--replay-rollouts"] if source == "rollouts" else [])]
    replayed = submit(tmp_path / "replay", "configs/quickstart.yaml", *again, "--set", f"run.steps={STEPS}")
    assert replayed.code == 0, replayed.logs()
    assert replayed.exit["steps"] == STEPS
    events = replayed.events("step")
    assert [event.step for event in events] == list(range(1, STEPS + 1))
    for event, original in zip(events, quickstart.events("step", attempt=1), strict=False):
        assert event.step == original.step
        for name in ("train/loss", "train/grad_norm", "train/entropy", "data/reward_mean", "data/rollouts"):
            # The same step files make the same bits; those built anew may hold the same rollouts in another order.
            expected = original.values[name] if source == "steps" else pytest.approx(original.values[name], abs=1e-6, rel=1e-6)
            assert event.values[name] == expected, (event.step, name)
    logs = {path.name for path in replayed.folder.logs(1).glob("*.log")}
    assert {"trainer-0.log", "trainer-1.log"} <= logs
    assert not any(name.startswith(("sampler", "actor")) for name in logs)
    assert ("preprocess-0.log" in logs) == (source == "rollouts")
    assert (replayed.folder.export / "model.safetensors").is_file()
    assert audit(replayed.folder.path).passed
