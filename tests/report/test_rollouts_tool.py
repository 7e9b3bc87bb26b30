"""tools/rollouts.py on a run that was played: what it prints, filters and exports."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from played_run import answer, play
from tokenizers import Tokenizer

from prl.flow.ids import Lease
from prl.flow.versions import Version
from prl.runfolder.paths import RunFolder
from prl.streams.files import Header, publish_arrow
from prl.streams.records import Group, Rollout, Turn, VersionSpan
from prl.streams.rollouts import to_arrow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return play(tmp_path_factory.mktemp("tool") / "run", [70])


def rollouts(run, *arguments) -> str:
    program = [sys.executable, "tools/rollouts.py", str(run), *map(str, arguments)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(run, *arguments) -> list[dict]:
    return [json.loads(line) for line in rollouts(run, "--format", "jsonl", *arguments).splitlines()]


@pytest.fixture(scope="module")
def every(run):
    return rows(run)


def test_text_to_read(run):
    text = rollouts(run, "--limit", 2)
    assert text.count("--- digits/") == 2
    assert "trained in step" in text
    assert "versions 0:0" in text


def test_all_of_them_with_their_ends(every):
    trained = [row for row in every if row["step"] is not None]
    assert len(trained) == 8 * 6
    assert {row["end"] for row in every} == {"trained", "discarded: all rewards equal", "issued again: attempt ended"}
    assert all((row["prompt_tokens"], row["output_tokens"], row["logprob_mean"]) == (2, 3, -0.5) for row in every)
    ids = [(row["group"], row["issue"], row["rollout"]) for row in every]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        (("--step", "3"), lambda row: row["step"] == 3),
        (("--step", "3-5"), lambda row: row["step"] in (3, 4, 5)),
        (("--min-reward", 1), lambda row: row["reward"] == 1),
        (("--max-reward", 0.5), lambda row: row["reward"] == 0),
        (("--version", "0:1"), lambda row: "0:1" in row["versions"].split()),
        (("--finish", "stop", "--version", "0:2"), lambda row: row["versions"] == "0:2"),
    ],
)
def test_filters(run, every, arguments, fits):
    assert rows(run, *arguments) == [row for row in every if fits(row)]


def test_problems(run, every):
    names = [every[0]["problem"], every[-1]["problem"]]
    found = rows(run, "--problem", names[0], "--problem", names[1])
    assert found == [row for row in every if row["problem"] in names]


def test_problems_that_the_run_has_not_are_named(run, every):
    known = {row["problem"] for row in every}
    unknown = f"rollouts: {run}: has no rollout of problem foo; a problem's name is like {min(known)}\n"
    assert refused(run, "--problem", "foo") == unknown
    program = [sys.executable, "tools/rollouts.py", str(run), "--problem", "foo", "--problem", min(known)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, unknown)
    assert done.stdout.count(f"--- {min(known)} ") == sum(row["problem"] == min(known) for row in every)


def test_parquet_holds_the_same(run, every, tmp_path):
    rollouts(run, "--output", tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert [{**row, "metrics": dict(row["metrics"])} for row in table.to_pylist()] == every


def refused(folder: Path, *arguments) -> str:
    program = [sys.executable, "tools/rollouts.py", str(folder), *map(str, arguments)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert not done.stdout
    return done.stderr


def test_no_run(tmp_path):
    assert "no run lies there" in refused(tmp_path)
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams/rollouts").symlink_to("rollouts")  # a folder that nobody can look at
    assert refused(tmp_path) == f"rollouts: {tmp_path}/streams/rollouts: Too many levels of symbolic links\n"


def test_what_matches_nothing_or_cannot_be_written_is_told(run, tmp_path):
    nothing = f"rollouts: {run}: none of its rollouts is as asked for; leave out some of the filters\n"
    assert refused(run, "--problem", "digits/1", "--max-reward", -1) == nothing
    assert refused(run, "--finish", "length", "--output", tmp_path / "x.parquet") == nothing
    assert not (tmp_path / "x.parquet").exists()
    for name in ("x.parquet", "x.jsonl"):
        output = tmp_path / "absent" / name
        assert refused(run, "--output", output) == f"rollouts: {output} cannot be written: No such file or directory\n"
    shutil.copytree(run.path, tmp_path / "run")
    (tmp_path / "run/model/tokenizer.json").write_text("{")
    assert "model/tokenizer.json: cannot be read, and texts need it: " in refused(tmp_path / "run")


def test_a_damaged_ledger_is_told(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    ledger = min(RunFolder(tmp_path / "run").ledgers.rglob("*.frames"))
    data = bytearray(ledger.read_bytes())
    data[60] ^= 1
    ledger.write_bytes(data)
    words = refused(tmp_path / "run")
    assert words.startswith(f"rollouts: {ledger}: damaged at byte 0")
    assert words.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--step", "12-10", "12-10: the first step comes first, 10-12"),
        ("--step", "-3", ": must be a whole number of at least 1"),
        ("--step", "3-", ": must be a whole number of at least 1"),
        ("--step", "0-2", "0: must be a whole number of at least 1"),
        ("--min-reward", "nan", "nan: must be a number"),
        ("--max-reward", "high", "high: must be a number"),
        ("--max-reward", "0.5", "--min-reward 1 is above --max-reward 0.5: no reward is both"),
        ("--version", "x", "x: a version is LINEAGE:STEP"),
        ("--limit", "-1", "-1: must be a whole number of at least 1"),
    ],
)
def test_filters_that_fit_nothing_are_refused(run, option, value, words):
    program = [sys.executable, "tools/rollouts.py", str(run), "--min-reward=1", f"{option}={value}"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_what_is_no_number_is_null_and_what_is_no_token_has_no_text(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    copy = RunFolder(tmp_path / "run")
    first, last = Tokenizer.from_file(str(copy.model / "tokenizer.json")).encode("AB").ids
    ids, versions = np.array([first, 2**31 - 1, last], np.int32), (VersionSpan(Version(0, 0), 0, 3),)
    turn = Turn(ids, ids, np.full(3, -0.5, np.float32), versions, "stop", 0, 1.0, 2.0)
    group = Group(0, "digits", "", "digits/1", 500, 0, (Rollout((turn,), 1.0, {"score": float("nan"), "other": 2.0}),))
    header = Header("rollouts", "played", 1, "x", 0)
    (copy.rollouts / "x").mkdir()
    publish_arrow(copy.rollouts / "x", "rollouts", header, to_arrow([group], header))
    text = rollouts(copy, "--format", "jsonl", "--problem", "digits/1")
    (row,) = [row for row in map(strictly, text.splitlines()) if row["group"] == 500]
    assert row["metrics"] == {"score": None, "other": 2.0}
    assert row["logprob_mean"] == -0.5
    assert row["prompt"] == row["output"] == "AB"


def test_names_do_not_move_the_readers_terminal(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    copy = RunFolder(tmp_path / "run")
    ids, versions = np.array([1], np.int32), (VersionSpan(Version(0, 0), 0, 1),)
    turn = Turn(ids, ids, np.full(1, -0.5, np.float32), versions, "stop\x1b[2J", 0, 1.0, 2.0)
    group = Group(0, "digits", "", "digits/1\n--- \x1b]0;x\x07", 500, 0, (Rollout((turn,), 1.0),))
    header = Header("rollouts", "played", 1, "x", 0)
    (copy.rollouts / "x").mkdir()
    publish_arrow(copy.rollouts / "x", "rollouts", header, to_arrow([group], header))
    text = rollouts(copy, "--min-reward", 1)
    assert r"--- digits/1\n--- \x1b]0;x\x07 group 500" in text
    assert r"stop\x1b[2J, versions 0:0, no end yet" in text
    assert not {"\x1b", "\x07"} & set(text)


def strictly(line: str) -> dict:
    def no_number(name):
        raise ValueError(name)

    return json.loads(line, parse_constant=no_number)


def test_rollouts_that_went_through_redis_are_not_there(tmp_path):
    (tmp_path / "streams" / "rollouts").mkdir(parents=True)
    assert "no run lies there (no " in refused(tmp_path)  # nor can be said how anything ended
    (tmp_path / "streams" / "ledger").mkdir()
    assert "has no rollout files: no rollout was published yet, or they went through Redis" in refused(tmp_path)


def test_what_is_no_file_of_the_stream_is_passed_over(run, every, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    (tmp_path / "run" / "streams" / "rollouts" / "notes.txt").write_text("mine")
    assert rows(tmp_path / "run") == every
    foreign = tmp_path / "run" / "streams" / "rollouts" / "actor-9"
    foreign.mkdir()
    header = Header("rollouts", "another", 1, "actor-9", 0)
    group = answer(Lease("train", "digits", 1, 0, 0, 0, 3), Version(0, 0))  # of a number that this run has, too
    publish_arrow(foreign, "rollouts", header, to_arrow([group], header))
    assert rows(tmp_path / "run") == every
