"""Where an attempt starts, from real ledgers, step files and manifests; no process runs."""

import asyncio
import json
import shutil
from dataclasses import replace

import pytest
from left_behind import step_file, write_checkpoint

from prl.config.schema import Config
from prl.control.client import ControlClient
from prl.control.token import create_token
from prl.domains.options import DomainOptions
from prl.flow.dispatcher import Dispatcher
from prl.flow.events import LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.orchestrator.binding import Plan
from prl.orchestrator.children import ChildPlan
from prl.orchestrator.main import Orchestrator
from prl.orchestrator.options import RunOptions
from prl.orchestrator.resume import ResumeError, dispatcher_settings, find_start, publish_plan
from prl.runfolder.manifest import Manifest, read_manifest, write_manifest
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.runfolder.plan import read_plan
from prl.streams.ledger import LedgerWriter
from prl.streams.steps import find_steps
from prl.trainer.options import ModelOptions

CONFIG = Config(
    run=RunOptions(name="r", id="1", steps=10, groups_per_step=2, rollouts_per_group=3, max_lag=2),
    domains=(DomainOptions(name="digits"),),
)


class Attempt:
    """A first attempt, played by hand: what it wrote before it died."""

    def __init__(self, tmp_path):
        self.run = RunFolder(tmp_path / "run")
        self.run.create()
        self.run.attempt(1).mkdir()
        write_model_folder(ModelOptions(init="random", architecture="qwen2"), self.run.model)  # of 16 tokens
        self.run.plan(1).write_text(json.dumps({"lineage": 0, "forks": {}, "refused": []}))
        self.dispatcher = Dispatcher(dispatcher_settings(CONFIG))
        self.ledger = LedgerWriter(self.run.ledger(1))
        self.dispatcher.problems({"digits": 100}, {})
        self.dispatcher.committed(Version(0, 0))
        self.leases = {}

    def lease(self, groups):
        leased = self.dispatcher.lease(0, groups, 0.0)
        self.ledger.append(leased.events)
        self.leases |= {lease.group: lease for lease in leased.leases}
        for lease in leased.leases:
            self.dispatcher.result(lease.group, lease.issue)
        return [lease.group for lease in leased.leases]

    def ids(self, *groups):
        return [rollout for group in groups for rollout in self.leases[group].rollout_ids()]

    def train(self, step, *groups):
        step_file(self.run, step, self.ids(*groups), step)
        self.ledger.append(self.dispatcher.trained(step, self.ids(*groups)))
        self.dispatcher.committed(Version(0, step))

    def checkpoint(self, step):
        write_checkpoint(self.run, step, self.dispatcher.state())


