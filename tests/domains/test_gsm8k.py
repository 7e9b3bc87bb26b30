import asyncio
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from prl.domains import gsm8k
from prl.domains.api import Context, DomainError
from prl.flow.versions import Version
from prl.streams.records import Rollout, Turn, VersionSpan
from prl.verifier.pool import Pool

DATA = Path(__file__).parents[2] / "../shared/data"
ROWS = {"gsm8k_train": 7473, "gsm8k_test": 1319, "math500": 500, "math_train": 7470}
HERE = [name for name in ROWS if (DATA / f"{name}.parquet").exists()]  # real files beside the checkout, if there are any
SOLUTION = "There are {a} boxes of {b}, so {a} * {b} = <<{a}*{b}={c}>>{c} pieces.\n#### {c}"


@pytest.fixture
def questions(tmp_path):
    rows = [
        {"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"},
        {"question": "A thousand?", "answer": "#### 1,000"},
        {"question": "Half of {7}?", "answer": r"We get \boxed{\frac{7}{2}}"},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def load(path, split="train", **options):
    return gsm8k.load_problems({"paths": [str(path)], **options}, split, seed=1)


def test_problems_of_jsonl(questions):
    problems = load(questions, template="Q: {problem} \\boxed{}", system="Be brief.")
    assert [p.data["gold"] for p in problems] == ["4", "1,000", r"\frac{7}{2}"]
    assert problems[2].data["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": r"Q: Half of {7}? \boxed{}"},
    ]
    assert {p.dataset for p in problems} == {"questions"}


def test_problems_of_parquet_and_gzip(tmp_path, questions):
    table = pa.table({"id": ["a"], "problem": ["One?"], "answer": ["1"], "source": ["here"]})
    pyarrow.parquet.write_table(table, tmp_path / "one.parquet", compression="zstd")
    with gzip.open(tmp_path / "zipped.jsonl.gz", "wt") as file:
        file.write(questions.read_text())
    problems = load(tmp_path / "one.parquet", paths=[str(tmp_path / "one.parquet"), str(tmp_path / "zipped.jsonl.gz")], limit=3)
    assert [p.data["gold"] for p in problems] == ["1", "4", "1,000"]
    assert [p.dataset for p in problems] == ["one", "zipped", "zipped"]


def test_evaluation_comes_from_its_own_files(tmp_path, questions):
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"problem": "Three?", "answer": 3}))
    assert load(questions, "evaluate") == []
    problems = load(questions, "evaluate", evaluate_paths=str(tmp_path / "held_out.jsonl"))
    assert [p.data["gold"] for p in problems] == ["3"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"paths": []}, "names no file"),
        ({"paths": ["no/such.parquet"]}, "there is no file .*/no/such.parquet"),
        ({"path": ["x"]}, "no option path; did you mean paths"),
        ({"paths": 3}, "option paths: expected a text or a list"),
        ({"template": "no question"}, "must contain {problem}"),
        ({"limit": "3"}, "option limit: expected int"),
        ({"rewards": {"right": 1.0}}, "unknown key right; known: correct"),
        ({"rewards": {"correct": "yes"}}, "option rewards.correct: expected float"),
    ],
)
def test_bad_options(questions, options, words):
    with pytest.raises(DomainError, match=words):
        gsm8k.check_options({"paths": [str(questions)], **options})


def cut_gzip(rows):
    return gzip.compress("".join(f'{{"problem": "{n}", "answer": {n}}}\n' for n in range(rows)).encode())[:-20]


