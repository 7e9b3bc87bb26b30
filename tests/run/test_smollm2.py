"""A real pretrained model on real questions: two optimizer steps of SmolLM2-135M on GSM8K."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from whole_runs import ROOT, submit

MODEL = ROOT / "models" / "smollm2-135m-instruct"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k_train.parquet"
QUESTION = (
    "A baker fills {a} trays with {b} rolls each in the morning and sells {a} rolls before noon. In the afternoon a school "
    "buys half of what is left. How many rolls does the school buy?"
)

pytestmark = [pytest.mark.slow, pytest.mark.deadline(1500)]


@pytest.fixture
def questions(tmp_path):
    """GSM8K's own where it lies beside the checkout, else some that are like them."""
    if GSM8K.exists():
        return GSM8K
    path = tmp_path / "questions.jsonl"
    numbers = [(a, b) for a in (4, 6, 8, 10) for b in (13, 15, 17, 19, 21)]
    rows = [{"question": QUESTION.format(a=a, b=b), "answer": f"#### {(a * b - a) // 2}"} for a, b in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_two_steps_on_gsm8k(tmp_path, questions):
    fetched = subprocess.run(
        [sys.executable, "tools/fetch_smollm2.py"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert fetched.returncode == 0, fetched.stdout + fetched.stderr
    ended = submit(
        tmp_path / "run",
        "configs/smollm2_gsm8k_cpu.yaml",
        "--set",
        f"domains.0.options.paths=[{questions}]",
        deadline_s=1200,
    )
    assert ended.code == 0, ended.logs()
    assert [event.step for event in ended.events("step")] == [1, 2]
    groups = ended.groups()
    assert len(groups) >= 4
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
    assert min(len(turn.prompt_ids) for turn in turns) > 20
    assert max(len(turn.output_ids) for turn in turns) > 10
    mismatch = [event.values["train/mismatch_mean_nats"] for event in ended.events("step")]
    assert mismatch[0] < 1e-4  # step 1 trains on version 0: the trainer's log-probs are the sampler's, in float32
    assert min(event.values["train/grad_norm"] for event in ended.events("step")) > 0
    before, after = (load_file(folder / "model.safetensors") for folder in (MODEL, ended.folder.export))
    name = "model.layers.0.mlp.down_proj.weight"
    moved = (after[name] - before[name].float()).abs().max()
    assert 0 < moved < 1e-5  # two steps of AdamW at a rate of 1e-6
