"""prl-submit --resume: what it goes on from, what it passes over and what it refuses."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from submitting import checkpoint, wait_for, with_function

from prl.cli import submit
from prl.config.load import load


def test_resume_needs_a_finished_checkpoint(config, capsys):
    process = with_function("fail", "c.yaml")
    assert process.wait(60) == 1
    (config / "runs/one/checkpoints/step_000010").mkdir()
    assert submit.main(["--resume", "runs/one"]) == 2
    assert "no finished checkpoint to go on from" in capsys.readouterr().err
    checkpoint(config / "runs/one", 10)
    assert submit.main(["--resume", "runs/one", "--dry-run"]) == 0
    assert submit.main(["--resume", "runs/one", "--set", "run.steps=10"]) == 2
    error = capsys.readouterr().err
    assert "run.steps = 10 are trained, the newest checkpoint is that of step 10; raise run.steps: --set run.steps=N" in error
    os.chdir("/")
    process = with_function("fail", "--resume", str(config / "runs/one"), "--set", "run.steps=30")
    assert process.wait(60) == 1
    assert (config / "runs/one/latest").readlink() == Path("attempt_002")
    assert "steps: 20" in (config / "runs/one/attempt_001/config.yaml").read_text()
    assert "steps: 30" in (config / "runs/one/config.yaml").read_text()
    assert f"folder: {config}/runs/one\n" in (config / "runs/one/config.yaml").read_text()


def test_a_resume_without_the_runs_model_is_refused_before_an_attempt_is_made(config, capsys):
    assert with_function("fail", "c.yaml").wait(60) == 1
    run = config / "runs/one"
    (run / "checkpoints/step_000010").mkdir()
    checkpoint(run, 10)
    tokenizer = (run / "model/tokenizer.json").rename(run / "away.json")
    assert submit.main(["--resume", "runs/one", "--dry-run"]) == 2
    where = f"--resume {run}: the run's model folder {run}/model is not whole"
    assert f"{where} (has no tokenizer.json; " in capsys.readouterr().err
    tokenizer.rename(run / "model/tokenizer.json")
    assert submit.main(["--resume", "runs/one", "--dry-run"]) == 0
    (run / "control/token").write_text("")
    assert submit.main(["--resume", "runs/one"]) == 2
    assert f"--resume runs/one: {run}/control/token: is damaged and holds no token; remove it" in capsys.readouterr().err
    (run / "control/token").unlink()
    for name in ("STOP", "SAVE"):
        (run / "control" / name).mkdir()
        assert submit.main(["--resume", "runs/one"]) == 2
        assert f"--resume runs/one: {run}/control/{name} is a folder, and a file is what asks" in capsys.readouterr().err
        (run / "control" / name).rmdir()
    own = (run / "model/config.json").read_text()
    (run / "model/config.json").write_text(own.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    assert submit.main(["--resume", "runs/one", "--dry-run"]) == 2
    words = "config.json is of another model than the run's configuration: layers = 3, which was 2"
    assert f"{where} ({words})" in capsys.readouterr().err
    (run / "model/config.json").write_text("{")
    assert submit.main(["--resume", "runs/one", "--dry-run"]) == 2
    assert f"{where} ({run}/model/config.json cannot be read: " in capsys.readouterr().err
    (run / "model").rename(config / "away")
    assert submit.main(["--resume", "runs/one"]) == 2
    assert f"{where} (has no config.json; " in capsys.readouterr().err
    assert not (run / "attempt_002").exists()


def test_damaged_manifests_are_told_and_passed_over_before_an_attempt_is_made(config, capsys):
    assert with_function("fail", "c.yaml").wait(60) == 1
    run = config / "runs/one"
    for step in (5, 10):
        (run / f"checkpoints/step_{step:06d}").mkdir()
    older, newer = checkpoint(run, 5), checkpoint(run, 10)
    for text in ("[]", "{", newer.read_text().replace('"step": 10', '"step": 14'), older.read_text()):
        newer.write_text(text)
        assert submit.main(["--resume", "runs/one", "--dry-run"]) == 0
        error = capsys.readouterr().err
        assert f"prl-submit: warning: checkpoint step_000010 is damaged and was passed over: {newer}: " in error
        assert submit.main(["--resume", "runs/one", "--set", "run.steps=5"]) == 2
        assert "the newest checkpoint is that of step 5" in capsys.readouterr().err
    older.write_text("")
    assert submit.main(["--resume", "runs/one"]) == 2
    error = capsys.readouterr().err
    assert "step_000005 is damaged" in error
    assert "none of the run's checkpoints can be gone on from" in error
    (run / "attempt_001/submission.json").write_text("nonsense")
    assert submit.main(["--resume", "runs/one"]) == 2
    assert f"{run}/attempt_001/submission.json: no record of a submission" in capsys.readouterr().err
    assert not (run / "attempt_002").exists()


def test_a_checkpoint_without_all_of_its_files_is_told_before_an_attempt_is_made(config, capsys):
    assert with_function("fail", "c.yaml").wait(60) == 1
    run = config / "runs/one"
    for step in (5, 10):
        (run / f"checkpoints/step_{step:06d}").mkdir()
        checkpoint(run, step)
    older, newer = (run / f"checkpoints/step_{step:06d}/trainer/weights" for step in (5, 10))
    newer.write_text("weigh")
    assert submit.main(["--resume", "runs/one", "--dry-run"]) == 0
    error = capsys.readouterr().err
    assert f"step_000010 is damaged and was passed over: {newer}: has 5 bytes, of 7 that were written" in error
    older.unlink()
    assert submit.main(["--resume", "runs/one", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert f"step_000005 is damaged and was passed over: {older}: No such file or directory" in error
    assert "none of the run's checkpoints can be gone on from" in error


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("model.layers=3", "model.layers"),
        ("model.tokenizer=bytes", "model.tokenizer"),
        ("domains.0.weight=2", "domains"),
        ("run.seed=4", "run.seed"),
        ("run.name=other", "run.name"),
        ("run.id=other", "run.id"),
        ("streams.backend=redis", "streams.backend"),
        ("train.lora_rank=4", "train.lora_rank"),
        ("train.dtype=bfloat16", "train.dtype"),
        ("train.distributed_optimizer=true", "train.distributed_optimizer"),
        ("train.value_head=true", "train.value_head"),
    ],
)
def test_a_resume_refuses_to_change_what_has_no_effect_any_more(config, capsys, key, told):
    assert with_function("fail", "c.yaml").wait(60) == 1
    run = config / "runs/one"
    (run / "checkpoints/step_000010").mkdir()
    checkpoint(run, 10)
    assert submit.main(["--resume", "runs/one", "--dry-run", "--set", "run.steps=30", "train.learning_rate=1e-5"]) == 0
    assert submit.main(["--resume", "runs/one", "--dry-run", "--set", key]) == 2
    assert f"--resume runs/one: {told} cannot be changed in a run that has begun" in capsys.readouterr().err


def test_a_run_has_a_mark_of_its_own_for_good(config):
    """Also one that begins with another's configuration."""

    def mark(run):
        return load(run / "config.yaml").run.mark

    assert with_function("fail", "c.yaml").wait(60) == 1
    one, two = config / "runs/one", config / "runs/two"
    assert with_function("fail", one / "config.yaml", "--set", f"run.folder={two}").wait(60) == 1
    first = mark(one)
    assert re.fullmatch("one-[a-z]{8}", first)
    assert re.fullmatch("one-[a-z]{8}", mark(two))
    assert mark(two) != first
    (one / "checkpoints/step_000010").mkdir()
    checkpoint(one, 10)
    assert with_function("fail", "--resume", one).wait(60) == 1
    assert mark(one) == first


def test_of_two_resumes_at_once_one_runs_and_the_other_is_told(config):
    assert with_function("fail", "c.yaml").wait(60) == 1
    run = config / "runs/one"
    (run / "checkpoints/step_000010").mkdir()
    checkpoint(run, 10)
    both = [with_function("wait_for_term", "--resume", "runs/one") for _ in range(2)]
    end = time.monotonic() + 60
    while all(process.poll() is None for process in both):
        assert time.monotonic() < end
        time.sleep(0.05)
    (loser,) = (process for process in both if process.poll() is not None)
    (winner,) = (process for process in both if process is not loser)
    words = loser.communicate(timeout=60)[0]
    assert re.search(
        "another prl-submit has just begun attempt 2|is being submitted by another|attempt 2 still runs here", words
    )
    wait_for(run / "started", winner)
    winner.send_signal(signal.SIGINT)
    assert winner.wait(60) == 130
    assert (run / "ended in order").exists()
    assert [path.name for path in sorted(run.glob("attempt_*"))] == ["attempt_001", "attempt_002"]
