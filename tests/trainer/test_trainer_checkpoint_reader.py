"""Parts of tensors that torch has saved, read to where they are wanted, against numpy's slices of what was saved."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from prl.trainer import checkpoint_reader
from prl.trainer.checkpoint_reader import InPlaceReader, read_ahead

SAVED = {
    "matrix": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "turned": torch.arange(35, dtype=torch.float32).reshape(5, 7).t(),
    "cube": torch.arange(60, dtype=torch.bfloat16).reshape(3, 4, 5),
    "part": torch.arange(100, dtype=torch.int64)[40:60],
    "number": torch.tensor(3.5, dtype=torch.float64),
    "nothing": torch.zeros(0, 4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    checkpoint.save(dict(SAVED), storage_writer=checkpoint.FileSystemWriter(path), no_dist=True)
    return path


def read(folder: Path, wanted: list[tuple[str, tuple[slice, ...], Tensor]]) -> None:
    """Have a reader fill the tensors with the parts of those of these names."""
    items, targets = [], {}
    for number, (name, part, target) in enumerate(wanted):
        index = MetadataIndex(f"{number}")
        targets[index] = target
        offsets = torch.Size(one.start for one in part)
        lengths = torch.Size(one.stop - one.start for one in part)
        saved = MetadataIndex(name, torch.Size([0] * len(part)), 0)
        items.append(ReadItem(LoadItemType.TENSOR, index, torch.Size([0] * len(part)), saved, offsets, lengths))
    reader = InPlaceReader(folder)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    committed = []
    planner = SimpleNamespace(
        resolve_tensor=lambda item: targets[item.dest_index],
        commit_tensor=lambda item, tensor: committed.append(item.dest_index),
    )
    reader.read_data(LoadPlan(items), planner).wait()
    assert sorted(committed, key=str) == sorted(targets, key=str)


@st.composite
def parts(draw: st.DrawFn) -> tuple[str, tuple[slice, ...], bool, torch.dtype]:
    name = draw(st.sampled_from(sorted(SAVED)))
    starts = [draw(st.integers(0, size)) for size in SAVED[name].shape]
    part = tuple(slice(start, draw(st.integers(start, size))) for start, size in zip(starts, SAVED[name].shape, strict=True))
    return name, part, draw(st.booleans()), draw(st.sampled_from([SAVED[name].dtype, torch.float32]))


@settings(max_examples=150, deadline=None)
@given(st.lists(parts(), min_size=1, max_size=6))
def test_any_part_arrives_in_any_memory(folder, wanted):
    """In tensors with and without gaps, of the saved type and another one."""
    targets = []
    for _, part, gaps, dtype in wanted:
        shape = tuple(one.stop - one.start for one in part)
        whole = torch.full((*shape, 2) if gaps else shape, -1.0).to(dtype)
        targets.append((whole, whole[..., 0] if gaps else whole))
    read(folder, [(name, part, view) for (name, part, *_), (_, view) in zip(wanted, targets, strict=True)])
    for (name, part, gaps, dtype), (whole, view) in zip(wanted, targets, strict=True):
        expected = SAVED[name].double().numpy()[part]
        assert view.dtype == dtype
        assert np.array_equal(view.double().numpy(), expected)
        if gaps:
            assert (whole[..., 1] == -1).all()  # nothing beside it was written


def test_what_is_wanted_in_one_run_is_read_once_and_nothing_else(folder, monkeypatch):
    """Rows of a matrix into the destination's memory itself; columns as the run from the first to the last one."""
    filled = []
    fill = checkpoint_reader._fill
    monkeypatch.setattr(
        checkpoint_reader,
        "_fill",
        lambda tensor, *rest: (filled.append((tensor.data_ptr(), tensor.numel())), fill(tensor, *rest)),
    )
    rows, columns = torch.zeros(2, 7), torch.zeros(5, 3)
    read(folder, [("matrix", (slice(1, 3), slice(0, 7)), rows)])
    assert filled == [(rows.data_ptr(), 14)]
    read(folder, [("matrix", (slice(0, 5), slice(2, 5)), columns)])
    assert [count for _, count in filled] == [14, 4 * 7 + 3]
    assert columns.data_ptr() not in dict(filled)


def test_another_shape_and_a_file_that_ends_too_early_are_told(folder, tmp_path):
    with pytest.raises(ValueError, match=r"matrix.*\(2, 7\) were saved, \(7, 2\) are wanted"):
        read(folder, [("matrix", (slice(0, 2), slice(0, 7)), torch.zeros(7, 2))])
    with (tmp_path / "short").open("wb+") as file:
        file.write(bytes(10))
        file.flush()
        with pytest.raises(EOFError, match="it ends 6 bytes too early"):
            checkpoint_reader._fill(torch.zeros(3), file.fileno(), 4)


def test_reading_ahead_ends_with_what_it_is_for(folder, tmp_path):
    """A folder without files, or without the folder, is for the load to speak of."""
    for place in (folder, tmp_path, tmp_path / "missing"):
        with read_ahead(place, 0):
            pass
