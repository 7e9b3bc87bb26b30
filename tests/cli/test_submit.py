import configparser
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from prl.cli import plan, submit
from prl.domains import registry
from prl.metrics import names
from prl.metrics.events import MetricsWriter
from prl.runfolder.manifest import Manifest, part_of, write_manifest
from prl.runfolder.paths import RunFolder

CONFIG = """
run: {name: one, steps: 20}
model: {init: random, architecture: qwen2}
domains: [{name: digits}]
train: {tensor_parallel: 2}
sample: {dtype: float32, max_model_len: 64, kv_cache_mib: 64}
actor: {max_tokens: 5}
verifier: {processes: 0}
"""
ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "megatron", "transformers")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    Path("../rows.jsonl").write_text('{"problem": "Two and two?", "answer": 4}\n')
    return tmp_path


def checkpoint(run, step):
    """The manifest of a checkpoint with one file; gives its path."""
    folder = RunFolder(run).checkpoint(step)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "weights").write_text("weights")
    parts = (part_of(folder, folder / "trainer" / "weights"),)
    facts = {"attempt": 1, "lineage": 0, "forks": {}, "streams": {}, "evaluations_reached": 0, "parts": parts}
    write_manifest(RunFolder(run), Manifest(step=step, dispatcher={"events": 0}, **facts))
    return RunFolder(run).manifest(step)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def with_function(name, *arguments, **options):
    program = [sys.executable, str(Path(__file__).parent / "run_submit.py"), name, *arguments]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


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
    assert submit.main([*arguments, "cluster.gpu_memory_gib=0.001"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"cluster\.gpu_memory_gib = 0\.001: a trainer rank needs about 0\.\d; raise", error)


def test_memory_that_is_not_known_is_told_and_a_nodes_own_is_compared(config, capsys):
    """The model has 124 480 parameters, whose state, 16 bytes each in the host's memory, is split over 4 ranks; a checkpoint is
    written from a copy of 14 bytes each: 0.00348 GiB."""
    offload = ["train.tensor_parallel=1", "train.dtype=bfloat16", "train.distributed_optimizer=true", "sample.dtype=bfloat16"]
    offload += ["train.optimizer_offload=true", "cluster.gpus_per_node=4"]
    arguments = ["c.yaml", "--nodes", "2", "--dry-run", "--set", *offload]
    assert submit.main(arguments) == 0
    error = capsys.readouterr().err
    assert re.search(r"warning: cluster\.gpu_memory_gib = null: whether an accelerator holds the \d+\.\d GiB that a", error)
    assert submit.main([*arguments, "cluster.gpu_memory_gib=80", "cluster.memory_per_node_gib=0.0035"]) == 0
    assert capsys.readouterr().err == ""
    assert submit.main([*arguments, "cluster.gpu_memory_gib=80", "cluster.memory_per_node_gib=0.0034"]) == 2
    error = capsys.readouterr().err
    assert "cluster.memory_per_node_gib = 0.0034: a node's 4 trainer ranks need about 3.6 MiB, with train.opt" in error
    assert ", 1.7 MiB of it for the copy that a checkpoint is written from" in error
    on_cpus = ["c.yaml", "--nodes", "2", "--dry-run", "--set", "cluster.memory_per_node_gib=0.001"]
    assert submit.main(on_cpus) == 2
    assert "cluster.memory_per_node_gib = 0.001: a node's 2 trainer ranks need about " in capsys.readouterr().err


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
        (["c.yaml", "--set", "cluster.replicas_per_node=1000000000"], "cluster.replicas_per_node = 1000000000: must be below"),
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


def test_slurm_without_a_controller_is_an_error_and_writes_nothing(config, capsys, monkeypatch):
    (config / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\n"
        "NodeName=n1\nPartitionName=p Nodes=n1\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(config / "slurm.conf"))
    assert submit.main(["c.yaml", "--nodes", "2"]) == 2
    assert re.search(
        "asks for 2 Slurm nodes, but (no Slurm controller answers|scontrol: no such program)", capsys.readouterr().err
    )
    assert files(config) == ["c.yaml", "slurm.conf"]


def test_a_dry_run_without_model_and_data_shows_the_plan_and_says_which_keys_to_set(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    qwen = [str(ROOT / "configs" / "qwen7b.yaml"), "--dry-run"]
    assert submit.main(qwen) == 2
    said = capsys.readouterr()
    assert "8 nodes, a heterogeneous Slurm job" in said.out
    keys = ["model.path", "domains[0].options.paths", "domains[0].options.evaluate_paths"]
    assert [line.split()[2] for line in said.err.splitlines()] == keys
    (tmp_path / "here.jsonl").write_text('{"problem": "Two and two?", "answer": 4}\n')
    submit.main([*qwen, "--set", *(f"{key}=[here.jsonl]" for key in keys[1:])])  # the keys as they were spelt
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prl-submit: error: model.path = ")
    assert files(tmp_path) == ["here.jsonl"]


def test_a_machine_without_a_free_port(config, capsys, monkeypatch):
    monkeypatch.setattr(submit, "LOCAL_HOST", "192.0.2.1")  # an address that no machine has: no port can be bound on it
    assert submit.main(["c.yaml"]) == 2
    assert "no free port on 192.0.2.1: Cannot assign requested address" in capsys.readouterr().err
    assert submit.main(["c.yaml", "--nodes", "2", "--dry-run"]) == 0
    assert files(config) == ["c.yaml"]


def test_a_bad_sbatch_option_writes_nothing(config, capsys):
    assert submit.main(["c.yaml", "--nodes", "2", "--set", "cluster.sbatch.array=1-3"]) == 2
    assert "cluster.sbatch.array: is set by prl-submit" in capsys.readouterr().err
    assert files(config) == ["c.yaml"]


def test_a_run_whose_reader_is_gone_is_ended(config):
    process = with_function("wait_for_term", "c.yaml")
    started, end = config / "runs/one/started", time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.stdout.close()
    with MetricsWriter(config / "runs/one/metrics", "orchestrator", 0, 1) as writer:
        writer.write({}, step=1, kind=names.STEP)
    assert process.wait(30) == 1
    assert (config / "runs/one/ended in order").exists()


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
    (run / "model/config.json").write_text("{")
    assert submit.main(["--resume", "runs/one", "--dry-run"]) == 2
    assert f"{where} ({run}/model/config.json cannot be read: " in capsys.readouterr().err
    (run / "model").rename(config / "away")
    assert submit.main(["--resume", "runs/one"]) == 2
    assert f"{where} (has no config.json; " in capsys.readouterr().err
    assert not (run / "attempt_002").exists()


def test_a_local_run_that_fails_ends_with_its_cause_and_a_code(config):
    process = with_function("fail", "c.yaml")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "the run failed" in out
    assert "ValueError: the cause of it all" in out
    said = json.loads((config / "runs/one/attempt_001/exit.json").read_text())
    assert (said["outcome"], said["cause"], said["code"]) == ("failed", "ValueError: the cause of it all", 1)
    second = with_function("fail", "c.yaml")
    assert "already holds another run, which has no checkpoint to go on from" in second.communicate(timeout=60)[0]
    assert second.returncode == 2


def processes_of(run):
    """By the environment alone, whatever they are."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] if process.environ().get("PRL_RUN") == str(run) else []
        except psutil.Error:
            continue
    return found


def wait_for(path, process):
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


def test_an_output_that_takes_nothing_is_an_error_before_anything_is_written(config):
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, str(Path(__file__).parent / "run_submit.py"), "wait_for_term", "c.yaml"]
    for stream in (writing, os.open("/dev/full", os.O_WRONLY)):
        done = subprocess.run(program, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert re.fullmatch("prl-submit: error: .*(Broken pipe|No space left on device)\n", done.stderr)
        assert files(config) == ["c.yaml"]
        os.close(stream)


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


@pytest.mark.parametrize("made_before", [False, True])
def test_a_copy_of_the_code_that_fails_is_told_in_one_line_and_leaves_nothing(config, made_before):
    if made_before:
        (config / "runs/one").mkdir(parents=True)
    process = with_function("tell", "c.yaml", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000)))
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert re.search(
        r"^prl-submit: error: the code cannot be copied to \S+/code.new/\S+: .*File too large.* MiB are free", out, re.MULTILINE
    )
    assert "Traceback" not in out
    assert files(config) == (["c.yaml", "runs", "runs/one"] if made_before else ["c.yaml", "runs"])
    assert with_function("fail", "c.yaml").wait(60) == 1  # the folder can be used


@pytest.mark.parametrize("seen", ["code", "attempt_001/submitit", "attempt_001/submission.json", "metrics/submit-0.jsonl"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_job_is_started_leaves_nothing_running(config, number, seen):
    process = with_function(
        "wait_for_term",
        *("c.yaml", "--set", "control.stop_s=2"),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests that run under nohup ignore SIGHUP
    )
    run = config / "runs/one"
    wait_for(run / seen, process)
    process.send_signal(number)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130, out
    assert "cancelled" in out
    assert "Traceback" not in out
    assert processes_of(run) == []
    if run.exists():
        assert json.loads((run / "attempt_001/exit.json").read_text())["outcome"] == "cancelled"


def test_a_killed_controller_is_told_and_what_it_left_is_ended(config):
    process = with_function("wait_for_term", "c.yaml", start_new_session=True)
    run = config / "runs/one"
    wait_for(run / "started", process)
    os.kill(int(json.loads((run / "attempt_001/submission.json").read_text())["job_id"]), signal.SIGKILL)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "COMPLETED" not in out
    assert re.search("it left [1-9] processes, which were ended", out)
    assert "the run failed" in out
    assert processes_of(run) == []
    assert (run / "ended in order").exists()
    said = json.loads((run / "attempt_001/exit.json").read_text())
    assert (said["outcome"], said["role"], said["steps"]) == ("failed", None, 0)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_run_in_order(config, number):
    process = with_function("wait_for_term", "c.yaml", start_new_session=True)
    started, end = config / "runs/one/started", time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, number)  # what a terminal does
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert "Ctrl-C: ending the run" in out if number == signal.SIGINT else "SIGTERM: ending the run" in out
    assert f"cancelled\nrun folder: {config}/runs/one\n" in out
    assert "go on with" not in out  # there is no checkpoint
    assert (config / "runs/one/ended in order").exists()


@pytest.mark.slurm
def test_slurm_returns_after_submission_with_what_to_do_next(config):
    process = with_function("tell", "c.yaml", "--nodes", "3", "--set", "cluster.time_min=2")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    job = re.search(r"job (\d+) submitted", out)[1]
    assert f"scancel {job}" in out
    record = json.loads((config / "runs/one/attempt_001/submission.json").read_text())
    assert (record["kind"], record["job_id"], record["nodes"]) == ("het", job, [1, 2])
    results = [config / f"runs/one/attempt_001/submitit/{job}_{task}_result.pkl" for task in range(3)]
    end = time.monotonic() + 60
    while not all(path.exists() for path in results):
        assert time.monotonic() < end, (config / "runs/one/attempt_001/logs/batch.log").read_text()
        time.sleep(0.1)


@pytest.mark.slurm
def test_slurm_with_wait_follows_the_job(config):
    process = with_function("fail", "c.yaml", "--nodes", "2", "--wait", "--set", "cluster.time_min=2")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert re.search(r"the run failed \(job \d+ is FAILED\): ValueError: the cause of it all", out)


@pytest.mark.slurm
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_batch_script_that_fails_is_told(config, nodes):
    overrides = ["cluster.time_min=2", 'cluster.setup=["false"]']
    process = with_function("tell", "c.yaml", "--nodes", nodes, "--wait", "--set", *overrides)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert re.search(
        r"the run failed \(job \d+ is FAILED\): the job ended before its first process began; its batch script", out
    )
    assert re.search(r"\nbatch script: line \d+ ended with code 1: false\nlogs: ", out)


def test_options_lists_every_key_with_help_and_default(capsys):
    assert submit.main(["--options"]) == 0
    out = capsys.readouterr().out
    assert "  train.learning_rate = 1e-06\n      AdamW's learning rate after the warm-up [at least 0]\n" in out
    assert "  cluster.nodes = null\n      nodes in all; null: this machine, without Slurm [at least 1]\n" in out
    assert "domains[]: the tasks that are trained on\n  domains[].name = (must be given)\n" in out
    assert "[pipeline | conventional]" in out


def test_commands_to_go_on_with_can_be_copied(tmp_path, capsys):
    run = tmp_path / "my run"
    submit._leave(SimpleNamespace(job_id="7", attempt=1, run=RunFolder(run)))
    words = [shlex.split(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert words[1][:2] == ["prl-report", str(run)]
    assert words[2] == ["tail", "-F", f"{run}/attempt_001/logs/*.log"]
    assert words[3][:2] == ["touch", str(RunFolder(run).stop)]


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
        ("cluster.replicas_per_node=1000000000", "cluster.replicas_per_node = 1000000000: must be below 10000"),
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
    assert said.err.startswith(f"prl-plan: error: {words}")
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


@pytest.mark.parametrize("command", ["submit", "plan", "report"])
def test_ctrl_c_while_a_command_is_still_being_imported(config, command):
    """Its import stands still at a module that waits."""
    (config / "slow" / "argparse.py").parent.mkdir()
    (config / "slow" / "argparse.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    program = [sys.executable, "-c", f"import sys; from prl.cli import start; sys.exit(start.{command}())"]
    process = subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{config / 'slow'}:{ROOT}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == -signal.SIGINT


def test_the_commands_start_where_ctrl_c_is_taken():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    scripts = settings["options.entry_points"]["console_scripts"].split("\n")[1:]
    assert scripts == [f"prl-{name} = prl.cli.start:{name}" for name in ("submit", "report", "plan")]


def test_a_login_node_never_imports_the_engines(config):
    code = (
        "import sys; from prl.cli.submit import main; code = main(['c.yaml', '--nodes', '3', '--dry-run']);"
        "import prl.orchestrator.agent;"  # what a submission imports besides
        f"print(code, [m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "0 []\n"
