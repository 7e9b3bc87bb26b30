"""What reading a step file costs a trainer rank: bytes, and CPU and wall time, of 1, 8 and 64 data-parallel ranks.

    .venv/bin/python tools/bench/steps.py [--tokens 5700000] [--rounds 7]

A step of 256 micro-batches of 16 sequences each lies in the system's memory (/dev/shm): 28 bytes a token. "whole" is what a
resume and an audit read, a rank's is the end of the file and its own micro-batches, up to the records. Bytes are those that the
process was given by the system; times are the best round.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from prl.flow.ids import RolloutId
from prl.streams.records import MicroBatch, StepFacts
from prl.streams.steps import encode_step, publish_step, read_step

MICROBATCHES, SEQUENCES = 256, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=5_700_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    length = max(1, arguments.tokens // (MICROBATCHES * SEQUENCES))
    made = [make_microbatch(number, length) for number in range(MICROBATCHES)]
    tokens = sum(len(microbatch.tokens) for microbatch in made)
    facts = StepFacts(1, float(tokens), tokens, MICROBATCHES * SEQUENCES, MICROBATCHES)
    encoded = encode_step(made, facts, run="bench", attempt=1, sequence=0)
    print(f"{tokens / 1e6:.1f} M tokens in {MICROBATCHES} micro-batches, {encoded.data.size / 1e6:.1f} MB")
    print(f"{'':16}{'MB':>9}{'cpu ms':>9}{'wall ms':>9}")

    def show(name: str, work: Callable[[], object]) -> None:
        before = bytes_read()
        work()
        read = bytes_read() - before
        cpu_s, wall_s = (min(taken) for taken in zip(*(timed(work) for _ in range(arguments.rounds)), strict=True))
        print(f"{name:16}{read / 1e6:9.2f}{1e3 * cpu_s:9.2f}{1e3 * wall_s:9.2f}", flush=True)

    show("encoding", lambda: encode_step(made, facts, run="bench", attempt=1, sequence=0))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = publish_step(Path(folder), encoded)
        show("whole", lambda: read_step(file.path, file.bytes, file.checksum).microbatches())
        for ranks in (1, 8, 64):
            share = (0, ranks)
            show(
                f"a rank of {ranks}",
                lambda share=share: read_step(file.path, file.bytes, file.checksum, share=share).microbatches(),  # type: ignore[misc]
            )


def make_microbatch(number: int, length: int) -> MicroBatch:
    rng = np.random.default_rng(number)
    tokens = SEQUENCES * length
    return MicroBatch(
        tokens=rng.integers(0, 150_000, tokens).astype(np.int32),
        positions=np.tile(np.arange(length, dtype=np.int32), SEQUENCES),
        boundaries=np.arange(0, tokens + 1, length, dtype=np.int32),
        loss_weights=np.ones(tokens, np.float32),
        advantages=rng.normal(size=tokens).astype(np.float32),
        old_logprobs=-rng.random(tokens, np.float32),
        reference_logprobs=-rng.random(tokens, np.float32),
        lags=np.zeros(tokens, np.int32),
        rollouts=tuple(RolloutId(0, f"bench/{number}", number, k, 0) for k in range(SEQUENCES)),
    )


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def timed(work: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