def test_without_a_checkpoint_a_run_starts_afresh(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    start = find_start(run, CONFIG)
    assert (start.resume.step, start.resume.lineage, start.resume.checkpoint) == (0, 0, None)
    assert not start.waiting
    assert not start.reissued


def test_a_crash_behind_a_checkpoint_trains_the_durable_steps_again_and_issues_the_rest_again(tmp_path):
    """Checkpoint after step 1; step 2 was trained, step 3's file was durable, groups 6 and 7 were under way."""
    first = Attempt(tmp_path)
    assert first.lease(6) == [0, 1, 2, 3, 4, 5]
    first.train(1, 0, 1)
    first.checkpoint(1)
    assert first.lease(2) == [6, 7]
    first.train(2, 2, 3)
    step_file(first.run, 3, first.ids(4, 5), 3)

    start = find_start(first.run, CONFIG)
    assert (start.resume.step, start.resume.lineage) == (1, 1)
    assert start.resume.checkpoint == str(first.run.checkpoint(1))
    assert start.forks == {1: 1}
    assert start.evaluations_reached == 1
    assert [entry.file["step"] for entry in start.waiting] == [2, 3]
    assert start.waiting[0].trained == sorted(first.ids(2, 3))
    assert start.waiting[1].trained == sorted(first.ids(4, 5))
    assert sorted({event.rollout.group for event in start.reissued}) == [6, 7]
    assert {event.kind for event in start.reissued} == {"issued_again"}

    dispatcher = start.dispatcher
    dispatcher.problems({"digits": 100}, {})
    dispatcher.committed(Version(1, 1))
    again = dispatcher.lease(0, 10, 0.0).leases
    # 3 steps of 2 groups may be in flight; 2 of step 3 are, and step 2's two count until its version is committed.
    assert [(lease.group, lease.issue) for lease in again[:2]] == [(6, 1), (7, 1)]
    assert {lease.problem for lease in again[:2]} == {first.leases[6].problem, first.leases[7].problem}
    assert all(lease.group >= 8 for lease in again[2:])
    trained = dispatcher.trained(2, start.waiting[0].trained)
    assert [(event.kind, event.version) for event in trained] == [("trained", Version(1, 2))] * 6


def test_a_step_file_of_discarded_rollouts_is_not_trained(tmp_path):
    """At a run's clean end, what was written ahead is discarded; going on with more steps must not train on it."""
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    step_file(first.run, 2, first.ids(2, 3), 2)
    first.checkpoint(1)
    first.ledger.append(first.dispatcher.close("run ended"))
    start = find_start(first.run, CONFIG)
    assert not start.waiting
    assert not start.reissued


def test_a_lost_step_file_behind_the_checkpoint_is_told(tmp_path):
    """Its rollouts have ended by being trained, in a lineage that is abandoned now: nothing else can train them again."""
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    first.checkpoint(1)
    first.train(2, 2, 3)
    first.train(3, 4, 5)
    find_steps(first.run.steps)[2].path.unlink()
    with pytest.raises(ResumeError, match=r"step 2 was trained behind the checkpoint of step 1, and its file is not in"):
        find_start(first.run, CONFIG)


@pytest.mark.parametrize("loss", ["lost", "damaged", "of other rollouts"])
def test_a_step_that_only_an_earlier_lineage_had_come_to_is_trained_again_from_its_file_or_that_is_told(tmp_path, loss):
    """Steps 2 and 3 were trained behind the checkpoint of step 1; after a rollback to it step 2 was again, and saved."""
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    first.checkpoint(1)
    first.train(2, 2, 3)
    first.train(3, 4, 5)
    first.ledger.append(first.dispatcher.went_back(Version(1, 1), "trainer ended", range(6)))
    first.ledger.append(first.dispatcher.trained(2, first.ids(2, 3)))
    first.checkpoint(2)
    start = find_start(first.run, CONFIG)
    assert [(entry.file["step"], entry.trained) for entry in start.waiting] == [(3, sorted(first.ids(4, 5)))]
    path = find_steps(first.run.steps)[3].path
    if loss == "damaged":
        flip(path, 100)
    else:
        path.unlink()
    if loss == "of other rollouts":
        first.dispatcher.committed(Version(1, 2))
        first.lease(2)
        step_file(first.run, 3, first.ids(6, 7), 9)
    with pytest.raises(ResumeError, match=r"step 3 was trained behind the checkpoint .*restore it, or submit the run anew"):
        find_start(first.run, CONFIG)


def test_the_lineage_rises_also_over_attempts_that_left_no_checkpoint(tmp_path):
    first = Attempt(tmp_path)
    first.lease(2)
    first.train(1, 0, 1)
    first.checkpoint(1)
    first.run.attempt(2).mkdir()
    first.run.plan(2).write_text(json.dumps({"lineage": 1, "forks": {"1": 1}, "refused": []}))
    start = find_start(first.run, CONFIG)
    assert start.resume.lineage == 2
    assert start.forks == {1: 1, 2: 1}


def test_rollouts_that_a_durable_step_file_left_out_are_discarded(tmp_path):
    """The preprocessor died between the file and its announcement: what it had dropped from the groups has no end yet."""
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    first.checkpoint(1)
    step_file(first.run, 2, first.ids(2, 3)[:-2], 2)
    start = find_start(first.run, CONFIG)
    discarded = [event for event in start.reissued if event.kind == "discarded"]
    assert [event.rollout for event in discarded] == first.ids(2, 3)[-2:]
    assert {event.reason for event in discarded} == {"left out of a step file"}
    assert sorted({event.rollout.group for event in start.reissued if event.kind == "issued_again"}) == [4, 5]


def test_a_run_that_began_and_left_no_checkpoint_is_not_begun_again(tmp_path):
    first = Attempt(tmp_path)
    first.lease(2)
    with pytest.raises(ResumeError, match="submit it anew"):
        find_start(first.run, CONFIG)


def test_a_manifest_that_counts_on_rows_that_are_not_there_is_refused(tmp_path):
    first = Attempt(tmp_path)
    first.lease(2)
    first.checkpoint(1)
    first.dispatcher.lease(0, 4, 0.0)  # told, and never written
    first.checkpoint(2)
    with pytest.raises(ResumeError, match=r"counts on 18 rows .* which has 6"):
        find_start(first.run, CONFIG)


def two_checkpoints(tmp_path):
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    first.checkpoint(1)
    first.train(2, 2, 3)
    first.checkpoint(2)
    return first


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


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


def test_a_checkpoint_that_the_run_has_gone_back_behind_does_not_come_back(tmp_path):
    """It could not be read for a while, and the trainers began again before it: what they have trained since counts."""
    first = two_checkpoints(tmp_path)
    assert find_start(first.run, CONFIG).resume.step == 2
    first.run.attempt(2).mkdir()
    first.run.plan(2).write_text(json.dumps({"lineage": 1, "forks": {"1": 1}, "refused": []}))
    start = find_start(first.run, CONFIG)
    assert (start.resume.step, start.resume.lineage, start.forks) == (1, 2, {1: 1, 2: 1})
    assert not start.refused
    first.run.plan(2).write_text(json.dumps({"lineage": 1, "forks": {}, "refused": []}))
    with pytest.raises(ResumeError, match=r"no plan\.json says where lineages 1 to 1 left the ones before"):
        find_start(first.run, CONFIG)


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
            orchestrator.cancel("enough")
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


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"lineage": 1}', '{"lineage": [], "forks": {}, "refused": []}'])
def test_a_damaged_plan_is_named(tmp_path, text):
    first = two_checkpoints(tmp_path)
    first.run.plan(1).write_text(text)
    with pytest.raises(ResumeError, match=r"attempt_001/plan.json: is no plan of an attempt .*; restore it"):
        find_start(first.run, CONFIG)


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


