import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.weights.plan import Bucket, Piece, TensorSpec, from_json, item_bytes, pack, to_json

SPECS = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "int8"]), st.lists(st.integers(0, 9), max_size=3)), max_size=12
).map(lambda rows: [TensorSpec(f"t{n}", dtype, tuple(shape)) for n, (dtype, shape) in enumerate(rows)])


def test_packing_by_hand():
    specs = [TensorSpec("a", "float32", (3,)), TensorSpec("b", "int8", (0, 4)), TensorSpec("c", "bfloat16", (2, 5))]
    assert pack(specs, 8) == [
        Bucket((Piece(0, 0, 8, 0),), 8),
        Bucket((Piece(0, 8, 12, 0), Piece(2, 0, 4, 4)), 8),
        Bucket((Piece(2, 4, 12, 0),), 8),
        Bucket((Piece(2, 12, 20, 0),), 8),
    ]


@given(SPECS, st.integers(1, 64))
def test_every_byte_is_packed_once_in_order(specs, bucket_bytes):
    buckets = pack(specs, bucket_bytes)
    flat = [(p.tensor, byte) for b in buckets for p in b.pieces for byte in range(p.start, p.end)]
    assert flat == [(n, byte) for n, spec in enumerate(specs) for byte in range(spec.bytes)]
    assert all(bucket.bytes == bucket_bytes for bucket in buckets[:-1])
    for bucket in buckets:
        ends = [p.at + p.end - p.start for p in bucket.pieces]
        assert [p.at for p in bucket.pieces] == [0, *ends[:-1]]
        assert ends[-1] == bucket.bytes <= bucket_bytes


def test_items_of_a_bucket():
    specs = [TensorSpec("a", "float32", (4,)), TensorSpec("b", "bfloat16", (5,)), TensorSpec("c", "int8", (8,))]
    buckets = pack(specs, 8)  # a, a, four of b, the last of b with six of c, two of c
    assert [item_bytes(specs, bucket) for bucket in buckets] == [4, 4, 2, 1, 1]
    assert item_bytes(specs, pack(specs[:2], 2**20)[0]) == 2
    assert item_bytes(specs[:1], pack(specs[:1], 6)[0]) == 2  # it ends within an item


@given(SPECS)
def test_json_gives_the_same_back(specs):
    assert from_json(to_json(specs)) == specs


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"a": 1}, "expected a list"),
        ([["a", "float32"]], "expected \\[name, dtype, shape\\]"),
        ([["a", "float32", [1.5]]], "expected \\[name, dtype, shape\\]"),
        ([["a", "float31", [1]]], "dtype 'float31' is not one of"),
        ([["a", "int8", [-1]]], "negative size"),
        ([["a", "int8", [1]], ["a", "int8", [1]]], "a is given twice"),
    ],
)
def test_wrong_rows_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        from_json(rows)


def test_the_plan_needs_no_torch():
    code = "import sys, prl.weights.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
