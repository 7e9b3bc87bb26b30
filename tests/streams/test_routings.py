"""The experts of tokens in rollout and step files, and files of runs that know nothing of experts."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from stream_data import assert_equal, make_group

from prl.flow.ids import RolloutId
from prl.streams.files import Header, StreamError, encode_file
from prl.streams.reader import rows_in
from prl.streams.records import Group, MicroBatch, StepFacts
from prl.streams.rollouts import SCHEMA, check_group, to_arrow
from prl.streams.routings import ROUTINGS, SHAPE
from prl.streams.rows import to_groups
from prl.streams.steps import encode_step, read_step, write_step

HEADER = Header("rollouts", "run", 1, "actor-000", 0)
LAYERS, EXPERTS = 3, 2


def routed(group: Group, rng: np.random.Generator, but: int = 0) -> Group:
    """The group with routings of all turns but the first so many."""

    def some(turn):
        tokens = len(turn.prompt_ids) + len(turn.output_ids) - 1
        return turn._replace(routings=rng.integers(-1, 128, (tokens, LAYERS, EXPERTS)).astype(np.int16))

    rollouts = [replace(r, turns=tuple(some(t) if k >= but else t for k, t in enumerate(r.turns))) for r in group.rollouts]
    return replace(group, rollouts=tuple(rollouts))


def read(data: bytes) -> list[Group]:
    rows, _ = rows_in(pa.py_buffer(data), "here", "run")
    return [group for some in rows for group in to_groups(some)]


def routings_of(groups: list[Group]) -> list[np.ndarray | None]:
    return [turn.routings for group in groups for rollout in group.rollouts for turn in rollout.turns]


def test_routings_come_back_with_their_turns():
    rng = np.random.default_rng(1)
    groups = [routed(make_group(k, rng, turns=2), rng, but=k) for k in range(3)]
    found = read(to_arrow(groups, HEADER).whole())
    assert_equal(found, groups)
    known = 0
    for a, b in zip(routings_of(found), routings_of(groups), strict=True):
        if b is None:
            assert a is None
        else:
            known += 1
            assert (a.dtype, a.tolist()) == (np.int16, b.tolist())
    assert 0 < known < len(routings_of(groups))


def test_files_without_routings_are_what_they_were():
    groups = [make_group(1, np.random.default_rng(1))]
    data = to_arrow(groups, HEADER).whole()
    assert pa.ipc.open_file(data).schema.equals(SCHEMA)
    assert routings_of(read(data)) == [None] * len(routings_of(groups))


def test_turns_whose_routings_do_not_fit_are_refused_by_the_writer():
    rng = np.random.default_rng(1)
    group = routed(make_group(1, rng), rng)
    check_group(group)
    first, *others = group.rollouts
    turn = first.turns[0]
    short = replace(group, rollouts=(replace(first, turns=(turn._replace(routings=turn.routings[1:]),)), *others))
    with pytest.raises(StreamError, match=rf"routings of {len(turn.routings) - 1} tokens"):
        check_group(short)


@pytest.mark.parametrize(
    ("shape", "values", "words"),
    [
        ("[3, 2]", lambda values: values[:-1], "routings"),
        ("[3, 2]", lambda values: np.where(values == values.max(), -2, values), "from -2 on"),
        ("[3, 4]", lambda values: values, "routings"),
        ("[0, 6]", lambda values: values, "of shape"),
        ("3", lambda values: values, "of shape"),
        (None, lambda values: values, "of shape"),
        ("[[", lambda values: values, "Expecting"),
        (2000 * "[" + 2000 * "]", lambda values: values, "recursion"),
    ],
)
def test_routings_that_do_not_fit_are_refused_by_readers(shape, values, words):
    rng = np.random.default_rng(1)
    written = pa.ipc.open_file(to_arrow([routed(make_group(1, rng, rollouts=1), rng)], HEADER).whole())
    batch = written.get_batch(0)
    changed = values(batch.column(ROUTINGS.name).values.to_numpy()).astype(np.int16)
    column = pa.ListArray.from_arrays(pa.array(np.array([0, len(changed)], np.int32)), pa.array(changed))
    schema = SCHEMA.append(ROUTINGS).with_metadata(HEADER.metadata({} if shape is None else {SHAPE: shape}))
    damaged = pa.record_batch([*batch.columns[:-1], column], schema=schema)
    with pytest.raises(StreamError, match=words):
        read(encode_file(schema, [damaged]).whole())


def microbatch(tokens: int, routings: np.ndarray | None) -> MicroBatch:
    flat, whole = np.ones(tokens, np.float32), np.zeros(tokens, np.int32)
    ids = (RolloutId(0, "d/1", 1, 0, 0),)
    return MicroBatch(
        whole, np.arange(tokens, dtype=np.int32), np.array([0, tokens], np.int32), flat, flat, -flat, None, whole, ids, routings
    )


def test_steps_have_the_routings_of_those_micro_batches_that_have_some(tmp_path):
    given = np.random.default_rng(1).integers(-1, 9, (5, LAYERS, EXPERTS)).astype(np.int16)
    facts = StepFacts(1, 9.0, 9, 2, 2)
    file = write_step(tmp_path, [microbatch(5, given), microbatch(4, None)], facts, run="run", attempt=1, sequence=0)
    step = read_step(file.path, file.bytes, file.checksum)
    assert step.microbatch(0).routings.tolist() == given.tolist()
    assert step.microbatch(1).routings is None
    plain = write_step(tmp_path, [microbatch(5, None), microbatch(4, None)], facts, run="run", attempt=1, sequence=1)
    assert read_step(plain.path, plain.bytes, plain.checksum).microbatch(0).routings is None
    assert ROUTINGS.name not in pa.ipc.open_file(plain.path).schema.names


def test_a_step_with_routings_of_other_tokens_is_refused():
    given = np.zeros((5, LAYERS, EXPERTS), np.int16)
    with pytest.raises(StreamError, match=r"4 tokens, but \{'routings': 5\}"):
        encode_step([microbatch(4, given)], StepFacts(1, 4.0, 4, 1, 1), run="run", attempt=1, sequence=0)
