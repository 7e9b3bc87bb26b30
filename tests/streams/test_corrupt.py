"""Whatever the bytes are, reading them ends in records of the schema or in StreamError: no crash, no other error, no memory."""

import json
import random
import resource
import struct
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from stream_data import make_group
from test_ledger import events_of
from test_step_files import assert_same, make_step

from prl.streams import ledger, rollouts, steps
from prl.streams.files import Header, StreamError, StreamFile, check_bytes, checksum_of, encode_file
from prl.streams.guard import batches_in, tail_bytes
from prl.streams.parts import encode_parts
from prl.streams.reader import rows_in
from prl.streams.records import Group, MicroBatch
from prl.streams.rows import rows_of, to_groups

HEADER = Header("rollouts", "run", 1, "actor_0", 0)
EXTREMES = (0, 1, -1, 2, 127, -128, 2**15 - 1, 2**31 - 1, -(2**31), 2**62, -(2**62), 2**63 - 1)


def rollout_file() -> bytes:
    rng = np.random.default_rng(0)
    return rollouts.to_arrow([make_group(n, rng) for n in range(2)], HEADER).whole()


def groups_of(data: pa.Buffer, run: str | None = None) -> list[Group]:
    rows, _ = rows_in(data, "a file", run)
    return [group for found in rows for group in to_groups(found)]


def step_file(folder) -> StreamFile:
    made, facts = make_step(np.random.default_rng(0), 7, 2)
    return steps.write_step(folder, made, facts, run="run", attempt=1, sequence=0)


def sealed(data: bytes) -> tuple[bytes, str]:
    """A step file whose checksums are those of what it holds, and its own, as far as where its parts lie can be made out."""
    try:
        tail_at = len(data) - tail_bytes(data)
        starts = [0, *(block.at for block in batches_in(data[tail_at:])), tail_at]
        told = (pa.ipc.open_file(pa.py_buffer(data)).metadata or {}).get(b"prl.checksums", b"")
    except (pa.ArrowException, OSError, ValueError):
        return data, checksum_of(data[-18:])
    held = "".join(checksum_of(data[start:end]) for start, end in pairwise(starts)).encode()
    tail = data[tail_at:].replace(told, held) if len(held) == len(told) else data[tail_at:]
    return data[:tail_at] + tail, checksum_of(tail)


def ledger_payload() -> bytes:
    return ledger._encode(events_of(0) + events_of(1, "discarded", "too old")).to_pybytes()


def read_rollout_file(data: bytes) -> None:
    for group in groups_of(pa.py_buffer(data), "run"):
        rollouts.check_group(group)


def read_step_file(path: Path, size_bytes: int, checksum: str, share: tuple[int, int] | None = None) -> list[MicroBatch]:
    step = steps.read_step(path, size_bytes, checksum, run="run", share=share)
    step.rollout_ids()
    return step.microbatches()


def read_ledger_payload(data: bytes) -> None:
    list(ledger.ledger_events(ledger.decode(data, "a ledger")))


