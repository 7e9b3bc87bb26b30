"""Packing of one step: prl's recipe beside greedy sequential packing dealt round robin.

    python tools/bench/packing.py [--rollouts 4096] [--ranks 8] [--seeds 5]

Lengths are log-normal (median 968 tokens, mean about 1,400, cut at 8,192). `waste`: the share of the bins' room that is
empty, as packed and without what is owed to rounding up to whole rounds of the ranks. `largest`: tokens of the fullest rank
to the mean of all. Times are of the CPU, the best of thirty, of the draw in the middle; the rest is the worst of all draws.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prl.flow.packing import deal, pack

Lengths = npt.NDArray[np.int64]
Ranks = list[list[list[int]]]  # of each rank its bins, of each bin the indices of its sequences
TRIES = 30


def prl(lengths: Lengths, capacity: int, ranks: int) -> Ranks:
    bins = pack(lengths, capacity, ranks)
    sizes = lengths.tolist()
    return [[bins[b] for b in dealt] for dealt in deal([sum(sizes[i] for i in members) for members in bins], ranks)]


def greedy(lengths: Lengths, capacity: int, ranks: int) -> Ranks:
    """Sequences in the order in which they come; a bin that the next one does not fit is closed. Bins go round robin."""
    bins: list[list[int]] = [[]]
    tokens = 0
    for index, size in enumerate(lengths.tolist()):
        if tokens + size > capacity:
            bins.append([])
            tokens = 0
        bins[-1].append(index)
        tokens += size
    return [bins[rank::ranks] for rank in range(ranks)]


def measure(recipe: Callable[[Lengths, int, int], Ranks], lengths: Lengths, capacity: int, ranks: int) -> tuple[float, ...]:
    """Milliseconds, waste, waste without the rounding, tokens of the fullest rank to the mean."""
    best_s = float("inf")
    for _ in range(TRIES):
        began = time.process_time()
        dealt = recipe(lengths, capacity, ranks)
        best_s = min(best_s, time.process_time() - began)
    rounds = max(map(len, dealt))
    packed = len(pack(lengths, capacity)) if recipe is prl else sum(map(len, dealt))
    tokens = [sum(int(lengths[i]) for members in bins for i in members) for bins in dealt]
    total = int(lengths.sum())
    return 1e3 * best_s, 1 - total / (rounds * ranks * capacity), 1 - total / (packed * capacity), max(tokens) / (total / ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    draws = [np.random.default_rng(seed).lognormal(6.875, 0.9, args.rollouts) for seed in range(args.seeds)]
    print(f"{args.rollouts} rollouts, {args.ranks} ranks, {args.seeds} draws")
    print(f"{'bins':>6} {'recipe':<24} {'ms':>6} {'waste':>8} {'unrounded':>10} {'largest':>9}")
    for capacity in (8192, 16384):
        for name, recipe in (("prl", prl), ("greedy, round robin", greedy)):
            rows = [measure(recipe, np.clip(d, 1, 8192).astype(np.int64), capacity, args.ranks) for d in draws]
            ms = statistics.median(row[0] for row in rows)
            waste, unrounded, largest = (max(row[k] for row in rows) for k in (1, 2, 3))
            print(f"{capacity:>6} {name:<24} {ms:>6.2f} {waste:>8.2%} {unrounded:>10.2%} {largest:>9.5f}")


if __name__ == "__main__":
    main()
