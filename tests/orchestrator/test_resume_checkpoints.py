"""Where an attempt starts whose checkpoints are damaged: at an older one, or not at all; whatever happens is told."""

import asyncio
import json

import pytest
from first_attempt import CONFIG, flip, two_checkpoints
from left_behind import write_checkpoint

from prl.control.client import ControlClient
from prl.control.token import create_token
from prl.orchestrator.binding import Plan
from prl.orchestrator.children import ChildPlan
from prl.orchestrator.main import Orchestrator
from prl.orchestrator.resume import ResumeError, find_start, publish_plan
from prl.runfolder.manifest import Manifest, read_manifest, write_manifest
from prl.runfolder.paths import RunFolder
from prl.runfolder.plan import read_plan


def test_a_flipped_bit_anywhere_in_a_checkpoint_leads_to_the_one_before_and_is_told(tmp_path, caplog):
    first = two_checkpoints(tmp_path)
    assert find_start(first.run, CONFIG).resume.step == 2
    manifest = first.run.manifest(2)
    for path in (manifest, *(manifest.parent / "trainer").iterdir()):
        whole = path.read_bytes()
        for position in range(0, len(whole), 7):
            if chr(whole[position]).isspace():
                continue
            flip(path, position)
            caplog.clear()
            start = find_start(first.run, CONFIG)
            assert start.resume.step == 1, (path, position)
            assert [entry.file["step"] for entry in start.waiting] == [2]
            (words,) = start.refused
            assert words.startswith("checkpoint step_000002 is damaged and was passed over: ")
            assert str(path) in words
            assert words in caplog.text
            path.write_bytes(whole)
    (manifest.parent / "trainer/.metadata").unlink()
    assert "No such file" in find_start(first.run, CONFIG).refused[0]


@pytest.mark.parametrize("change", [{"next_group": 4096}, {"events": -5}, {"events": 0}])
def test_a_manifest_with_another_value_is_refused(tmp_path, change):
    first = two_checkpoints(tmp_path)
    path = first.run.manifest(2)
    content = json.loads(path.read_text())
    content["dispatcher"] |= change
    path.write_text(json.dumps(content))
    assert "does not fit its own checksum" in find_start(first.run, CONFIG).refused[0]


def test_without_a_whole_checkpoint_the_resume_fails_and_names_all(tmp_path):
    first = two_checkpoints(tmp_path)
    for step in (1, 2):
        flip(first.run.checkpoint(step) / "trainer/__0_0.distcp", 0)
    with pytest.raises(ResumeError, match=r"no checkpoint is whole.*step_000002 is damaged.*step_000001 is damaged"):
        find_start(first.run, CONFIG)


def second_attempt(run):
    """Of one trainer, which asks where to begin, and for step 2, before anything of the checkpoint has been read. Gives the
    answers, if it got any, and how the attempt ended: it is cancelled once it has told the trainer."""

    async def main():
        run.attempt(2).mkdir()
        start = find_start(run, CONFIG, parts=False)
        plan = Plan(2, (), (ChildPlan("trainer", 0, 0, (), {}),), 1)
        publish_plan(run, plan, start)
        orchestrator = Orchestrator(run, CONFIG, plan, start, create_token(run.token))
        url = await orchestrator.serve("127.0.0.1")
        async with ControlClient(url, run.token.read_text(), "trainer", 0, CONFIG.control) as trainer:

            def ask(name, body):
                return asyncio.create_task(trainer.call(name, body, deadline_s=30, reason="test"))

            asked = [ask("resume", {}), ask("next_step", {"step": 2})]
            done, _ = await asyncio.wait(asked, timeout=0.3)
            assert not done
            leading = asyncio.create_task(orchestrator.lead())
            told = asyncio.create_task(asyncio.wait(asked))
            await asyncio.wait([leading, told], return_when="FIRST_COMPLETED")
            answers = [task.result() for task in asked if task.done()]
            orchestrator.shutdown.cancel("enough")
            outcome = await leading
            for task in (*asked, told):
                task.cancel()
            await asyncio.gather(*asked, told, return_exceptions=True)
            return answers, outcome.cause

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("damaged", [False, True])
def test_nothing_is_told_before_the_checkpoint_is_checked_and_a_damaged_one_is_passed_over(tmp_path, damaged):
    run = two_checkpoints(tmp_path).run
    if damaged:
        flip(run.checkpoint(2) / "trainer/__0_0.distcp", 3)
    (resume, step_2), cause = second_attempt(run)
    assert cause == "enough"
    plan = read_plan(run.plan(2))
    assert resume == {"checkpoint": str(run.checkpoint(1 if damaged else 2))}
    assert plan.lineage == 1
    assert plan.forks == {1: 1 if damaged else 2}
    if damaged:
        assert step_2["file"]["step"] == 2  # trained again from its file
        (words,) = plan.refused
        assert words.startswith("checkpoint step_000002 is damaged and was passed over: ")
        assert "__0_0.distcp: its content is not what was written" in words
    else:
        assert step_2["file"] is None
        assert plan.refused == ()


def test_an_attempt_without_a_whole_checkpoint_ends_with_the_names_of_all(tmp_path):
    run = two_checkpoints(tmp_path).run
    for step in (1, 2):
        flip(run.checkpoint(step) / "trainer/__0_0.distcp", 3)
    answers, cause = second_attempt(run)
    assert answers == []
    assert "no checkpoint is whole" in cause
    assert "step_000002 is damaged" in cause
    assert "step_000001 is damaged" in cause


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '"x"', "{}", "[" * 100000])
def test_a_manifest_of_another_kind_is_named(tmp_path, text):
    first = two_checkpoints(tmp_path)
    first.run.manifest(2).write_text(text)
    assert f"{first.run.manifest(2)}: is no manifest of a checkpoint" in find_start(first.run, CONFIG).refused[0]


def test_a_state_of_another_form_is_told(tmp_path):
    first = two_checkpoints(tmp_path)
    state = {key: value for key, value in first.dispatcher.state().items() if key != "groups"}
    write_checkpoint(first.run, 3, state)
    with pytest.raises(ResumeError, match=r"step_000003/manifest.json: its state and the ledger .* do not fit together"):
        find_start(first.run, CONFIG)


def test_a_manifest_comes_back_as_it_was_whatever_its_keys_are(tmp_path):
    run = RunFolder(tmp_path)
    facts = {"step": 7, "attempt": 1, "lineage": 12, "streams": {}, "evaluations_reached": 0, "parts": ()}
    written = Manifest(**facts, forks={9: 1, 10: 2, 12: 3}, dispatcher={"events": 3, "groups": {9: 1.5, 10: None}})
    run.checkpoint(7).mkdir(parents=True)
    write_manifest(run, written)
    found = read_manifest(run.manifest(7))
    assert (found.step, found.forks, found.events) == (7, written.forks, 3)
    assert found.dispatcher["groups"] == {"9": 1.5, "10": None}