def flip(data: bytearray, others: list[bytes], rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def truncate(data: bytearray, others: list[bytes], rng: random.Random) -> None:
    if rng.random() < 0.5:
        del data[rng.randrange(len(data)) :]
    else:  # a hole in the middle: the footer is still there
        at = rng.randrange(len(data))
        del data[at : at + rng.randrange(1, 200)]


def splice(data: bytearray, others: list[bytes], rng: random.Random) -> None:
    """A piece of a file of any kind, in place of as much or pushed in between."""
    other = rng.choice(others)
    size = rng.choice((4, 8, 64, 500, len(other)))
    start, at = rng.randrange(len(other)), rng.randrange(len(data))
    piece = other[start : start + size]
    data[at : at + (len(piece) if rng.random() < 0.7 else 0)] = piece


def edit_numbers(data: bytearray, others: list[bytes], rng: random.Random) -> None:
    """Numbers where Arrow's own are likely: 4 or 8 bytes, aligned, set to extremes or moved a little."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind, size = rng.choice((("<i", 4), ("<q", 8), ("<h", 2)))
        at = rng.randrange(0, max(1, len(data) - 8), 2 if size == 2 else 4)
        if at + size > len(data):
            continue
        (old,) = struct.unpack_from(kind, data, at)
        new = rng.choice(EXTREMES) if rng.random() < 0.5 else old + rng.choice((-8, -4, -1, 1, 4, 8, 64))
        struct.pack_into(kind, data, at, (new + 2 ** (8 * size - 1)) % 2 ** (8 * size) - 2 ** (8 * size - 1))


MUTATIONS = (flip, truncate, splice, edit_numbers)


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_corrupt_files_only_ever_raise_stream_errors(tmp_path, count):
    rng = random.Random(count)
    good = [rollout_file(), ledger_payload()]
    readers = (read_rollout_file, read_ledger_payload)
    for data, read in zip(good, readers, strict=True):
        read(data)
    others = [*good, step_file(tmp_path).path.read_bytes()]
    refused = passed = 0
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        kind = number % 2
        data = bytearray(good[kind])
        MUTATIONS[number // 2 % len(MUTATIONS)](data, others, rng)
        corrupt = bytes(data)
        if corrupt == good[kind]:
            continue
        with pytest.raises(StreamError):
            check_bytes(corrupt, len(good[kind]), checksum_of(good[kind]), "a file")
        checked = check_bytes(corrupt, len(corrupt), checksum_of(corrupt), "a file")
        try:
            readers[kind](checked.to_pybytes())
            passed += 1  # values alone were changed
        except StreamError:
            refused += 1
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    assert refused > count // 4
    assert passed > count // 100
    assert grown_mib < 200


@pytest.mark.parametrize("count", [2_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_corrupt_step_files_give_the_micro_batches_that_were_written_or_stream_errors(tmp_path, count):
    """Who reads all of a file finds everything, a rank what is wrong with what it reads. Where the checksums are made to fit
    what the file holds by now, it is as with the other kinds."""
    rng = random.Random(count)
    file = step_file(tmp_path)
    good, others = file.path.read_bytes(), [rollout_file(), ledger_payload(), file.path.read_bytes()]
    announced = (file.path, file.bytes, file.checksum)
    wanted = {share: read_step_file(*announced, share) for share in ((0, 2), (1, 2))}
    assert [len(found) for found in wanted.values()] == [1, 1]
    assert sealed(good) == (good, file.checksum)
    spared = refused = passed = 0
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        data = bytearray(good)
        MUTATIONS[number % len(MUTATIONS)](data, others, rng)
        corrupt = bytes(data)
        if corrupt == good:
            continue
        file.path.write_bytes(corrupt)
        with pytest.raises(StreamError):
            read_step_file(*announced)
        for share, own in wanted.items():
            try:
                (found,) = read_step_file(*announced, share)
            except StreamError:
                continue
            assert_same(found, own[0])
            spared += 1
        corrupt, checksum = sealed(corrupt)
        file.path.write_bytes(corrupt)
        for share in (None, *wanted):
            try:
                read_step_file(file.path, len(corrupt), checksum, share)
                passed += 1
            except StreamError:
                refused += 1
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    assert spared > count // 10
    assert refused > count // 4
    assert passed > count // 10
    assert grown_mib < 200


def test_compressed_buffers_are_refused_before_they_are_opened():
    """64 MiB of zeros in a few KiB: the header may as well say a TiB."""
    schema = pa.schema([("x", pa.int64())]).with_metadata(HEADER.metadata())
    batch = pa.record_batch([pa.array(np.zeros(2**23, np.int64))], schema=schema)
    for codec in ("lz4", "zstd"):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_batch(batch)
        before = pa.default_memory_pool().max_memory()
        with pytest.raises(StreamError, match="compressed buffers"):
            groups_of(sink.getvalue())
        assert pa.default_memory_pool().max_memory() == before


LONG = "x" * 2**21


def peak_of(read) -> int:
    """Bytes that Python took while it read."""
    tracemalloc.start()
    try:
        kept = read()
        _, peak = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("name", ["domain", "dataset"])
def test_a_long_string_costs_its_length_once(name):
    """However many groups have it."""
    rng = np.random.default_rng(0)
    data = pa.py_buffer(rollouts.to_arrow([make_group(n, rng) for n in range(300)], HEADER).whole())
    schema, batch = pa.ipc.open_file(data).schema, pa.ipc.open_file(data).get_batch(0)
    column = pa.DictionaryArray.from_arrays(batch.column(name).indices, pa.array([LONG]))
    changed = batch.set_column(schema.get_field_index(name), schema.field(name), column)
    data = pa.py_buffer(encode_file(schema, [pa.record_batch(changed.columns, schema=schema)]).whole())
    assert peak_of(lambda: groups_of(data)) < 3 * data.size


def test_a_long_reason_costs_its_length_once():
    events = [event for n in range(300) for event in events_of(n, "discarded", LONG)]
    payload = ledger._encode(events).to_pybytes()
    del events
    assert peak_of(lambda: list(ledger.ledger_events(ledger.decode(payload, "a ledger")))) < 3 * len(payload)


def test_dictionaries_in_pieces_are_refused():
    column = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([("x", column)]).with_metadata(HEADER.metadata())

    def batch(values: list[str]) -> pa.RecordBatch:
        return pa.record_batch([pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array(values))], schema=schema)

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)) as writer:
        writer.write_batch(batch(["a"]))
        writer.write_batch(batch(["a", "b"]))
    with pytest.raises(StreamError, match="a dictionary in pieces"):
        groups_of(sink.getvalue())


def test_values_may_be_missing_nowhere():
    """Also inside of lists, maps, structs and dictionaries."""
    data = pa.py_buffer(rollout_file())
    batch = pa.ipc.open_file(data).get_batch(0)
    span = {"lineage": 0, "step": None, "start": 0, "end": 4}
    cases = {
        "output_ids": [[1, None, 2, 3]] * 3,
        "versions": [[span]] * 3,
        "metrics": [[("a", None)]] * 3,
        "domain": pa.DictionaryArray.from_arrays(pa.array([0] * 6, pa.int32()), pa.array([None], pa.string())),
    }
    for name, values in cases.items():
        kind = batch.schema.field(name).type
        made = values if isinstance(values, pa.Array) else pa.array(values * 2, kind)
        changed = batch.set_column(batch.schema.get_field_index(name), batch.schema.field(name), made)
        with pytest.raises(StreamError, match="values are missing"):
            rows_of(changed, "a batch")


def resealed(path: Path, data: bytes) -> StreamFile:
    """A step file of this content, with the checksums of what it holds."""
    data, checksum = sealed(data)
    path.write_bytes(data)
    return StreamFile(path, len(data), checksum, 1, 0)


@pytest.mark.parametrize("share", [None, (0, 2), (1, 2)])
def test_a_step_whose_footer_tells_other_than_it_holds_is_refused(tmp_path, share):
    """Checksums and all."""
    good = step_file(tmp_path).path.read_bytes()
    reader = pa.ipc.open_file(pa.py_buffer(good))
    batches = [reader.get_batch(n) for n in range(2)]

    def dealing(tokens: list[int]) -> bytes:
        schema = reader.schema.with_metadata({**reader.schema.metadata, b"prl.tokens": json.dumps(tokens)})
        return encode_parts(schema, [pa.record_batch(batch.columns, schema=schema) for batch in batches]).whole()

    def written(checksums: int, named=batches, **options) -> bytes:
        sink, metadata = pa.BufferOutputStream(), {"prl.checksums": "0" * checksums}
        with pa.ipc.new_file(sink, reader.schema, options=pa.ipc.IpcWriteOptions(**options), metadata=metadata) as writer:
            for batch in named:
                writer.write_batch(batch)
        return sink.getvalue().to_pybytes()

    tokens = [len(batch.column("tokens").values) for batch in batches]
    assert tokens[0] != tokens[1]
    cases = {
        "micro-batch .: no record batch of prl .*compressed buffers": written(48, compression="zstd"),
        "its header speaks of 2": written(64, [*batches, batches[0]]),
        "32 digits of checksums for 2 record batches": written(32),
        "a record batch at byte .* expected at byte": name_first_batch(written(48), 2),
        "KeyError: b'prl.checksums'": encode_file(reader.schema, batches).whole(),
        "its header deals other micro-batches": dealing([tokens[0], -tokens[1]]),
        "header deals other micro-batches": dealing([*tokens, 1]),
        "of other tokens than its header deals": dealing(tokens[::-1]),
    }
    for words, data in cases.items():
        file = resealed(tmp_path / "changed", data)
        with pytest.raises(StreamError, match=words):
            read_step_file(file.path, file.bytes, file.checksum, share)


def test_a_header_that_is_nested_without_end_is_no_step(tmp_path):
    reader = pa.ipc.open_file(step_file(tmp_path).path)
    for facts in (b"[" * 100_000, b"{}", b'{"step": "1"}', b"1e999"):
        schema = reader.schema.with_metadata({**reader.schema.metadata, b"prl.facts": facts})
        batches = [pa.record_batch(reader.get_batch(i).columns, schema=schema) for i in range(reader.num_record_batches)]
        encoded = encode_parts(schema, batches)
        path = tmp_path / "changed"
        path.write_bytes(encoded.whole())
        with pytest.raises(StreamError, match="header"):
            steps.read_step(path, encoded.size, encoded.checksum)


def test_a_group_number_that_goes_wrong_is_told():
    group = make_group(0, np.random.default_rng(0))
    with pytest.raises(StreamError, match="with numbers"):
        rollouts.check_group(replace(group, numbers=(3,)))


def name_first_batch(data: bytes, times: int) -> bytes:
    """The file with a footer that names its first record batch so many times."""
    (size,) = struct.unpack_from("<i", data, len(data) - 10)
    start = len(data) - 10 - size
    footer = bytearray(data[start : start + size])
    (root,) = struct.unpack_from("<I", footer, 0)
    (back,) = struct.unpack_from("<i", footer, root)
    (place,) = struct.unpack_from("<H", footer, root - back + 4 + 2 * 3)  # the field of record batches
    field = root + place
    vector = field + struct.unpack_from("<I", footer, field)[0]
    block = bytes(footer[vector + 4 : vector + 28])
    footer += bytes(-(len(footer) + 4) % 8)
    struct.pack_into("<I", footer, field, len(footer) - field)
    footer += struct.pack("<I", times) + block * times
    return data[:start] + bytes(footer) + struct.pack("<i", len(footer)) + b"ARROW1"


def test_a_batch_that_is_named_twice_is_refused():
    """Else a file of 100 KB makes 200,000 groups."""
    assert len(groups_of(pa.py_buffer(name_first_batch(rollout_file(), 1)))) == 2
    with pytest.raises(StreamError, match="begins before the end of another"):
        groups_of(pa.py_buffer(name_first_batch(rollout_file(), 2)))
