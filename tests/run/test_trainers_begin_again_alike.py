"""Trainers that are killed and begin again train the same in the order of dispatch and in a replay: it does not show that they
were."""

import signal

import pytest
from children import children_of
from struck_runs import SHORT, wait_for_checkpoint, wait_for_lineage, wait_for_steps
from whole_runs import Ended, submit, wait_until

from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder
from prl.runfolder.plan import read_plan
from prl.streams.ledger import ledger_events, read_ledger
from prl.streams.steps import find_steps, read_step

STEPS = 20  # of the run that is replayed
AGAIN = ("train.checkpoint_every_steps=3", "control.restart_pause_s=0.2")

pytestmark = [pytest.mark.slow, pytest.mark.deadline(900)]


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Ended:
    """A run that is not disturbed."""
    ended = submit(tmp_path_factory.mktemp("original") / "run", *SHORT, f"run.steps={STEPS}")
    assert ended.code == 0, ended.logs()
    return ended


def kill_trainer(process, folder: RunFolder, name: str) -> int:
    """The last step before it died."""
    children_of(process.pid, folder)[name].send_signal(signal.SIGKILL)
    wait_until(lambda: read_plan(folder.plan(1)).lineage == 1, 240, "trainers to begin again")
    return max(event.step for event in Ended(folder, 0, "").events("step"))


def check_steps(ended: Ended, last: int) -> None:
    """All were trained, those behind the checkpoint twice."""
    fork = read_plan(ended.folder.plan(1)).forks[1]
    steps = [event.step for event in ended.events("step")]
    (fell,) = [n for n in range(1, len(steps)) if steps[n] <= steps[n - 1]]
    assert steps == [*range(1, steps[fell - 1] + 1), *range(fork + 1, last + 1)]
    assert fork > 0


def test_in_the_order_of_dispatch_all_is_trained_as_it_was_handed_out(tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    process = start(folder, "run.steps=100000", "run.order=dispatch", *AGAIN)
    wait_for_steps(process, folder, wait_for_checkpoint(process, folder) + 2)
    struck = kill_trainer(process, folder, "trainer 0")
    wait_for_lineage(process, folder, 1)
    wait_for_steps(process, folder, struck + 6)
    folder.stop.touch()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    ended = Ended(folder, process.returncode, output)
    check_steps(ended, ended.exit["steps"])
    result = audit(folder.path)
    assert result.passed, render(result)
    assert (result.ended, result.lineages, result.steps) == ("done", 2, ended.exit["steps"])
    assert result.trained_again
    handed_out, trained, dropped = {}, {}, set()
    for event in ledger_events(read_ledger(folder.ledgers)):
        i = event.rollout
        if event.kind == "issued":
            handed_out.setdefault(i.group, i.problem)
        elif event.kind == "trained":
            of_step = trained.setdefault((event.step, event.version.lineage), {})
            of_step.setdefault(i.group, i.problem)
        elif event.kind == "discarded" and event.reason != "run ended":
            dropped.add(i.group)
    last = {step: max(lineage for s, lineage in trained if s == step) for step, _ in trained}
    groups = [entry for step in sorted(last) for entry in sorted(trained[step, last[step]].items())]  # files have them packed
    wanted = [(group, handed_out[group]) for group in range(len(groups) + len(dropped)) if group not in dropped]
    assert groups == wanted[: len(groups)]
    for (step, lineage), of_step in trained.items():
        assert of_step == trained[step, last[step]], f"step {step} of lineage {lineage}"


@pytest.mark.parametrize("source", ["steps", "rollouts"])
def test_a_replay_has_the_losses_and_rollouts_of_the_original(original, tmp_path, start, source):
    folder = RunFolder(tmp_path / "replay")
    again = ["--replay", original.folder.path, *(["--replay-rollouts"] if source == "rollouts" else [])]
    process = start(folder, f"run.steps={STEPS}", *AGAIN, options=again)
    wait_until(folder.manifests, 240, "a checkpoint")
    wait_for_steps(process, folder, folder.manifests()[-1][0] + 1)
    kill_trainer(process, folder, "trainer 1")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    replayed = Ended(folder, process.returncode, output)
    assert "trainer 1 was ended by SIGKILL; all trainer ranks are started again" in output
    check_steps(replayed, STEPS)
    expected = {event.step: event.values for event in original.events("step")}
    for event in replayed.events("step"):
        for name in ("train/loss", "train/grad_norm", "train/entropy", "data/reward_mean", "data/rollouts"):
            # The same step files make the same bits; those built anew may hold the same rollouts in another order.
            wanted = expected[event.step][name]
            alike = wanted if source == "steps" else pytest.approx(wanted, abs=1e-6, rel=1e-6)
            assert event.values[name] == alike, (event.step, name)
    if source == "rollouts":
        assert rollouts_of_steps(folder) == rollouts_of_steps(original.folder, STEPS)
    else:
        assert not list(folder.steps.glob("*"))
    result = audit(folder.path)
    assert result.passed, render(result)


def rollouts_of_steps(folder: RunFolder, last: int | None = None) -> dict:
    found = {step: file for step, file in find_steps(folder.steps).items() if last is None or step <= last}
    return {step: sorted(read_step(f.path, f.bytes, f.checksum).rollout_ids()) for step, f in found.items()}
