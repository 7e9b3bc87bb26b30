"""Steps made of given answers, and a model that learns from them before any sampler samples."""

import json
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from whole_runs import ROOT, submit

from prl.domains.digits import training_problems
from prl.runfolder.paths import RunFolder
from prl.streams.steps import find_steps, read_step

ROWS, PASSES, STEPS = 6144, 2, 24  # of 512 answers

pytestmark = pytest.mark.deadline(300)


def make_steps(*arguments) -> subprocess.CompletedProcess:
    program = [sys.executable, "tools/supervised_steps.py", *map(str, arguments)]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("supervised")
    problems = training_problems()[:ROWS]
    rows = [json.dumps({"prompt": p.data["prompt"], "answer": p.data["target"]}) for p in problems]
    (folder / "answers.jsonl").write_text("\n".join(rows))
    made = make_steps("configs/quickstart.yaml", folder / "given", folder / "answers.jsonl", "--passes", PASSES)
    assert made.returncode == 0, made.stderr
    assert f"{STEPS} steps of {ROWS} answers, {PASSES} times through; 0 left out" in made.stdout
    return RunFolder(folder / "given")


def test_each_answer_is_in_each_pass_once_and_its_tokens_alone_train(given):
    files = find_steps(given.steps)
    assert list(files) == list(range(1, STEPS + 1))
    seen: Counter[tuple[int, str]] = Counter()
    problems = training_problems()
    for number, file in files.items():
        step = read_step(file.path, file.bytes, file.checksum)
        assert (step.facts.step, step.facts.denominator, step.facts.trained_tokens) == (number, 512 * 5, 512 * 5)
        for index in range(step.facts.microbatches):
            batch = step.microbatch(index)
            assert set(batch.lags[batch.loss_weights > 0].tolist()) == {0}
            for place, rollout in enumerate(batch.rollouts):
                seen[rollout.epoch, rollout.problem] += 1
                sequence = slice(*batch.boundaries[place : place + 2])
                data = problems[int(rollout.problem.split("/")[1])].data
                digits = [int(digit) for digit in data["prompt"][:4]]
                answer = [(digit + 1) % 10 for digit in digits]
                assert batch.tokens[sequence].tolist() == [*digits, 10, *answer, 11]  # 10 is "=", 11 the end of text
                assert batch.loss_weights[sequence].tolist() == [0.0] * 5 + [1.0] * 5
    assert len(seen) == ROWS * PASSES
    assert set(seen.values()) == {1}
    first, second = ([p for e, p in seen if e == epoch] for epoch in range(PASSES))
    assert first != second  # another order


def test_a_model_learns_the_answers(given, tmp_path):
    overrides = ["train.loss=sft", "train.learning_rate=3e-3", f"run.steps={STEPS}"]
    trained = submit(tmp_path / "warm", "configs/quickstart.yaml", "--replay", given.path, "--set", *overrides)
    assert trained.code == 0, trained.logs()
    losses = [event.values["train/loss"] for event in trained.events("step")]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(math.log(16), abs=0.2)  # all 16 tokens alike
    assert np.mean(losses[-3:]) < 0.6 * losses[0]
    assert (trained.folder.export / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("row", "overrides", "words"),
    [
        ({"prompt": "1=", "reply": "2"}, [], "row 1: expected the columns prompt (text or messages) and answer (text); found"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, [], "row 1: the model's folder has no chat template"),
        (
            {"prompt": "1=", "answer": "2"},
            ["preprocess.pack_tokens=3"],
            "no answer that fits preprocess.pack_tokens = 3 among 2",
        ),
        ({"prompt": "1=", "answer": "2"}, ["train.lerning_rate=1"], "train.lerning_rate"),
    ],
)
def test_what_cannot_be_made_into_steps_is_told(tmp_path, row, overrides, words):
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "1=", "answer": "2"}}\n{json.dumps(row)}\n')
    arguments = ["configs/quickstart.yaml", tmp_path / "given", tmp_path / "rows.jsonl"]
    made = make_steps(*arguments, *(["--set", *overrides] if overrides else []))
    assert made.returncode == 1
    assert words in made.stderr
    assert "Traceback" not in made.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "given").mkdir()
    made = make_steps("configs/quickstart.yaml", tmp_path / "given", tmp_path / "rows.jsonl")
    assert made.returncode == 1
    assert "exists; remove it" in made.stderr
    assert not list((tmp_path / "given").iterdir())
