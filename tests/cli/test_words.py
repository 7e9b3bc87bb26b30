"""What the commands say where the system refuses something: one line with what, where and what to do."""

import os

import pytest
from unprivileged import unprivileged

from prl.cli import plan, report, submit
from prl.runfolder.paths import RunFolder

CONFIG = """
run: {name: one, steps: 20}
model: {init: random, architecture: qwen2}
domains: [{name: digits}]
sample: {dtype: float32, max_model_len: 64, kv_cache_mib: 64}
actor: {max_tokens: 5}
verifier: {processes: 0}
"""
COMMANDS = {"prl-submit": submit.main, "prl-plan": plan.main, "prl-report": report.main}


def told(command, arguments, capsys):
    """The only line on stderr."""
    assert COMMANDS[command](arguments) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{command}: error: ")
    return line.removeprefix(f"{command}: error: ")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("prl-submit", ["a.yaml"]),
        ("prl-submit", ["--resume", "."]),
        ("prl-plan", ["a.yaml"]),
        ("prl-report", ["."]),
        ("prl-report", [".", "--audit"]),
    ],
)
def test_a_current_folder_that_was_deleted(tmp_path, monkeypatch, capsys, command, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    os.rmdir("../gone")
    assert told(command, arguments, capsys) == "the current folder does not exist any more; change to one that does"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("prl-submit", ["a\nb"]),
        ("prl-submit", ["--resume", "a\nb"]),
        ("prl-submit", ["c.yaml", "--dry-run", "--replay", "a\nb"]),
        ("prl-submit", ["c.yaml", "--dry-run", "--set", 'run.folder="a\\nb"']),
        ("prl-plan", ["a\nb"]),
        ("prl-report", ["a\nb"]),
        ("prl-report", ["a\nb", "--audit"]),
    ],
)
def test_a_name_with_a_line_end(tmp_path, monkeypatch, capsys, command, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    assert "a\\nb" in told(command, arguments, capsys)


def test_a_run_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    """Root may write /proc, say its permissions; it takes no folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    line = told("prl-submit", ["c.yaml", "--set", "run.folder=/proc/one"], capsys)
    assert line.startswith("run.folder = /proc/one: ")
    assert "Errno" not in line
    assert line.split("; ")[-1].startswith("choose another run.folder or run.name")


def test_what_may_not_be_read_is_told_with_what_to_do(tmp_path, capsys):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.config.write_text("run: {name: one}\n")
    run.metrics.joinpath("a.jsonl").touch(0)
    for path in (run.path, run.metrics):
        path.chmod(0o755)
    with unprivileged(tmp_path):
        line = told("prl-report", [str(run)], capsys)
    assert line == f"{run.metrics}/a.jsonl: Permission denied; have its owner permit it (chmod), or name another"
