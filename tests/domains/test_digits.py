import asyncio

import numpy as np
import pytest

from prl.actor.tokenizer import ModelTokenizer
from prl.domains import digits
from prl.domains.api import Context, DomainError
from prl.flow.versions import Version
from prl.runfolder.model import write_model_folder
from prl.streams.records import Turn, VersionSpan
from prl.trainer.options import ModelOptions


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "model"
    write_model_folder(ModelOptions(init="random", architecture="qwen2"), folder)
    return ModelTokenizer(folder)


class OneAnswer:
    """A sampler that always gives the same text."""

    def __init__(self, output_ids):
        self.output_ids = output_ids
        self.asked = []

    async def generate(self, prompt_ids, *, max_tokens=None, temperature=None, top_p=None, stop_token_ids=()):
        self.asked.append((tuple(prompt_ids), max_tokens))
        n = len(self.output_ids)
        spans = (VersionSpan(Version(0, 0), 0, n),)
        return Turn(
            np.array(prompt_ids, np.int32),
            np.array(self.output_ids, np.int32),
            np.full(n, -1.0, np.float32),
            spans,
            "stop",
            0,
            0.0,
            1.0,
        )


def problem_of(prompt):
    return next(p for p in [*digits.training_problems(), *digits.evaluation_problems()] if p.data["prompt"] == prompt)


@pytest.mark.parametrize(
    ("prompt", "answer", "reward"),
    [
        ("3194=", "4205<eos>", 1.0),
        ("9999=", "0000<eos>", 1.0),
        ("3194=", "42050", 0.8),  # no end
        ("3194=", "4295<eos>", 0.8),
        ("3194=", "3194<eos>", 0.2),  # the end alone is right
        ("3194=", "<eos>", 0.0),  # the end at the place of the first digit
        ("3194=", "42<eos>", 0.4),
        ("3194=", "=====", 0.0),
        ("0000=", "1111<eos>", 1.0),
    ],
)
def test_reward_is_the_share_of_five_positions(tokenizer, prompt, answer, reward):
    sampler = OneAnswer(tokenizer.encode(answer))
    rollout = asyncio.run(digits.generate_rollout(problem_of(prompt), sampler, Context(tokenizer, None)))
    assert rollout.reward == pytest.approx(reward)
    assert sampler.asked == [((*map(int, prompt[:4]), 10), 5)]  # the model folder's documented ids


def test_splits_are_disjoint_and_complete():
    train = [p.data["prompt"] for p in digits.load_problems({}, "train", seed=1)]
    held_out = [p.data["prompt"] for p in digits.load_problems({}, "evaluate", seed=1)]
    assert len(held_out) == 512
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == [f"{n:04d}=" for n in range(10_000)]


def test_splits_are_the_same_for_every_seed():
    for split in ("train", "evaluate"):
        assert digits.load_problems({}, split, seed=1) == digits.load_problems({}, split, seed=2)


def test_training_never_calls_the_generator_of_held_out_prompts(monkeypatch):
    def fail():
        raise AssertionError("training asked for held-out prompts")

    monkeypatch.setattr(digits, "evaluation_problems", fail)
    assert len(digits.load_problems({}, "train", seed=1)) == 9488


def test_held_out_digits_look_like_the_others():
    """Every digit occurs at every place in about a tenth of the held-out prompts."""
    held_out = [p.data["prompt"] for p in digits.evaluation_problems()]
    for place in range(4):
        for digit in "0123456789":
            assert 25 <= sum(prompt[place] == digit for prompt in held_out) <= 80


def test_unknown_option_and_split():
    with pytest.raises(DomainError, match="domain digits has no option length"):
        digits.load_problems({"length": 5}, "train", seed=1)
    with pytest.raises(DomainError, match="'test'"):
        digits.load_problems({}, "test", seed=1)
