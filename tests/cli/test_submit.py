"""prl-submit before anything is sent: what it shows and what it refuses."""

import os
import re
import subprocess
import sys

import pytest
from submitting import ROOT, files

from prl.cli import submit
from prl.config import accelerators
from prl.domains import registry


def test_dry_run_prints_the_plan_and_the_script_and_writes_nothing(config, capsys):
    assert submit.main(["c.yaml", "--nodes", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "3 nodes, a heterogeneous Slurm job" in out
    assert "#SBATCH hetjob" in out
    assert f"export PRL_RUN={config}/runs/one" in out
    assert submit.main(["c.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "this machine, without Slurm" in out
    assert "#SBATCH" not in out
    assert files(config) == ["c.yaml"]


def test_dry_run_tells_what_a_trainer_rank_needs_and_refuses_what_it_has_not(config, capsys):
    arguments = ["c.yaml", "--nodes", "3", "--dry-run", "--set", "train.tensor_parallel=1", "train.pipeline_parallel=2"]
    assert submit.main(arguments) == 0
    out = capsys.readouterr().out
    assert "2 trainer ranks (tensor parallel 1 x pipeline parallel 2 x data parallel 1)" in out
    assert re.search(r"a trainer rank of stage [01] needs about \d+\.\d MiB", out)
    assert re.search(r"a checkpoint is written from a copy of up to \d\.\d MiB in the memory of a node", out)
    assert submit.main([*arguments, "weights.staging=chunked"]) == 0
    out = capsys.readouterr().out
    assert "samplers stand still while it is written over the last one, bucket by bucket" in out
    assert "weights.staging = chunked; whether samplers have the memory" in out
    assert submit.main([*arguments, "cluster.gpu_memory_gib=0.001"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"cluster\.gpu_memory_gib = 0\.001: a trainer rank needs about 0\.\d; raise", error)
    assert "where yours has more" not in error


def test_an_accelerator_that_is_too_small_by_its_type_is_refused(config, capsys, monkeypatch):
    monkeypatch.setitem(accelerators._GIB, "l4", 0.001)
    arguments = ["c.yaml", "--nodes", "2", "--dry-run", "--set", "cluster.gpus_per_node=2", "cluster.gpu_type=L4"]
    assert submit.main(arguments) == 2
    error = capsys.readouterr().err
    assert re.search(r"cluster\.gpu_type = L4, which has 0\.001 GiB: a trainer rank needs about 0\.\d; raise train\.t", error)
    assert "; where yours has more, set cluster.gpu_memory_gib" in error
    assert submit.main([*arguments, "cluster.gpu_memory_gib=22"]) == 0


def test_memory_that_is_not_known_is_told_and_a_nodes_own_is_compared(config, capsys):
    """The model has 124 480 parameters, whose state, 16 bytes each in the host's memory, is split over 4 ranks; a checkpoint is
    written from a copy of 14 bytes each: 0.00348 GiB, and Slurm counts whole MiB, of which 3 are 0.00293 GiB."""
    offload = ["train.tensor_parallel=1", "train.dtype=bfloat16", "train.distributed_optimizer=true", "sample.dtype=bfloat16"]
    offload += ["train.optimizer_offload=true", "cluster.gpus_per_node=4"]
    arguments = ["c.yaml", "--nodes", "2", "--dry-run", "--set", *offload]
    assert submit.main(arguments) == 0
    error = capsys.readouterr().err
    assert re.search(r"warning: cluster\.gpu_memory_gib = null: whether an accelerator holds the \d+\.\d GiB that a", error)
    assert submit.main([*arguments, "cluster.gpu_type=nvidia_h200"]) == 0
    said = capsys.readouterr()
    assert "  an accelerator has 139 GiB (cluster.gpu_type = nvidia_h200)\n" in said.out
    assert said.err == ""
    arguments.append("cluster.gpu_memory_gib=80")
    for enough in (
        ["cluster.memory_per_node_gib=0.0040"],
        ["cluster.memory_per_node_gib=0.0034", "cluster.sbatch_train.mem=4M"],
    ):
        assert submit.main([*arguments, *enough]) == 0
        assert capsys.readouterr().err == ""
    for few in (["cluster.memory_per_node_gib=0.0034"], ["cluster.memory_per_node_gib=1", "cluster.sbatch_train.mem=3M"]):
        assert submit.main([*arguments, *few]) == 2
        error = capsys.readouterr().err
        assert "a node that trains gets 0.00293 GiB (cluster.memory_per_node_gib, or cluster.sbatch_train.mem): " in error
        assert "a node's 4 trainer ranks need about 3.6 MiB, with train.opt" in error
    assert ", 1.7 MiB of it for the copy that a checkpoint is written from" in error
    on_cpus = ["c.yaml", "--nodes", "2", "--dry-run", "--set", "cluster.memory_per_node_gib=0.001"]
    assert submit.main(on_cpus) == 2
    assert "cluster.sbatch_train.mem): a node's 2 trainer ranks need about " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.yaml"], "missing.yaml: no such file"),
        ([], "name a configuration"),
        (["c.yaml", "--set", "run.stepz=3"], "unknown key run.stepz; did you mean run.steps?"),
        (["c.yaml", "--set", "run.steps=many"], "run.steps: expected a whole number, found text 'many'"),
        (
            ["c.yaml", "--set", "train.tensor_parallel=3"],
            "train.tensor_parallel = 3: does not divide the model's 2 query heads",
        ),
        (["c.yaml", "--nodes", "1", "--set", "cluster.train_nodes=2"], "cluster.train_nodes = 2: with one node"),
        (["c.yaml", "--nodes", "2", "--set", "cluster.sbatch.output=x"], "cluster.sbatch.output: is set by prl-submit"),
        (["c.yaml", "--set", "domains=[{name: digitz}]"], "there is no domain digitz"),
        (
            ["c.yaml", "--set", "domains=[{name: gsm8k, options: {paths: [../rows.jsonl]}}]"],
            "verifier.processes = 0: domain gsm8k needs the verifier; set at least 1",
        ),
        (
            ["c.yaml", "--set", "domains=[{name: gsm8k, options: {paths: [../rows.jsonl]}}]", "run.evaluate_every_steps=5"],
            "run.evaluate_every_steps = 5: no domain has held-out problems",
        ),
        (
            ["c.yaml", "--set", "domains=[{name: gsm8k, options: {paths: [../rows.jsonl]}}]"],
            "the model has none: set model.tokenizer: bytes",
        ),
        (["/dev/null"], "/dev/null: is no regular file"),
        (
            ["c.yaml", "--set", "cluster.replicas_per_node=1000000000"],
            "cluster.replicas_per_node = 1000000000: must be at least 1 and below",
        ),
        (["c.yaml", "--set", f"train.learning_rate={'9' * 400}"], "(400 characters): is too large for a number"),
        (
            ["c.yaml", "--set", "model.path=~nobody-of-this-name/x"],
            "model.path = ~nobody-of-this-name/x: there is no such",
        ),
        (["--resume", "runs/none"], "no run lies there"),
        (["c.yaml", "--host-is-gone"], "--host-is-gone speaks of a run that is gone on with; name it with --resume RUN"),
        (["c.yaml", "--set", "cluster.interface=nope0"], "cluster.interface = nope0: this machine has lo"),
        (["c.yaml", "--resume", "runs/none"], "leave out c.yaml"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(config, capsys, arguments, words):
    assert submit.main([*arguments, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("prl-submit: error: ")
    assert words in error
    assert files(config) == ["c.yaml"]


def test_what_checks_mathematics_must_be_there_where_it_runs(config, capsys, monkeypatch):
    monkeypatch.setattr(registry, "MATHEMATICS", "no_module_of_this_name")
    gsm8k = ["verifier.processes=1", "model.tokenizer=bytes", "domains=[{name: gsm8k, options: {paths: [../rows.jsonl]}}]"]
    assert submit.main(["c.yaml", "--dry-run", "--set", *gsm8k]) == 2
    assert "no_module_of_this_name, which is not installed here: pip install math-verify" in capsys.readouterr().err
    assert submit.main(["c.yaml", "--dry-run", "--nodes", "3", "--set", *gsm8k]) == 0  # the nodes have their own


def test_a_dry_run_without_model_and_data_shows_the_plan_and_says_which_keys_to_set(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    qwen = [str(ROOT / "configs" / "qwen7b.yaml"), "--dry-run"]
    assert submit.main(qwen) == 2
    said = capsys.readouterr()
    script, plan = re.split("(?m)^run qwen7b-math in ", said.out)  # what has to be looked at is last, and one screen
    assert "#SBATCH hetjob" in script
    assert "8 nodes, a heterogeneous Slurm job" in plan
    assert "memory depends on the model, which is not there yet" in plan
    assert "partition the site's default, account the site's default, qos the site's default (--partition, --acc" in plan
    assert len(plan.splitlines()) < 12
    keys = ["model.path", "domains[0].options.paths", "domains[0].options.evaluate_paths"]
    assert [line.split()[2] for line in said.err.splitlines()] == keys
    (tmp_path / "here.jsonl").write_text('{"problem": "Two and two?", "answer": 4}\n')
    submit.main([*qwen, "--set", *(f"{key}=[here.jsonl]" for key in keys[1:])])  # the keys as they were spelt
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prl-submit: error: model.path = ")
    assert files(tmp_path) == ["here.jsonl"]


def test_a_dry_run_shows_the_memory_where_something_else_is_missing_and_tells_all_of_it_at_once(config, capsys, monkeypatch):
    """Also on a machine without Slurm, and what the components ask for."""
    monkeypatch.setenv("PATH", str(config))
    keys = ["domains=[{name: gsm8k, options: {paths: [nope.jsonl]}}]", "cluster.gpus_per_node=4"]
    keys += ["cluster.gpu_memory_gib=0.001", "cluster.sbatch_train.partition=big", "cluster.partition=small"]
    dry = ["c.yaml", "--nodes", "3", "--account", "me", "--dry-run", "--set", *keys]
    assert submit.main(dry) == 2
    said = capsys.readouterr()
    assert re.search(r"  a trainer rank needs about \d+\.\d MiB", said.out)
    assert "  partition big (train) and small (sample), account me, qos the site's default" in said.out
    assert said.out.endswith("\n  there is no sbatch here: submit it on a login node of the cluster\n")
    data, memory = said.err.splitlines()
    assert data.startswith("prl-submit: error: domains[0].options.paths = ")
    assert "cluster.gpu_memory_gib = 0.001: a trainer rank needs about" in memory
    assert submit.main([*dry, "cluster.sbatch.constrant=x"]) == 2
    said = capsys.readouterr()
    assert "#SBATCH" not in said.out  # it would be refused as it stands
    assert "3 nodes, a heterogeneous Slurm job" in said.out
    option, data = said.err.splitlines()
    assert "cluster.sbatch.constrant: sbatch has no such option; did you mean constraint?" in option
    assert "domains[0].options.paths" in data


def test_a_machine_without_a_free_port(config, capsys, monkeypatch):
    monkeypatch.setattr(submit, "LOCAL_HOST", "192.0.2.1")  # an address that no machine has: no port can be bound on it
    assert submit.main(["c.yaml"]) == 2
    assert "no free port on 192.0.2.1: Cannot assign requested address" in capsys.readouterr().err
    assert submit.main(["c.yaml", "--nodes", "2", "--dry-run"]) == 0
    assert files(config) == ["c.yaml"]


@pytest.mark.parametrize("arguments", [["c.yaml", "--nodes", "3", "--dry-run"], ["--options"]])
def test_a_reader_of_a_listing_that_has_read_enough_is_no_error(config, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-u", "-m", "prl.cli.submit", *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_lists_every_key_with_help_and_default(capsys):
    assert submit.main(["--options"]) == 0
    out = capsys.readouterr().out
    assert "  train.learning_rate = 1e-06\n      AdamW's learning rate after the warm-up [at least 0]\n" in out
    assert (
        "  cluster.nodes = null\n      nodes in all; null: this machine, without Slurm [at least 1 and below 100000]\n" in out
    )
    assert "domains[]: the tasks that are trained on\n  domains[].name = (must be given)\n" in out
    assert "[pipeline | conventional]" in out
