"""Deltas of weights: bytes and processor time of encoding and applying, by the share of the values that changed.

    python tools/bench/delta.py [--bucket-mib 64] [--dtype bfloat16]

One core, one bucket. Which values change is drawn at random, each alike. `bytes`: header and body as a share of the dense
bucket. GB/s: dense bytes of the bucket by processor seconds, the median of five; `copy` beside them for what the memory gives.
What AdamW changes of bfloat16 weights in a step: about 1.7 per cent at a learning rate of 1e-6, 4 at 3e-6, 11 at 1e-5, 25 at
3e-5.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from prl.weights import delta

SHARES = (0.001, 0.017, 0.02, 0.04, 0.11, 0.25, 1.0)
TRIES = 5


def rate_gb_s(work: Callable[[], object], size_bytes: int) -> float:
    """The first time is not counted: memory is new then."""
    times_s = []
    for _ in range(TRIES + 1):
        began = time.process_time()
        work()
        times_s.append(time.process_time() - began)
    return size_bytes / statistics.median(times_s[1:]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    previous = torch.randn(args.bucket_mib * 2**20 // dtype.itemsize, generator=generator).to(dtype)
    size_bytes = previous.numel() * dtype.itemsize
    print(f"{args.bucket_mib} MiB of {args.dtype}; copy {rate_gb_s(lambda: previous.clone(), size_bytes):.1f} GB/s")
    print(f"{'changed':>8} {'form':<7} {'bytes':>8} {'encode GB/s':>12} {'apply GB/s':>11}")
    for share in SHARES:
        bits = previous.clone().view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        bits[torch.rand(len(bits), generator=generator) < share] ^= 1
        current = bits.view(dtype)
        message = delta.encode(previous, current)
        base = previous.clone()
        delta.apply(base, message)
        assert torch.equal(base.view(torch.uint8), current.view(torch.uint8))
        sent = (delta.HEADER_BYTES + message.body.numel()) / size_bytes
        encoding = rate_gb_s(lambda now=current: delta.encode(previous, now), size_bytes)
        applying = rate_gb_s(lambda to=base, what=message: delta.apply(to, what), size_bytes)
        print(f"{share:>8.1%} {message.header.form.name.lower():<7} {sent:>8.2%} {encoding:>12.2f} {applying:>11.2f}")


if __name__ == "__main__":
    main()
