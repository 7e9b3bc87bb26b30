"""prl-plan."""

import os
import subprocess
import sys

import pytest

from prl.cli import plan


def test_plan_prints_the_split(config, capsys):
    assert plan.main(["c.yaml", "--nodes", "5", "--set", "cluster.train_nodes=2"]) == 0
    out = capsys.readouterr().out
    assert "train  2 nodes, each: 2 trainer ranks on CPUs" in out
    assert "sample 3 nodes, each: 1 sampler on CPUs" in out
    assert plan.main(["c.yaml", "--nodes", "0"]) == 2
    assert "prl-plan: error: cluster.nodes = 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("cluster.replicas_per_node=1000000000", "cluster.replicas_per_node = 1000000000: must be at least 1 and below 10000"),
        ("train.tensor_parallel=7", "train.tensor_parallel = 7: does not divide the model's 2 query heads; choose one of 1, 2"),
        (
            "train.pipeline_parallel=3",
            "train.pipeline_parallel = 3: with train.virtual_pipeline = 1 does not divide",
        ),
        ("run.folder=~nobody-of-this-name/x", "run.folder = ~nobody-of-this-name/x: there is no such user"),
    ],
)
def test_plan_refuses_what_cannot_be_laid_out(config, capsys, option, words):
    assert plan.main(["c.yaml", "--set", option]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("prl-plan: error: ")
    assert words in said.err
    assert said.out == ""


def test_plan_has_a_word_for_an_output_that_takes_nothing(config):
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "prl.cli.plan", "c.yaml"]
    for stream, code, words in (
        (writing, 0, ""),
        (os.open("/dev/full", os.O_WRONLY), 1, "prl-plan: error: [Errno 28] No space left on device\n"),
    ):
        done = subprocess.run(program, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        os.close(stream)
        assert (done.returncode, done.stderr) == (code, words)