def test_ledger_rows_of_something_else_are_told(tmp_path):
    first = two_checkpoints(tmp_path)
    stranger = LedgerEvent(RolloutId(0, "digits/7", 10**6, 0, 0), "issued", Version(0, 0), -1, "")
    for event in (stranger, replace(stranger, kind="blessed")):
        with LedgerWriter(first.run.ledger(2)) as ledger:
            ledger.append([event])
        with pytest.raises(ResumeError, match=r"step_000002/manifest.json: its state and the ledger .* do not fit together"):
            find_start(first.run, CONFIG)
        ledger.path.unlink()


def test_a_damaged_step_file_blocks_a_resume_only_where_it_is_needed(tmp_path, caplog):
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    first.checkpoint(1)
    first.train(2, 2, 3)
    step_file(first.run, 3, first.ids(4, 5), 3)
    files = find_steps(first.run.steps)
    flip(files[3].path, 100)
    start = find_start(first.run, CONFIG)
    assert [entry.file["step"] for entry in start.waiting] == [2]
    assert "step 3 is made anew, since nothing was trained from its file; set aside as of no use" in caplog.text
    assert sorted({event.rollout.group for event in start.reissued if event.kind == "issued_again"}) == [4, 5]
    flip(files[2].path, 100)
    with pytest.raises(ResumeError, match=r"step 2 was trained behind the checkpoint .* of no use: .*; restore it, or submit"):
        find_start(first.run, CONFIG)


