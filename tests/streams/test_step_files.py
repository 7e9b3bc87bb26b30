"""Step files: round trip, dealing to ranks, discovery."""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest

from prl.flow.ids import RolloutId
from prl.streams.files import StreamError, StreamFile, next_sequence, publish_arrow
from prl.streams.parts import encode_parts
from prl.streams.records import MicroBatch, StepFacts
from prl.streams.steps import SCHEMA, find_steps, read_step, write_step


def make_microbatch(rng: np.random.Generator, lengths: list[int], first: int, reference: bool = False) -> MicroBatch:
    tokens = sum(lengths)
    floats = [rng.normal(size=tokens).astype(np.float32) for _ in range(4)]
    return MicroBatch(
        tokens=rng.integers(0, 99, tokens).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        boundaries=np.cumsum([0, *lengths]).astype(np.int32),
        loss_weights=floats[0],
        advantages=floats[1],
        old_logprobs=floats[2],
        reference_logprobs=floats[3] if reference else None,
        lags=rng.integers(-1, 3, tokens).astype(np.int32),
        rollouts=tuple(RolloutId(0, f"d/{first + i}", first + i, i % 3, 0) for i in range(len(lengths))),
    )


def make_step(rng: np.random.Generator, step: int, count: int, reference: bool = False) -> tuple[list[MicroBatch], StepFacts]:
    made = [make_microbatch(rng, rng.integers(1, 30, 1 + i % 4).tolist(), 10 * i, reference) for i in range(count)]
    return made, StepFacts(step, 12.5, 77, 40, count)


def assert_same(a: MicroBatch, b: MicroBatch) -> None:
    for name in MicroBatch.__slots__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(y, np.ndarray):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        else:
            assert x == y


@pytest.mark.parametrize("reference", [False, True])
def test_round_trip(tmp_path, reference):
    made, facts = make_step(np.random.default_rng(0), 7, 5, reference)
    published = write_step(tmp_path, made, facts, run="run", attempt=2, sequence=3)
    file = read_step(published.path, published.bytes, published.checksum, run="run")
    assert file.facts == facts
    assert (file.header.attempt, file.header.sequence) == (2, 3)
    for number, microbatch in enumerate(made):
        assert_same(file.microbatch(number), microbatch)
        assert not file.microbatch(number).tokens.flags.owndata
    assert file.rollout_ids() == sorted({i for m in made for i in m.rollouts})


def test_the_figures_of_a_step_are_read_back(tmp_path):
    made, facts = make_step(np.random.default_rng(0), 7, 2)
    metrics = {"reward_mean": 0.1, "rollouts": 16, "reward_std": float("nan")}
    file = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=0, metrics=metrics)
    assert read_step(file.path, file.bytes, file.checksum).metrics == {"reward_mean": 0.1, "rollouts": 16.0}
    file = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=1)
    assert read_step(file.path, file.bytes, file.checksum).metrics == {}


NAMES = [{"a/b": 1.0}, {"": 1.0}, {"A": 1.0}, {"a" * 65: 1.0}, {f"a{n}": 1.0 for n in range(2000)}]
TEXTS = ["{", "[]", "[" * 9999, '{"a": NaN}', '{"a": 1e999}', '{"a": "1"}', '{"a": true}', f'{{"a": 1{"0" * 400}}}']


@pytest.mark.parametrize("metrics", [*NAMES, *TEXTS], ids=lambda metrics: str(metrics)[:20])
def test_other_figures_are_refused(tmp_path, monkeypatch, metrics):
    made, facts = make_step(np.random.default_rng(0), 7, 2)
    if isinstance(metrics, str):
        dumped = json.dumps
        monkeypatch.setattr(json, "dumps", lambda value: metrics if value == {"put": 1.0} else dumped(value))
    given = {"put": 1.0} if isinstance(metrics, str) else metrics
    file = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=0, metrics=given)
    with pytest.raises(StreamError, match="its header's metrics are no"):
        read_step(file.path, file.bytes, file.checksum)


def test_any_number_of_ranks_deals_the_same_micro_batches(tmp_path):
    made, facts = make_step(np.random.default_rng(1), 1, 8)
    published = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=0)
    file = read_step(published.path, published.bytes, published.checksum)
    for ranks in (1, 2, 4, 8):
        dealt = file.deal(ranks)
        assert sorted(i for rank in dealt for i in rank) == list(range(8))
        assert {len(rank) for rank in dealt} == {8 // ranks}
    assert sorted(i for rank in file.deal(3) for i in rank) == list(range(8))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 11])
