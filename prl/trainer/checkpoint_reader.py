"""Reading a checkpoint's tensors from its files straight into the memory where they are wanted.

torch's FileSystemReader reads each saved tensor into new memory, whose pages the kernel has to make first, and copies the part
that is wanted. Here the bytes go into the destination itself, where this is in the host's memory and they are one run in the
file, as they are when a resume has the split of the save; else the run that has all of them is read and copied.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

THREADS = 4  # a parallel filesystem gives one stream but a part of what it can
AHEAD_BYTES = 2**20  # Linux reads no more than a device's largest request for one word of advice, and waits for its turn


@contextmanager
def read_ahead(folder: Path, rank: int) -> Iterator[None]:
    """Meanwhile the kernel reads what this rank has written into the folder: all that it needs, if the split is the same."""
    over = threading.Event()

    def ask() -> None:
        with suppress(OSError):  # who loads from the file will say what is wrong with it
            for path in sorted(folder.glob(f"__{rank}_*.distcp")):
                with path.open("rb") as file:
                    for start in range(0, path.stat().st_size, AHEAD_BYTES):
                        if over.is_set():
                            return
                        os.posix_fadvise(file.fileno(), start, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    thread = threading.Thread(target=ask, name="read ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class InPlaceReader(FileSystemReader):
    """Tensors by several threads, in the order in which they lie in their files; what else there is as torch reads it."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: ReadItem) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        items = sorted((item for item in plan.items if item.type == LoadItemType.TENSOR), key=place)
        targets = [planner.resolve_tensor(item).detach() for item in items]
        with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as pool:
            list(pool.map(self._read, items, targets))
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)
        others = [item for item in plan.items if item.type != LoadItemType.TENSOR]
        return super().read_data(replace(plan, items=others), planner)

    def _read(self, item: ReadItem, target: Tensor) -> None:
        stored = self.storage_data[item.storage_index]
        with open(self.path / stored.relative_path, "rb") as file:
            # Without its data, of which torch notes the place for readers such as this one.
            saved = torch.load(self._slice_file(file, stored), map_location="meta", weights_only=True)
            wanted = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
            if wanted.size() != target.size():
                raise ValueError(f"{item.storage_index}: {tuple(wanted.size())} were saved, {tuple(target.size())} are wanted")
            if not wanted.numel():
                return
            start = stored.offset + saved.untyped_storage()._checkpoint_offset + wanted.storage_offset() * wanted.itemsize
            if target.is_cpu and target.dtype == wanted.dtype and target.is_contiguous() and wanted.is_contiguous():
                _fill(target, file.fileno(), start)
            else:
                steps = ((size - 1) * stride for size, stride in zip(wanted.size(), wanted.stride(), strict=True))
                run = torch.empty(1 + sum(steps), dtype=wanted.dtype)
                _fill(run, file.fileno(), start)
                target.copy_(run.as_strided(wanted.size(), wanted.stride()))


def _fill(tensor: Tensor, file: int, start: int) -> None:
    """A tensor without gaps, from the bytes that begin at `start`."""
    row = tensor.as_strided((tensor.numel(),), (1,))  # strides of sizes of 1 may be any
    left = row.view(torch.uint8).numpy().data
    while left:
        count = os.preadv(file, [left], start)
        if not count:
            raise EOFError(f"it ends {len(left)} bytes too early")
        left, start = left[count:], start + count