@pytest.mark.parametrize("foreign", ["of another run", "of another step", "of another model", "never issued"])
def test_a_step_file_that_is_not_this_runs_own_is_not_trained(tmp_path, caplog, foreign):
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    first.checkpoint(1)
    first.train(2, 2, 3)
    if foreign == "of another run":
        step_file(first.run, 3, first.ids(4, 5), 3, writer="r-2")  # of the same name
        words = "of run 'r-2', this is run 'r-1'"
    elif foreign == "of another step":
        second = find_steps(first.run.steps)[2].path
        shutil.copy(second, second.with_name(second.name.replace("step_00000002", "step_00000003")))
        words = "holds step 2, wanted step 3"
    elif foreign == "of another model":
        step_file(first.run, 3, first.ids(4, 5), 3, token=16)
        words = "holds the token 16, the model's are 0 to 15"
    else:
        step_file(first.run, 3, [replace(i, issue=1) for i in first.ids(4, 5)], 3)
        words = "holds 6 rollouts that were never issued, RolloutId(epoch=0, problem="
    start = find_start(first.run, CONFIG)
    assert [entry.file["step"] for entry in start.waiting] == [2]
    assert "step 3 is made anew" in caplog.text
    assert words in caplog.text
    assert words in "".join(start.refused)
    assert find_start(first.run, CONFIG).refused == []  # it is told once: the file lies in quarantine
    assert len(list(first.run.quarantine.glob("*.arrow"))) == 1
    assert sorted({event.rollout.group for event in start.reissued if event.kind == "issued_again"}) == [4, 5]


def test_a_trained_step_is_trained_again_from_the_file_that_it_was_trained_from(tmp_path):
    """Beside it lies another one, of rollouts that are in the next step's: a preprocessor died before it announced it."""
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    first.checkpoint(1)
    first.train(2, 2, 3)
    first.train(3, 4, 5)
    step_file(first.run, 2, first.ids(2, 4), 8)
    start = find_start(first.run, CONFIG)
    assert [sorted(entry.trained) for entry in start.waiting] == [sorted(first.ids(2, 3)), sorted(first.ids(4, 5))]
    (told,) = start.refused
    assert "other rollouts than the ledger says" in told


def test_a_foreign_file_of_a_trained_step_hides_none_of_the_runs_own(tmp_path, caplog):
    """It has a higher sequence, so has a damaged one; and one of an attempt that the run never had says that it is the run's.
    All are set aside, and told once."""
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    first.checkpoint(1)
    first.train(2, 2, 3)
    own = find_steps(first.run.steps)[2]
    step_file(first.run, 2, first.ids(2, 3), 7)
    flip(find_steps(first.run.steps)[2].path, 100)
    step_file(first.run, 2, first.ids(4, 5), 8, writer="r-2")
    step_file(first.run, 2, first.ids(4, 5), 9, attempt=999)
    start = find_start(first.run, CONFIG)
    assert [entry.file["path"] for entry in start.waiting] == [str(own.path.relative_to(first.run.path))]
    assert start.waiting[0].trained == sorted(first.ids(2, 3))
    assert [words.partition(": ")[0] for words in start.refused] == [
        "step 2 is trained from another file; set aside as of no use"
    ] * 3
    assert "of attempt 999, the run's newest is attempt 1" in start.refused[0]
    assert "of run 'r-2', this is run 'r-1'" in start.refused[1]
    assert "checksum" in start.refused[2]
    assert all(words in caplog.text for words in start.refused)
    assert {path.name[:18] for path in first.run.quarantine.glob("*.arrow")} == {"steps_step_0000000"}
    assert len(list(first.run.quarantine.glob("*.arrow"))) == 3
    again = find_start(first.run, CONFIG)
    assert (again.refused, again.waiting) == ([], start.waiting)


def test_a_manifest_comes_back_as_it_was_whatever_its_keys_are(tmp_path):
    run = RunFolder(tmp_path)
    facts = {"step": 7, "attempt": 1, "lineage": 12, "streams": {}, "evaluations_reached": 0, "parts": ()}
    written = Manifest(**facts, forks={9: 1, 10: 2, 12: 3}, dispatcher={"events": 3, "groups": {9: 1.5, 10: None}})
    run.checkpoint(7).mkdir(parents=True)
    write_manifest(run, written)
    found = read_manifest(run.manifest(7))
    assert (found.step, found.forks, found.events) == (7, written.forks, 3)
    assert found.dispatcher["groups"] == {"9": 1.5, "10": None}
