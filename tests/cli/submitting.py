"""What the tests of prl-submit share: a small configuration, the command with another function than an agent, its traces."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

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


def processes_of(run):
    """By the environment alone, whatever they are."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] if process.environ().get("PRL_RUN") == str(run) else []
        except psutil.Error:
            continue
    return found


def wait_for(path, process=None):
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
