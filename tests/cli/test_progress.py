import io
import json

import pytest

from prl.cli.progress import follow
from prl.config.load import replace
from prl.config.schema import Config
from prl.metrics import names
from prl.metrics.events import MetricsWriter
from prl.runfolder.outcome import Outcome
from prl.runfolder.paths import RunFolder


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.attempt(1).mkdir()
    return folder


def played(run, stream, *looks, attempt=1, **options):
    """Follow a run of 100 steps whose files change at each look; the job has ended at the last one."""
    rest = list(looks)

    def ended(_wait_s):
        rest.pop(0)()
        return not rest

    ticks = iter(range(0, 1000, 10))
    return follow(run, attempt, replace(Config(), run={"steps": 100, **options}), ended, stream, clock=lambda: next(ticks))


def write_step(writer, step, time):
    values = {names.REWARD_MEAN: 0.25, names.LAG_MEAN: 1.5, names.STEP_S: 2.0, names.TOKENS: 5000.0}
    writer.write(values, step=step, kind=names.STEP, time=time)
    writer.flush()


def test_lines_where_there_is_no_terminal(run):
    (run.attempt(1) / "exit.json").write_text(json.dumps({"outcome": "failed", "cause": "trainer 0 died", "code": 1}))
    out = io.StringIO()
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer, MetricsWriter(run.metrics, "old", 0, 2) as other:

        def phase():
            writer.write({}, kind=names.PHASE, labels={"name": "samplers start"})
            writer.flush()

        def two_steps():
            write_step(other, 90, 1.0)  # another attempt's
            write_step(writer, 1, 100.0)
            write_step(writer, 2, 102.0)

        def evaluation():
            writer.write({names.EVAL_REWARD_MEAN: 0.5}, step=2, kind=names.EVALUATION)
            writer.flush()

        outcome = played(run, out, phase, two_steps, evaluation)
    assert outcome == Outcome("failed", "trainer 0 died", code=1)
    assert out.getvalue().splitlines() == [
        "step 0/100  samplers start",
        "step 2/100  reward 0.250  lag 1.5  2,500 tokens/s  2.00 s/step  3:16 left",
        "step 2/100  reward 0.250  held-out 0.500  lag 1.5  2,500 tokens/s  2.00 s/step  3:16 left",
    ]


def test_one_line_on_a_terminal(run):
    out = Terminal()
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        outcome = played(run, out, lambda: None, lambda: write_step(writer, 1, 100.0), lambda: None)
    assert outcome is None
    first, second = out.getvalue().split("\x1b[K")[:2]
    assert first == "\rstep 0/100  starting"
    assert second == "\rstep 1/100  reward 0.250  lag 1.5  2,500 tokens/s  2.00 s/step  3:18 left"
    assert out.getvalue().count("\n") == 1


def test_a_failed_save_is_told_at_once(run):
    (run.attempt(1) / "exit.json").write_text(json.dumps({"outcome": "done", "cause": "", "code": 0}))
    out = io.StringIO()
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:

        def fail():
            writer.write({}, step=4, kind=names.SAVE_FAILED, labels={"error": "disk: no space\x1b"})
            writer.flush()

        played(run, out, fail, lambda: None)
    words = "warning: the checkpoint of step 4 failed, and the run goes on: disk: no space"
    assert out.getvalue().startswith(words)
    assert "\x1b" not in out.getvalue()


def test_samplers_that_fail_are_told_at_once(run):
    (run.attempt(1) / "exit.json").write_text(json.dumps({"outcome": "done", "cause": "", "code": 0}))
    out = io.StringIO()
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:

        def fail():
            writer.write({"samplers/serving": 2.0}, kind=names.SAMPLERS, labels={"event": "sampler 0, sampler 1 serves"})
            values = {"samplers/serving": 1.0, "samplers/fenced_died": 1.0}
            writer.write(values, kind=names.SAMPLERS, labels={"event": "sampler 1 was ended by SIGKILL"})
            writer.flush()

        played(run, out, fail, lambda: None)
    assert out.getvalue() == "samplers: sampler 1 was ended by SIGKILL\nstep 0/100  starting\n"


def test_checkpoints_that_were_passed_over_are_told_and_the_first_request_is_no_phase(run):
    (run.attempt(1) / "exit.json").write_text(json.dumps({"outcome": "done", "cause": "", "code": 0}))
    out = io.StringIO()
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:

        def begin():
            run.plan(1).write_text(json.dumps({"lineage": 1, "forks": {}, "refused": ["checkpoint step_000010 is damaged"]}))
            writer.write({}, kind=names.PHASE, labels={"name": "seeding"})
            writer.write({}, kind=names.PHASE, labels={"name": names.FIRST_ROLLOUT_REQUEST})
            writer.flush()

        played(run, out, begin, lambda: None)
    assert out.getvalue() == "warning: checkpoint step_000010 is damaged\nstep 0/100  seeding\n"


def test_a_checkpoint_that_is_passed_over_while_the_run_starts_is_told_once(run):
    """Its files are checked while the processes start; by the end of that the plan says what is."""
    (run.attempt(1) / "exit.json").write_text(json.dumps({"outcome": "done", "cause": "", "code": 0}))
    out = io.StringIO()
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:

        def plan(*refused, step):
            run.plan(1).write_text(json.dumps({"lineage": 1, "forks": {"1": step}, "refused": refused}))

        def seed():
            plan("30 is damaged", "20 is damaged", step=10)
            writer.write({}, kind=names.PHASE, labels={"name": "seeding"})
            writer.flush()

        played(run, out, lambda: plan("30 is damaged", step=20), lambda: None, seed, lambda: plan("another", step=10))
    warnings = [line for line in out.getvalue().splitlines() if line.startswith("warning")]
    assert warnings == ["warning: 30 is damaged", "warning: 20 is damaged"]
    assert out.getvalue().endswith("step 10/100  seeding\n")


def test_a_resumed_run_begins_at_its_checkpoint(run):
    """At the newest, until its plan names the one that it goes on from."""
    for step in (40, 50):
        run.checkpoint(step).mkdir(parents=True)
        run.manifest(step).touch()
    out = Terminal()
    played(run, out, lambda: None, lambda: run.plan(1).write_text(json.dumps({"lineage": 2, "forks": {"1": 9, "2": 40}})))
    assert [line.split("\x1b")[0] for line in out.getvalue().split("\r")[1:]] == [
        "step 50/100  starting",
        "step 40/100  starting",
    ]


@pytest.mark.parametrize("options", [{"stop_at_reward": 0.9}, {"epochs": 2}])
def test_time_left_is_a_bound_where_a_run_may_end_before_its_last_step(run, options):
    out = io.StringIO()
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        played(run, out, lambda: write_step(writer, 1, 100.0), **options)
    assert out.getvalue().endswith("2.00 s/step  at most 3:18 left\n")
