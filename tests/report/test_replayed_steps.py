"""Steps that are built anew from the rollouts of a run that was played."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from played_run import play

from prl.config.load import load
from prl.preprocess.options import PreprocessOptions
from prl.preprocess.replay import Original, rebuild
from prl.runfolder.paths import RunFolder
from prl.streams.files import Header, StreamError, list_published, publish_arrow
from prl.streams.rollouts import to_arrow
from prl.streams.steps import find_steps, read_step

ARRAYS = ("tokens", "positions", "boundaries", "loss_weights", "advantages", "old_logprobs", "lags")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = play(tmp_path_factory.mktemp("replayed") / "run", [70])
    (run.rollouts / "notes.txt").write_text("of a person: no writer's folder")
    return run


def test_the_same_options_give_the_same_steps(run):
    config, original = load(run.config), Original(run)
    for step, file in find_steps(run.steps).items():
        wanted = read_step(file.path, file.bytes, file.checksum)
        made = rebuild(original, step, config, 1)
        assert made.facts == wanted.facts
        for number, microbatch in enumerate(made.microbatches):
            assert by_rollout(microbatch) == by_rollout(wanted.microbatch(number))


def by_rollout(microbatch) -> dict:
    """Each rollout's values: a step file that was found at a resume has its groups in another order in the ledger."""
    found = {}
    for number, rollout in enumerate(microbatch.rollouts):
        piece = slice(*microbatch.boundaries[number : number + 2])
        found[rollout] = {name: getattr(microbatch, name)[piece].tolist() for name in ARRAYS if name != "boundaries"}
    return found


def test_other_options_give_other_advantages_of_the_same_rollouts(run):
    config, original = load(run.config), Original(run)
    other = replace(config, preprocess=PreprocessOptions(advantage="leave_one_out", pack_tokens=32))
    first, second = rebuild(original, 2, config, 1), rebuild(original, 2, other, 1)
    assert first.trained == second.trained
    ours, theirs = (np.concatenate([m.advantages for m in step.microbatches]) for step in (first, second))
    assert np.array_equal(np.sign(ours), np.sign(theirs))
    assert not np.allclose(ours, theirs)


def test_what_is_not_there_is_told(run):
    with pytest.raises(StreamError, match="step 9 was not trained there"):
        Original(run).groups(9)


def test_a_file_that_cannot_be_read_matters_only_where_it_is_needed(run, tmp_path, capsys):
    shutil.copytree(run.path, tmp_path / "run")
    copy = RunFolder(tmp_path / "run")
    needed = Original(copy)
    writer = next(path for path in copy.rollouts.iterdir() if path.is_dir())
    stray = writer / f"rollouts_a001_00000999_5_{'0' * 16}.arrow"
    stray.write_bytes(b"hello")
    config = load(copy.config)
    assert rebuild(Original(copy), 5, config, 1).trained == rebuild(needed, 5, config, 1).trained
    assert f"passed over: {stray}: checksum" in capsys.readouterr().out
    for _, file in list_published(writer):
        file.path.write_bytes(bytes(file.bytes))
    original = Original(copy)
    with pytest.raises(StreamError, match=r"group \d+, trained in step \d, are in no file that can be read"):
        [rebuild(original, step, config, 1) for step in range(1, 9)]


def test_another_runs_rollouts_are_passed_over(run, tmp_path, capsys):
    """They have the numbers of this run's groups, and another answer."""
    shutil.copytree(run.path, tmp_path / "run")
    copy, config = RunFolder(tmp_path / "run"), load(run.config)
    header = Header("rollouts", "another", 1, "zz", 0)
    wrong = [
        replace(group, rollouts=tuple(replace(rollout, reward=rollout.reward + 7.0) for rollout in group.rollouts))
        for group in Original(copy).groups(5)
    ]
    (copy.rollouts / "zz").mkdir()
    stray = publish_arrow(copy.rollouts / "zz", "rollouts", header, to_arrow(wrong, header)).path
    assert rebuild(Original(copy), 5, config, 1).metrics == rebuild(Original(run), 5, config, 1).metrics
    assert f"passed over: {stray}: of run 'another', this is run 'played'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "max_lag", "words"),
    [
        ({"pack_tokens": 2}, 4, r"6 rollouts: longer than a micro-batch \(preprocess.pack_tokens\)$"),
        ({"too_old": "drop"}, 0, r"6 rollouts: too old \(preprocess.too_old, run.max_lag\)$"),
        ({"too_old": "mask"}, 0, r"6 rollouts: too old \(preprocess.too_old, run.max_lag\)$"),
        ({"too_old": "mask", "pack_tokens": 2}, 0, r"6 rollouts: longer than a micro-batch"),
    ],
)
def test_a_step_of_which_nothing_is_left_is_told_with_the_option(run, change, max_lag, words):
    config = load(run.config)
    config = replace(
        config, preprocess=replace(config.preprocess, **change), run=replace(config.run, max_lag=max_lag, mode="pipeline")
    )
    with pytest.raises(StreamError, match=rf"of step 5 nothing is left to train on: {words}"):
        rebuild(Original(run), 5, config, 1)


@pytest.mark.parametrize("too_old", ["drop", "mask", "train"])
def test_a_lower_limit_of_the_lag_holds_as_in_a_live_run(run, too_old):
    """Which groups are above it follows from the step that trained them and the versions in the rollout files."""
    config, original = load(run.config), Original(run)
    config = replace(config, preprocess=replace(config.preprocess, too_old=too_old), run=replace(config.run, max_lag=1))
    dropped = 0
    for step in range(1, 9):
        groups = original.groups(step)
        lags = {group.group: step - 1 - group.rollouts[0].turns[0].versions[0].version.step for group in groups}
        old = {group for group, lag in lags.items() if lag > 1 and too_old != "train"}
        if len(old) == len(groups):
            with pytest.raises(StreamError, match=r"6 rollouts: too old"):
                rebuild(original, step, config, 1)
            continue
        made = rebuild(original, step, config, 1)
        assert {rollout.group for rollout in made.trained} == set(lags) - old
        assert made.discarded == [(rollout, "too old") for g in groups if g.group in old for rollout in g.rollout_ids()]
        assert made.metrics["lag_max"] == max(lag for group, lag in lags.items() if group not in old)
        dropped += len(old)
    assert bool(dropped) == (too_old != "train")