BAD_FILES = [
    (
        "a.jsonl",
        b'{"question": "x"}\n',
        "a.jsonl, row 0: expected the columns problem .or question. and answer; found question",
    ),
    ("b.jsonl", b"{", "b.jsonl: not readable as .jsonl"),
    ("c.parquet", b"PAR", "c.parquet: not readable as .parquet"),
    ("d.md", b"x", "d.md: expected a file ending in .parquet, .jsonl or .jsonl.gz"),
    ("e.jsonl", b'{"problem": "x", "answer": " "}', "the answer is empty"),
    ("f.jsonl", b'{"problem": 3, "answer": 1}', "row 0: expected the columns"),
    ("g.jsonl", b"\n[1, 2]\n", "g.jsonl: not readable as .jsonl: line 2 is no object"),
    ("h.jsonl.gz", b"no gzip", "h.jsonl.gz: not readable as .gz: Not a gzipped file"),
    ("i.jsonl.gz", cut_gzip(1), "i.jsonl.gz: not readable as .gz: Compressed file ended"),
    ("j.jsonl", b"\xff\xfe", "j.jsonl: not readable as .jsonl: 'utf-8'"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES)
def test_bad_files_are_refused_before_a_run_and_when_they_are_read(tmp_path, questions, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DomainError, match=words):
        load(tmp_path / name)
    for options in ({"paths": [str(questions), str(tmp_path / name)]}, {"evaluate_paths": str(tmp_path / name)}):
        with pytest.raises(DomainError, match=words):
            gsm8k.check_options({"paths": [str(questions)], **options})


def test_files_without_rows_and_columns_of_parquet_are_checked_before_a_run(tmp_path, questions):
    pyarrow.parquet.write_table(
        pa.table({"problem": pa.array([], pa.string()), "answer": ["1"][:0]}), tmp_path / "none.parquet"
    )
    pyarrow.parquet.write_table(pa.table({"prompt": ["x"], "answer": ["1"]}), tmp_path / "other.parquet")
    (tmp_path / "none.jsonl").write_text("\n\n")
    for name, words in (
        ("none.parquet", "none.parquet: has no rows; give a file with problems, or leave it out"),
        ("none.jsonl", "none.jsonl: has no rows"),
        ("other.parquet", "other.parquet, row 0: expected the columns .*; found prompt, answer"),
    ):
        with pytest.raises(DomainError, match=words):
            gsm8k.check_options({"paths": [str(questions), str(tmp_path / name)]})


def test_damage_behind_the_first_row_is_told_when_it_is_read(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(cut_gzip(10_000))
    gsm8k.check_options({"paths": [str(tmp_path / "cut.jsonl.gz")]})
    with pytest.raises(DomainError, match=r"cut.jsonl.gz: not readable as .gz: Compressed file ended"):
        load(tmp_path / "cut.jsonl.gz")


class Letters:
    """A tokenizer of code points."""

    end_ids = (0,)

    def encode(self, text):
        return tuple(map(ord, text))

    def decode(self, ids):
        return "".join(map(chr, ids))

    def chat(self, messages):
        return self.encode(messages[-1]["content"])


@dataclass
class PoolAsVerifier:
    """The real pool without the service in front of it."""

    pool: Pool

    async def check(self, rule, gold, answers):
        return [await self.pool.check(rule, gold, answer) for answer in answers]


def rollout_of(text, finish_reason="stop"):
    ids = np.array(Letters().encode(text), np.int32)
    spans = (VersionSpan(Version(0, 0), 0, len(ids)),)
    turn = Turn(np.array([1], np.int32), ids, np.full(len(ids), -1.0, np.float32), spans, finish_reason, 0, 0.0, 1.0)
    return Rollout((turn,), reward=0.0)


async def score(problems, rollouts):
    async with Pool(1, check_s=20, memory_mib=4096) as pool:
        context = Context(Letters(), PoolAsVerifier(pool))
        return [await gsm8k.score_group(problem, rollouts, context) for problem in problems]


def test_rewards_by_verdict(questions):
    tables = {
        "rewards": {"correct": 1, "wrong": -0.5, "no_answer": -1.0, "unparsable": -0.75},
        "rewards_cut": {"correct": 0.25, "wrong": -0.6, "no_answer": -2.0},
    }
    problem = load(questions, **tables)[1]
    texts = [
        (r"\boxed{1000}", "stop"),
        ("#### 1000.0", "stop"),
        (r"\boxed{999}", "stop"),
        ("a thousand", "stop"),
        (r"\boxed{+++}", "stop"),
        (r"\boxed{1000} and", "length"),
        (r"\boxed{999} and", "length"),
        ("well", "length"),
    ]
    (scored,) = asyncio.run(score([problem], [rollout_of(*text) for text in texts]))
    verdicts = ["correct", "correct", "wrong", "no_answer", "unparsable", "correct", "wrong", "no_answer"]
    assert [r.reward for r in scored] == [1.0, 1.0, -0.5, -1.0, -0.75, 0.25, -0.6, -2.0]
    assert [dict(r.metrics) for r in scored] == [{f"verdict/{verdict}": 1.0} for verdict in verdicts]
    assert [Letters().decode(r.turns[0].output_ids) for r in scored] == [text for text, _ in texts]


def test_needs_a_verifier(questions):
    problem = load(questions)[0]
    with pytest.raises(DomainError, match="needs a verifier"):
        asyncio.run(gsm8k.score_group(problem, [rollout_of("x")], Context(Letters(), None)))


@pytest.fixture
def data(tmp_path):
    """The parquet file of a name: a real one, or one in GSM8K's form that is written here."""
    numbers = [{"a": a, "b": b, "c": a * b} for a in range(2, 7) for b in (3, 30, 1000, 2.5)]
    rows = [{"question": f"How many are in {n['a']} boxes of {n['b']}?", "answer": SOLUTION.format(**n)} for n in numbers]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "written.parquet")
    return lambda name: tmp_path / "written.parquet" if name == "written" else DATA / f"{name}.parquet"


@pytest.mark.parametrize("name", ["written", *HERE])
def test_whole_files(data, name):
    problems = load(data(name))
    assert len(problems) == {**ROWS, "written": 20}[name]
    assert all(p.data["gold"] for p in problems)


@pytest.mark.parametrize("name", ["written", *(name for name in HERE if name == "gsm8k_test")])
def test_gold_answers_verify_themselves(data, name):
    """The gold answer written in another way is right, another number is wrong."""
    problems = load(data(name), limit=20)

    async def verdicts():
        async with Pool(1, check_s=20, memory_mib=4096) as pool:
            for problem in problems:
                gold = problem.data["gold"]
                assert await pool.check("math", gold, f"\\boxed{{\\frac{{{2 * float(gold)}}}{{2}}}}") == "correct"
                assert await pool.check("math", gold, f"\\boxed{{{float(gold) + 1}}}") == "wrong"

    asyncio.run(verdicts())