def test_each_rank_reads_what_is_dealt_to_it(tmp_path, ranks):
    """Also of a file that was made for other ranks, and where there are more of them than micro-batches."""
    made, facts = make_step(np.random.default_rng(1), 1, 8)
    file = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=0)
    dealt = read_step(file.path, file.bytes, file.checksum).deal(ranks)
    for rank in range(ranks):
        own = read_step(file.path, file.bytes, file.checksum, share=(rank, ranks))
        assert list(own.batches) == dealt[rank]
        assert own.facts == facts
        for number, found in zip(dealt[rank], own.microbatches(), strict=True):
            assert_same(found, made[number])


def bytes_read() -> int:
    """By this process, whether from a disk or from the system's memory."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_rank_reads_no_more_of_a_file_than_its_own(tmp_path):
    """32 micro-batches of 4,096 tokens in 7 columns of 4 bytes; their ids and the file's end are less than 20 KiB."""
    made = [make_microbatch(np.random.default_rng(n), [2048, 2048], 10 * n, reference=True) for n in range(32)]
    file = write_step(tmp_path, made, StepFacts(1, 1.0, 1, 64, 32), run="run", attempt=1, sequence=0)
    for ranks in (1, 8, 32):
        for rank in (0, ranks - 1):
            before = bytes_read()
            read_step(file.path, file.bytes, file.checksum, share=(rank, ranks))
            own = 4096 * 7 * 4 * 32 // ranks
            assert own < bytes_read() - before < own + 1500 * 32 // ranks + 20 * 1024


def test_a_flipped_bit_is_found_by_those_that_read_it(tmp_path):
    """The file is its head, which is for other tools, then micro-batch after micro-batch, then its end."""
    made, facts = make_step(np.random.default_rng(3), 7, 9)
    file = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=0)
    whole, ranks = file.path.read_bytes(), range(4)
    owner = {number: rank for rank, own in enumerate(read_step(file.path, file.bytes, file.checksum).deal(4)) for number in own}
    found = []
    for at in range(0, file.bytes, 97):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        file.path.write_bytes(data)
        with pytest.raises(StreamError, match=r"checksum|no Arrow file|its end would be|a footer of"):
            read_step(file.path, file.bytes, file.checksum)
        hurt = set()
        for rank in ranks:
            try:
                own = read_step(file.path, file.bytes, file.checksum, share=(rank, 4))
            except StreamError:
                hurt.add(rank)
                continue
            for number, microbatch in zip(own.batches, own.microbatches(), strict=True):
                assert_same(microbatch, made[number])
        found.append(hurt)
    expected = [set(), *({owner[number]} for number in range(9)), set(ranks)]
    assert [hurt for hurt, _ in groupby(found)] == [hurt for hurt, _ in groupby(expected)]


def test_any_tool_opens_a_step_file(tmp_path):
    made, facts = make_step(np.random.default_rng(1), 1, 3)
    file = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=0)
    table = pyarrow.dataset.dataset(file.path, format="arrow").to_table()
    assert table.column("tokens").to_pylist() == [m.tokens.tolist() for m in made]
    with pa.OSFile(str(file.path)) as opened:  # one after another, as from a pipe
        opened.seek(8)
        assert pa.ipc.open_stream(opened).read_all().equals(table)


def test_the_latest_file_of_a_step_is_found(tmp_path):
    rng = np.random.default_rng(2)
    assert find_steps(tmp_path / "nowhere") == {}
    published = []
    for attempt, step in ((1, 10), (1, 9), (1, 10), (2, 11), (2, 10)):
        made, facts = make_step(rng, step, 2)
        published.append(write_step(tmp_path, made, facts, run="run", attempt=attempt, sequence=next_sequence(tmp_path)))
    (tmp_path / ".tmp-x").write_bytes(b"torn")
    found = find_steps(tmp_path)
    assert list(found) == [9, 10, 11]
    assert {s: f.path for s, f in found.items()} == {9: published[1].path, 10: published[4].path, 11: published[3].path}
    for step, file in found.items():
        assert read_step(file.path, file.bytes, file.checksum).facts.step == step


