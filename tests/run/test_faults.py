"""What dies and may not be started again ends the run quickly, with its cause on the terminal, in exit.json and as the exit
code, and a resume goes on from the last checkpoint and loses nothing. Else it is started again, and the run goes on."""

import itertools
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
from children import children_of
from safetensors.torch import load_file
from struck_runs import SHORT, served_after, wait_for_checkpoint, wait_for_steps
from whole_runs import SUBMIT, Ended, submit, wait_until

from prl.metrics.events import Event
from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import ledger_events, read_ledger
from prl.weights.digest import digest


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1", "sampler 0", "actor 0"])
@pytest.mark.deadline(600)
def test_a_killed_child_ends_the_run_with_its_name_and_a_resume_loses_nothing(tmp_path, start, victim):
    folder = RunFolder(tmp_path / "run")
    transport = "lanes" if victim == "trainer 1" else "gather"  # by lanes it is one of those that send
    lasting = ("streams.keep=needed", "sample.restarts=0", "control.restarts=0", f"weights.transport={transport}")
    process = start(folder, "train.checkpoint_every_steps=3", *lasting)
    wait_for_steps(process, folder, 3)
    wait_for_steps(process, folder, wait_for_checkpoint(process, folder) + 1)
    children = children_of(process.pid, folder)
    assert victim in children, sorted(children)
    killed = time.monotonic()
    children[victim].send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    took_s = time.monotonic() - killed
    assert process.returncode == 1
    assert took_s < 10
    ended = json.loads(folder.exit(1).read_text())
    assert ended["outcome"] == "failed"
    assert ended["cause"] == f"{victim} was ended by SIGKILL"
    assert ended["code"] == 1
    assert f"failed: {victim} was ended by SIGKILL (exit code 1)\nlogs: " in output
    assert f"go on with: prl-submit --resume {folder}\n" in output
    assert not [name for name, child in children.items() if child.is_running()]
    checkpoint, steps = folder.manifests()[-1][0], ended["steps"] + 4
    resumed = submit(folder.path, "--resume", folder.path, "--set", f"run.steps={steps}")
    assert resumed.code == 0, resumed.logs()
    assert [event.step for event in resumed.events("step", attempt=2)] == list(range(checkpoint + 1, steps + 1))
    assert all(event.values["weights/by_files"] == 0 for event in resumed.events("weights"))
    check_first_version(resumed, checkpoint)
    last = resumed.events("weights")[-1].labels
    assert (last["version"], last["digest"]) == (f"1:{steps}", str(digest(load_file(folder.export / "model.safetensors"))))
    result = audit(folder.path)
    assert result.passed, render(result)
    assert (result.ended, result.trained) == ("done", steps * 512)
    report = subprocess.run([SUBMIT.with_name("prl-report"), folder.path, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(report.stdout)["rollouts"] == steps * 512  # those trained again from their step files too


def check_first_version(resumed: Ended, checkpoint: int) -> None:
    """The samplers of a second attempt have verified the version of the checkpoint, with the digest that it had when the first
    attempt sent it (it may not have, where its sampler was gone when it saved it), before anything is sampled; and no token is
    of another one that is not newer."""
    digests = {event.step: event.labels["digest"] for event in resumed.events("weights", attempt=1)}
    first = resumed.events("weights", attempt=2)[0]
    told = first.labels["digest"]
    assert (first.labels["version"], told) == (f"1:{checkpoint}", digests.get(checkpoint, told))
    assert told != digests[0]  # else a trainer that begins afresh could not be told
    began = min(event.time for event in resumed.events("phase", attempt=2))
    turns = [turn for group in resumed.groups() for rollout in group.rollouts for turn in rollout.turns if turn.started > began]
    assert turns
    assert min(turn.started for turn in turns) >= first.time
    versions = {span.version for turn in turns for span in turn.versions}
    assert {version.lineage for version in versions} == {1}
    assert min(version.step for version in versions) >= checkpoint


def wait_for_process(folder: RunFolder, pid: int, name: str, *, other_than: int) -> psutil.Process:
    """The next process of a child, once it is there."""
    end = time.monotonic() + 60
    while True:
        found = children_of(pid, folder).get(name)
        if found is not None and found.pid != other_than:
            return found
        assert time.monotonic() < end, f"{name} is not there again"
        time.sleep(0.1)


def restarts(folder: RunFolder) -> list[str]:
    return [event.labels["event"] for event in Ended(folder, 0, "").events("processes")]


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_actors_verifier_and_preprocessor_that_are_killed_or_stand_still_are_started_again(tmp_path, start):
    """Each is killed at any moment of its work, the preprocessor several times; nothing is lost, and nothing trained twice."""
    folder = RunFolder(tmp_path / "run")
    steady = ("control.restart_pause_s=0.2", "control.lost_after_s=15", "actor.processes=2", "run.order=dispatch")
    process = start(folder, "run.steps=100000", *steady, "control.restarts=5")
    wait_for_steps(process, folder, 3)
    blows = [
        ("preprocess 0", signal.SIGKILL), ("actor 0", signal.SIGKILL), ("verifier 0", signal.SIGKILL),
        ("preprocess 0", signal.SIGKILL), ("preprocess 0", signal.SIGSTOP), ("actor 1", signal.SIGSTOP),
        ("preprocess 0", signal.SIGKILL),
    ]  # fmt: skip
    for victim, blow in blows:
        before = Ended(folder, 0, "").events("step")[-1].step
        struck = children_of(process.pid, folder)[victim]
        struck.send_signal(blow)
        wait_for_process(folder, process.pid, victim, other_than=struck.pid)
        wait_for_steps(process, folder, before + 6)
    folder.stop.touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    result = audit(folder.path)
    assert result.passed, render(result)
    assert result.ended == "done"
    told = restarts(folder)
    for victim, blow in blows:
        how = "was ended by SIGKILL" if blow == signal.SIGKILL else "was silent for 15 s"
        assert any(words.startswith(victim) and how in words for words in told), told
        assert f"{victim} is there again" in told
    steps = [event.step for event in Ended(folder, 0, "").events("step")]
    assert steps == list(range(1, len(steps) + 1))


def wait_for_samplers(process: subprocess.Popen, folder: RunFolder, condition: Callable[[Event], bool]) -> Event:
    """The first event of the samplers for which the condition holds."""
    running, end = Ended(folder, 0, ""), time.monotonic() + 300
    while True:
        for event in running.events("samplers"):
            if condition(event):
                return event
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, [event.labels for event in running.events("samplers")]
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.deadline(900)
def test_a_run_goes_on_without_a_sampler_that_is_killed_or_stands_still_until_it_is_back(tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    process = start(folder, "run.steps=100000", "cluster.replicas_per_node=2", "control.lost_after_s=10")
    wait_for_steps(process, folder, 5)
    back = []
    for number, (victim, blow) in enumerate([(0, signal.SIGKILL), (1, signal.SIGSTOP)], 1):
        before = Ended(folder, 0, "").events("step")[-1].step
        struck = time.time()
        children_of(process.pid, folder)[f"sampler {victim}"].send_signal(blow)
        left = wait_for_samplers(process, folder, lambda e, n=number: e.values.get("samplers/restarts") == n)
        assert left.values["samplers/serving"] == 1
        wait_for_steps(process, folder, before + 10)  # the other one is enough
        again = wait_for_samplers(process, folder, lambda e, t=left.time: e.time > t and e.values["samplers/serving"] == 2)
        back.append((victim, again.time))
        steps = Ended(folder, 0, "").events("step")
        waits = [b.time - a.time for a, b in itertools.pairwise(steps) if b.time > struck]
        assert max(waits) < 30  # what was lost on the way to a dead or silent one was asked for again
        wait_for_steps(process, folder, steps[-1].step + 10)
    folder.stop.touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    ended = Ended(folder, process.returncode, output)
    assert ended.exit["outcome"] == "done"
    commits = {event.step: event.time for event in ended.events("weights")}
    for victim, since in back:
        served = served_after(folder, victim, since)
        assert served
        newest = max(step for step, at in commits.items() if at <= since)
        assert min(served) >= newest  # nothing older than what it was admitted with,
        assert max(served) > newest + 5  # and each new version since
    last = ended.events("samplers")[-1].values
    assert (last["samplers/restarts"], last["samplers/fenced_died"], last["samplers/fenced_silent"]) == (2, 1, 1), last
    result = audit(folder.path)
    assert result.passed, render(result)
    assert "sampler 0 was ended by SIGKILL; it is started again in 1 s" in output
    report = subprocess.run([SUBMIT.with_name("prl-report"), folder.path], capture_output=True, text=True, check=True).stdout
    assert re.search("1 died, 1 silent; 2 restarts; (. seeded by others; )?2 serving at the last change", report), report


def wait_until_idle(folder: RunFolder, idle_s: float = 5.0) -> None:
    """No step has ended for so long."""
    end = time.monotonic() + 120
    while time.time() - max(event.time for event in Ended(folder, 0, "").events("step")) < idle_s:
        assert time.monotonic() < end, "steps go on without the preprocessor"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.deadline(900)
def test_a_sampler_that_comes_back_is_seeded_by_another_while_the_trainer_stands_still(tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    process = start(folder, "run.steps=100000", "cluster.replicas_per_node=2", "control.lost_after_s=300")
    wait_for_steps(process, folder, 5)
    children = children_of(process.pid, folder)
    children["preprocess 0"].suspend()
    wait_until_idle(folder)
    stopped = [children[name] for name in ("trainer 0", "trainer 1")]
    for child in stopped:
        child.suspend()
    versions = [event.step for event in Ended(folder, 0, "").events("weights")]
    children["sampler 0"].kill()
    left = wait_for_samplers(process, folder, lambda e: e.values.get("samplers/restarts") == 1)
    again = wait_for_samplers(process, folder, lambda e: e.time > left.time and e.values["samplers/serving"] == 2)
    assert again.values["samplers/seeded"] == 1
    words = f"sampler 0 serves: it has version 0:{versions[-1]} from sampler 1, "
    assert again.labels["event"].startswith(words)
    assert [event.step for event in Ended(folder, 0, "").events("weights")] == versions  # the trainer sent nothing
    for child in [*stopped, children["preprocess 0"]]:
        child.resume()
    wait_for_steps(process, folder, versions[-1] + 5)
    folder.stop.touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    ended = Ended(folder, process.returncode, output)
    assert ended.events("weights")[-1].step > versions[-1]
    served = served_after(folder, 0, again.time)
    assert min(served) >= versions[-1]
    assert max(served) > versions[-1]
    assert list(folder.weights.iterdir()) == []
    result = audit(folder.path)
    assert result.passed, render(result)
    report = subprocess.run([SUBMIT.with_name("prl-report"), folder.path], capture_output=True, text=True, check=True).stdout
    assert "1 died; 1 restarts; 1 seeded by others; 2 serving at the last change" in report


@pytest.mark.slow
@pytest.mark.deadline(360)
def test_a_run_whose_weights_go_by_files_trains_and_leaves_none_behind(tmp_path):
    overrides = ("weights.transport=filesystem", "run.steps=6", "cluster.replicas_per_node=2")
    ended = submit(tmp_path / "run", *SHORT, *overrides)
    assert ended.code == 0, ended.logs()
    commits = ended.events("weights")
    assert commits[-1].step == 6
    assert all(event.values["weights/by_files"] == 1 for event in commits)
    assert list(ended.folder.weights.iterdir()) == []
    result = audit(ended.folder.path)
    assert result.passed, render(result)


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_a_killed_orchestrator_leaves_no_process_behind_and_a_resume_loses_nothing(tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    process = start(folder, "train.checkpoint_every_steps=3", "streams.keep=needed")
    wait_for_steps(process, folder, wait_for_checkpoint(process, folder) + 1)
    children = children_of(process.pid, folder)
    agent = psutil.Process(next(iter(children.values())).ppid())
    agent.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    gone, alive = psutil.wait_procs(children.values(), timeout=15)
    assert not alive
    assert len(gone) == len(children)
    assert time.monotonic() - killed < 10
    process.communicate(timeout=60)
    assert process.returncode == 1
    checkpoint, trained = folder.manifests()[-1][0], max(event.step for event in Ended(folder, 0, "").events("step"))
    resumed = submit(folder.path, "--resume", folder.path, "--set", f"run.steps={trained + 4}")
    assert resumed.code == 0, resumed.logs()
    assert [event.step for event in resumed.events("step", attempt=2)] == list(range(checkpoint + 1, trained + 5))
    check_first_version(resumed, checkpoint)
    result = audit(folder.path)
    assert result.passed, render(result)
    assert (result.ended, result.attempts, result.steps) == ("done", 2, trained + 4)
    assert result.trained == (trained + 4) * 512


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_a_run_saves_when_it_is_asked_to_and_when_it_is_warned_and_goes_on_from_there(tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    process = start(folder, "run.steps=100000", "train.checkpoint_every_steps=0")
    wait_for_steps(process, folder, 2)
    assert not folder.manifests()
    folder.save.touch()
    saved = wait_for_checkpoint(process, folder)
    wait_until(lambda: not folder.save.exists(), 60, "SAVE to be taken away")
    wait_for_steps(process, folder, saved + 2)
    children = children_of(process.pid, folder)
    psutil.Process(children["actor 0"].ppid()).send_signal(signal.SIGUSR1)  # rank 0
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert not [name for name, child in children.items() if child.is_running()]
    left = json.loads(folder.exit(1).read_text())
    words = "warned by SIGUSR1: the time limit is near"
    assert (left["outcome"], left["reason"], left["cause"], left["next"]) == ("left", "time limit", words, "stop")
    assert [step for step, _ in folder.manifests()] == [saved, left["steps"]]
    assert not folder.export.exists()  # the end of the run does that
    steps = left["steps"] + 3
    resumed = submit(folder.path, "--resume", folder.path, "--set", f"run.steps={steps}")
    assert resumed.code == 0, resumed.logs()
    assert [event.step for event in resumed.events("step")] == list(range(1, steps + 1))  # none was trained twice
    result = audit(folder.path)
    assert result.passed, render(result)
    assert (result.ended, result.trained_again) == ("done", 0)
    assert resumed.exit["reason"] == "done"


@pytest.mark.slow
@pytest.mark.deadline(360)
def test_a_run_in_which_nothing_goes_on_ends_with_the_name_of_who_is_waited_for_and_stacks(tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    process = start(
        folder,
        "run.steps=100000",
        "control.no_progress_s=20",
        "actor.rollout_s=20",
        "control.lost_after_s=300",
        "control.restarts=0",
    )
    wait_for_steps(process, folder, 2)
    children_of(process.pid, folder)["trainer 1"].suspend()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    ended = json.loads(folder.exit(1).read_text())
    assert ended["cause"].startswith(f"no progress for 20 s at step {ended['steps'] + 1}: waited for trainer, which has a step")
    assert (ended["role"], ended["reason"], ended["next"]) == ("trainer", "error", "stop")
    for name in ("trainer-0", "preprocess-0", "actor-0", "sampler-0", "verifier-0"):
        assert "most recent call first" in (folder.logs(1) / f"{name}.log").read_text(), name
    assert "train_step" in (folder.logs(1) / "trainer-0.log").read_text()


@pytest.mark.slow
@pytest.mark.deadline(360)
def test_ctrl_c_ends_the_run_in_order(tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    process = start(folder)
    wait_for_steps(process, folder, 2)
    children = children_of(process.pid, folder)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Ctrl-C" in output
    assert json.loads(folder.exit(1).read_text())["outcome"] == "cancelled"
    assert not [name for name, child in children.items() if child.is_running()]


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_a_crash_behind_a_checkpoint_is_resumed_with_every_rollout_accounted_for(tmp_path, start):
    """A trainer dies some steps after a checkpoint: the durable step files are trained again as they are, in a new lineage."""
    folder = RunFolder(tmp_path / "run")
    process = start(folder, "train.checkpoint_every_steps=5", "control.restarts=0")
    wait_for_steps(process, folder, 8)
    wait_for_checkpoint(process, folder)
    children_of(process.pid, folder)["trainer 0"].send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    checkpoint = folder.manifests()[-1][0]
    trained = json.loads(folder.exit(1).read_text())["steps"]
    assert trained >= 8
    resumed = submit(folder.path, "--resume", folder.path, "--set", f"run.steps={trained + 4}")
    assert resumed.code == 0, resumed.logs()
    assert [event.step for event in resumed.events("step", attempt=2)] == list(range(checkpoint + 1, trained + 5))
    check_first_version(resumed, checkpoint)
    events = list(ledger_events(read_ledger(folder.ledgers)))
    trained_in = {}
    for event in events:
        if event.kind == "trained":
            trained_in.setdefault(event.rollout, []).append((event.version.lineage, event.step))
    again = {rollout: places for rollout, places in trained_in.items() if len(places) > 1}
    assert again  # steps after the checkpoint were trained twice,
    for places in again.values():  # on the same rollouts, in the same step, once a lineage
        assert [lineage for lineage, _ in places] == [0, 1]
        assert len({step for _, step in places}) == 1
    assert {step for places in again.values() for _, step in places} == set(range(checkpoint + 1, trained + 1))
    issued = [event.rollout for event in events if event.kind == "issued"]
    assert len(issued) == len(set(issued))
    otherwise = [event.rollout for event in events if event.kind in ("discarded", "issued_again")]
    assert len(otherwise) == len(set(otherwise))
    assert set(issued) == set(otherwise) | set(trained_in)
    assert not set(otherwise) & set(trained_in)
