"""Packing of sequences into micro-batches, and dealing of micro-batches to data-parallel ranks."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapreplace

import numpy as np
import numpy.typing as npt

_NUMBER_BITS = 32  # room and number of a bin are one integer: whole numbers compare faster than pairs
_LEVEL_ROUNDS = 8  # so many of the emptiest bins of each rank are levelled


def pack(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int, ranks: int = 1) -> list[list[int]]:
    """Bins of at most `capacity` tokens, each a list of indices into `lengths`; every index is in one bin, none is empty.
    Best-fit decreasing, found by bisection. For several ranks the count is rounded up to a multiple of `ranks` (or to the
    number of sequences, where that is less), and the emptiest bins are levelled where they can be (the longest sequence into
    the emptiest bin): all others are full, so that `deal` can load the ranks alike. Raises ValueError where there is nothing to
    pack, or a sequence longer than a bin."""
    sizes = np.asarray(lengths, np.int64)
    if len(sizes) == 0 or ranks < 1:
        raise ValueError(f"{len(sizes)} sequences cannot be packed for {ranks} ranks")
    if sizes.max() > capacity or sizes.min() < 1:
        raise ValueError(f"sequences of {sizes.min()} to {sizes.max()} tokens do not fit bins of {capacity}")
    sequences = sizes.tolist()
    bins, tokens = _best_fit(np.argsort(-sizes, kind="stable").tolist(), sequences, capacity)
    if ranks == 1:
        return bins
    count = min(-(-len(bins) // ranks) * ranks, len(sequences))
    by_room = sorted(range(len(bins)), key=lambda b: tokens[b])
    levelled = min(count, _LEVEL_ROUNDS * ranks)
    opened = count - len(bins)
    while levelled > max(1, opened):
        emptiest = set(by_room[: levelled - opened])
        order = sorted((i for b in emptiest for i in bins[b]), key=lambda i: (-sequences[i], i))
        level, fullest = _level(order, sequences, levelled)
        if len(order) >= levelled and fullest <= capacity:
            return [members for b, members in enumerate(bins) if b not in emptiest] + level
        levelled //= 2  # the fewer, the emptier they are
    return _split(bins, sequences, count)


def _best_fit(order: list[int], sizes: list[int], capacity: int) -> tuple[list[list[int]], list[int]]:
    """The bins, and the tokens in each."""
    bins: list[list[int]] = []
    room: list[int] = []  # of bins that are not full: tokens left and number, rising
    mask = (1 << _NUMBER_BITS) - 1
    for index in order:
        size = sizes[index]
        place = bisect_left(room, size << _NUMBER_BITS)
        if place == len(room):
            left = ((capacity - size) << _NUMBER_BITS) + len(bins)
            bins.append([index])
        else:
            left = room.pop(place)
            bins[left & mask].append(index)
            left -= size << _NUMBER_BITS
        if left > mask:
            insort(room, left)
    tokens = [capacity] * len(bins)
    for left in room:
        tokens[left & mask] -= left >> _NUMBER_BITS
    return bins, tokens


def _level(order: list[int], sizes: list[int], count: int) -> tuple[list[list[int]], int]:
    """The bins, and the tokens of the fullest."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, b) for b in range(count)]
    for index in order:
        load, number = loads[0]
        bins[number].append(index)
        heapreplace(loads, (load + sizes[index], number))
    return bins, max(loads)[0]


def _split(bins: list[list[int]], sizes: list[int], count: int) -> list[list[int]]:
    """Split the fullest bins that can be split until there are `count`."""
    while len(bins) < count:
        splittable = [n for n, members in enumerate(bins) if len(members) > 1]
        fullest = max(splittable, key=lambda n: sum(sizes[i] for i in bins[n]))
        halves: tuple[list[int], list[int]] = ([], [])
        tokens = [0, 0]
        for index in sorted(bins[fullest], key=lambda i: -sizes[i]):
            emptier = int(tokens[1] < tokens[0])
            halves[emptier].append(index)
            tokens[emptier] += sizes[index]
        bins[fullest] = halves[0]
        bins.append(halves[1])
    return bins


def deal(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of the bins of each rank, `tokens` being the bins' sizes: the longest bins go to the emptiest ranks, round by
    round, so that all ranks have as many bins (the last round may not be full). Every bin is dealt once."""
    order = sorted(range(len(tokens)), key=lambda b: (-tokens[b], b))
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for start in range(0, len(order), ranks):
        emptiest = sorted(range(ranks), key=lambda r: (loads[r], r))
        for rank, number in zip(emptiest, order[start : start + ranks], strict=False):
            dealt[rank].append(number)
            loads[rank] += tokens[number]
    return dealt