def test_contradictions_are_refused(tmp_path):
    made, facts = make_step(np.random.default_rng(0), 7, 2)
    with pytest.raises(StreamError, match="has the facts"):
        write_step(tmp_path, made[:1], facts, run="run", attempt=1, sequence=0)
    broken = MicroBatch(**{**{n: getattr(made[0], n) for n in MicroBatch.__slots__}, "lags": made[0].lags[:-1]})
    with pytest.raises(StreamError, match=r"micro-batch 1: .*lags"):
        write_step(tmp_path, [made[0], broken], facts, run="run", attempt=1, sequence=0)
    broken = MicroBatch(**{**{n: getattr(made[1], n) for n in MicroBatch.__slots__}, "boundaries": made[1].boundaries[:-1]})
    with pytest.raises(StreamError, match="boundaries"):
        write_step(tmp_path, [made[0], broken], facts, run="run", attempt=1, sequence=0)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_refused(tmp_path):
    made, facts = make_step(np.random.default_rng(0), 7, 2)
    published = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=0)
    data = bytearray(published.path.read_bytes())
    published.path.write_bytes(data[:-1])
    with pytest.raises(StreamError, match="announced were"):
        read_step(published.path, published.bytes, published.checksum)
    data[-200] ^= 1
    published.path.write_bytes(data)
    with pytest.raises(StreamError, match="checksum"):
        read_step(published.path, published.bytes, published.checksum)


def rewritten(folder, column: str, change) -> StreamFile:
    """A step file of which one column of the first micro-batch is another, checksum and all."""
    made, facts = make_step(np.random.default_rng(0), 7, 2)
    file = write_step(folder, made, facts, run="run", attempt=1, sequence=0)
    opened = read_step(file.path, file.bytes, file.checksum)
    batch, place = opened.batches[0], SCHEMA.names.index(column)
    values = pa.array([change(batch.column(column).to_pylist()[0])], SCHEMA.field(column).type)
    columns = [*batch.columns[:place], values, *batch.columns[place + 1 :]]
    tokens = [len(columns[0].values), len(opened.batches[1].column(0).values)]
    schema = SCHEMA.with_metadata({**pa.ipc.open_file(file.path).schema.metadata, b"prl.tokens": json.dumps(tokens)})
    batches = [pa.record_batch(found, schema=schema) for found in (columns, opened.batches[1].columns)]
    return publish_arrow(folder, "step_00000008", opened.header, encode_parts(schema, batches))


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("boundaries", lambda values: [*values[:-1], 10**9], r"boundaries \[0, .*1000000000\] of 1 sequences"),
        ("boundaries", lambda values: [-5, *values[1:]], r"boundaries \[-5, "),
        ("boundaries", lambda values: [], r"boundaries \[\] of 1 sequences"),
        ("rollout", lambda values: [*values, 0], "the parts of its rollout ids differ in number"),
        ("lags", lambda values: values[:-1], "tokens, but {'lags': "),
        ("loss_weights", lambda values: [*values, 1.0], "tokens, but {'loss_weights': "),
        ("tokens", lambda values: [-1, *values[1:]], "tokens below 0"),
        ("positions", lambda values: [-1, *values[1:]], "positions below 0"),
        ("group", lambda values: [-1], "group below 0"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_made_of_it(tmp_path, column, change, words):
    file = rewritten(tmp_path, column, change)
    with pytest.raises(StreamError, match=f"micro-batch 0: .*{words}|micro-batch 0: {words}"):
        read_step(file.path, file.bytes, file.checksum)


@pytest.mark.parametrize("denominator", [0.0, -1.0, float("nan"), float("inf"), "12"])
def test_a_denominator_is_a_positive_number(tmp_path, denominator):
    made, facts = make_step(np.random.default_rng(0), 7, 2)
    file = write_step(tmp_path, made, replace(facts, denominator=denominator), run="run", attempt=1, sequence=0)
    with pytest.raises(StreamError, match="its header speaks of StepFacts"):
        read_step(file.path, file.bytes, file.checksum)


def test_a_step_holds_something_and_is_the_one_that_was_asked_for(tmp_path):
    empty = write_step(tmp_path, [], StepFacts(7, 1.0, 0, 0, 0), run="run", attempt=1, sequence=0)
    with pytest.raises(StreamError, match="microbatches=0"):
        read_step(empty.path, empty.bytes, empty.checksum)
    made, facts = make_step(np.random.default_rng(0), 7, 2)
    file = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=1)
    assert read_step(file.path, file.bytes, file.checksum, step=7).facts == facts
    with pytest.raises(StreamError, match="holds step 7, wanted step 8"):
        read_step(file.path, file.bytes, file.checksum, step=8)


def test_a_token_that_the_model_does_not_know_is_refused_with_the_files_name(tmp_path):
    made, facts = make_step(np.random.default_rng(0), 7, 2)
    made[1].tokens[-1] = 151
    file = write_step(tmp_path, made, facts, run="run", attempt=1, sequence=0)
    assert read_step(file.path, file.bytes, file.checksum, vocabulary=152).facts == facts
    with pytest.raises(StreamError, match=f"^{file.path}: holds the token 151, the model's are 0 to 150$"):
        read_step(file.path, file.bytes, file.checksum, vocabulary=151)
