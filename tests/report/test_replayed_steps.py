"""Steps that are built anew from the rollouts of a run that was played."""

from dataclasses import replace

import numpy as np
import pytest
from played_run import play

from prl.config.load import load
from prl.preprocess.options import PreprocessOptions
from prl.preprocess.replay import Original, rebuild
from prl.streams.files import StreamError
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
