"""The trainer's speed and memory, as ratios from one run.

    python tools/bench/trainer.py [step] [packing] [head] [memory] [resume]        all of them without a name

step      a whole RL step (step file read to weights gathered, digest taken) to Megatron's bare passes and optimizer on the
          same tokens
packing   tokens of sequences packed by prl to the same ones padded for plain Megatron layers: log-normal lengths in
          micro-batches of 8 (as they come), and 512 of 10 tokens each
head      both passes with the output layer in chunks, by prl's function and by torch's checkpointing of each, to whole logits
memory    most bytes of tensors at one time in both passes with the output layer in chunks, and with whole logits, to those
          without an output layer, at 1/16 of 32k tokens x 150k vocabulary in each direction; counted, so that each run gives
          the same. Weights, gradients and activations (recomputed) are there, an optimizer's state is not: beside that, whole
          logits would look small
resume    loading a checkpoint of about 1 GB into a new engine, first, to loading its files, which is to read all of their bytes
          into new tensors (the kernel's making of their pages is a part of it), and second, to torch.load of as many tensors of
          the same sizes from one file; warm from the kernel's memory, cold from the disk; for an optimizer beside the model,
          and ("shared") for one that data-parallel ranks share, of which there is one.
          What a load has to do: make the pages of the optimizer's state, two thirds of the bytes, and copy all bytes once.
          Expected of no longer filling the state with zeros, 0.1 of 0.58 s of the processor; seen 0.03, as four threads that
          make pages at once hinder each other. Of a shared optimizer, expected of no step in vain, which made the state, 1.0 of
          2.26 s, and of reading to where it stays, not to memory of its own, 0.5 s; seen 1.45 s for both. Of the 0.8 s left
          0.19 were spent on collecting garbage among all that was ever imported, which is left out, too
          From the disk the few bytes that say what is in a checkpoint waited behind all that was read ahead, for 0.6 s.
          Expected of reading them first, half of that, as the disk is as busy; seen, by the clock in the median of five tries,
          twice, 0.85 s in the place of 1.0 and 1.1. Without reading ahead the fastest try took 0.1 s less of the processor
          and 0.08 more by the clock

Seconds are of the processor, of the fastest of several tries taken in turns, so that they hold on a busy machine too (waiting
for a disk does not count); a resume's by the clock as well.
"""

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer_shapes import (  # before all that imports Megatron
    Shape,
    both_passes,
    cut,
    engine_of,
    facts_of,
    lognormal_lengths,
    microbatch,
    qwen,
    start_alone,
    whole_logits,
)

# isort: split
import numpy as np
import torch
from live_bytes import LiveBytes
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from prl.flow.ids import RolloutId
from prl.streams.records import MicroBatch, StepFacts
from prl.streams.steps import read_step, write_step
from prl.trainer.batch import Batch, to_device
from prl.trainer.checkpoint import begin_save, finish_save, load_checkpoint
from prl.trainer.engine import Engine, optimizer_step
from prl.trainer.head import hidden_states, token_logprobs
from prl.trainer.mapping import export_weights
from prl.trainer.model import unwrap
from prl.trainer.options import TrainOptions
from prl.trainer.parallel import Channel, stop_groups
from prl.trainer.pipeline import run_schedule
from prl.trainer.step import train_step
from prl.weights.digest import part, total

OPTIONS = TrainOptions(loss="reinforce")
SMALL = qwen("small", 128, 384, 4, 4, 2, 2048, tied=True)
DIGITS = qwen("digits", 64, 256, 2, 2, 1, 16, tied=True)
WIDE = qwen("wide vocabulary", 224, 1184, 28, 14, 2, 9500, tied=False)  # a 7B model, 1/16 as wide; 2,048 tokens go with it
DEEP = qwen("Qwen2.5-0.5B's layers", 896, 4864, 5, 14, 2, 8192, tied=True)  # 5 of 24
TRIES = 7
RESUME_TRIES = 5
MEMORY_TOKENS = 2048
M_MMAP_THRESHOLD = -3  # as malloc.h has it


def fastest(*works: Callable[[], object], tries: int = TRIES) -> list[float]:
    """Processor seconds of the fastest try of each, in turns, after a first one."""
    best = [float("inf")] * len(works)
    for attempt in range(tries + 1):
        for number, work in enumerate(works):
            began = time.process_time()
            work()
            if attempt:
                best[number] = min(best[number], time.process_time() - began)
    return best


def show(name: str, ratio: float, note: str) -> None:
    print(f"{name:<38} {ratio:>6.2f}   {note}", flush=True)


def step() -> None:
    engine = engine_of(SMALL, OPTIONS)
    lengths = lognormal_lengths(8192, 256)
    batches = [microbatch(part, engine.config.vocabulary) for part in cut(lengths, 2048)]
    batches = [replace(b, rollouts=tuple(RolloutId(0, "p", 0, k, 0) for k in range(len(b.boundaries) - 1))) for b in batches]
    facts = StepFacts(
        step=1,
        denominator=float(sum(b.loss_weights.sum() for b in batches)),
        trained_tokens=int(sum((b.loss_weights > 0).sum() for b in batches)),
        samples=len(lengths),
        microbatches=len(batches),
    )
    with tempfile.TemporaryDirectory() as folder:
        file = write_step(Path(folder), batches, facts, run="bench", attempt=1, sequence=1)

        def whole() -> None:
            data = read_step(file.path, file.bytes, file.checksum)
            train_step(engine, [data.microbatch(number) for number in data.deal(1)[0]], data.facts)
            total(part(name, tensor) for name, tensor in export_weights(engine.chunks, engine.config))

        def bare() -> None:
            engine.chunks[0].zero_grad_buffer()
            engine.optimizer.zero_grad()
            run_schedule(engine.chunks, batches, megatrons_loss)
            optimizer_step(engine, 1)

        ours_s, bare_s = fastest(whole, bare)
    show(
        "RL step to bare Megatron",
        ours_s / bare_s,
        f"{ours_s * 1e3:.0f} to {bare_s * 1e3:.0f} ms, {len(batches)} micro-batches",
    )


def megatrons_loss(batches: Iterator[tuple[int, Batch]], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Cross-entropy of the targets by Megatron's own output layer and loss."""
    _, batch = next(batches)
    losses = model(
        batch.tokens[None], batch.positions[None], None, labels=batch.targets[None], packed_seq_params=batch.sequences
    )
    return losses, lambda output: ((output[0] * batch.weights).sum() / batch.weights.sum(), {})


class PaddedAttention(torch.nn.Module):
    """Causal attention over [S, B, heads, head_dim], each row a sequence filled up at its end."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **unused: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=query.size(2) != key.size(2))
        return found.permute(2, 0, 1, 3).flatten(2)


def padded_engine(shape: Shape) -> Engine:
    """Whose model takes rows of equal lengths, by Megatron's own rotary embedding and plain attention."""
    engine = engine_of(shape, OPTIONS)
    gpt = unwrap(engine.chunks[0])
    config = engine.config
    gpt.rotary_pos_emb = RotaryEmbedding(
        config.head_dim, rotary_percent=1.0, rotary_base=int(config.rope_theta), use_cpu_initialization=True
    )
    for layer in gpt.decoder.layers:
        layer.self_attention.core_attention = PaddedAttention()
    return engine


def padded_passes(engine: Engine, groups: list[np.ndarray]) -> None:
    """As `both_passes`, for groups of lengths that are filled up to the longest of each."""
    engine.chunks[0].zero_grad_buffer()
    for lengths in groups:
        tokens = torch.randint(0, engine.config.vocabulary, (len(lengths), int(lengths.max())))
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        hidden = engine.chunks[0](tokens, positions, None, output_processor=lambda *, hidden_states, **unused: hidden_states)
        rows = hidden.transpose(0, 1).reshape(-1, 1, hidden.size(-1))
        targets = torch.cat([tokens[:, 1:], tokens[:, :1]], 1).flatten()
        logprobs, _ = token_logprobs(engine.chunks[0], rows, targets, engine.config, engine.options)
        logprobs.sum().backward()


def packing() -> None:
    lognormal = lognormal_lengths(12288, 512)
    groups = [lognormal[start : start + 8] for start in range(0, len(lognormal), 8)]
    for name, shape, together, lengths in (
        ("log-normal lengths", SMALL, groups, lognormal),
        ("512 of 10 tokens", DIGITS, [np.full(512, 10)], np.full(512, 10)),
    ):
        packed, padded = engine_of(shape, OPTIONS), padded_engine(shape)
        batches = [microbatch(part, packed.config.vocabulary) for part in cut(lengths, 5120)]
        packed_s, padded_s = fastest(partial(both_passes, packed, *batches), partial(padded_passes, padded, together))
        tokens = sum(len(group) * int(group.max()) for group in together)
        show(f"padded to packed, {name}", padded_s / packed_s, f"{tokens / lengths.sum():.2f} times the tokens")


def head() -> None:
    engine = engine_of(qwen("head", 128, 384, 1, 4, 2, 9500, tied=False), replace(OPTIONS, head_chunk_mib=4))
    batch = microbatch(np.full(8, 128), engine.config.vocabulary)
    own = to_device(batch, 1)
    model = engine.chunks[0]
    weight = unwrap(model).output_layer.weight

    def chunk_logprobs(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = (hidden @ weight.t()).log_softmax(-1)
        return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)

    def passes(rows: int) -> None:
        model.zero_grad_buffer()
        hidden = hidden_states(model, own).squeeze(1)
        parts = zip(hidden.split(rows), own.targets.split(rows), strict=True)
        if rows < len(hidden):
            found = [checkpoint(chunk_logprobs, *part, use_reentrant=False) for part in parts]
        else:
            found = [chunk_logprobs(*part) for part in parts]
        sum(logprobs.sum() + entropies.sum() for logprobs, entropies in found).backward()

    def ours() -> None:
        model.zero_grad_buffer()
        logprobs, entropies = token_logprobs(model, hidden_states(model, own), own.targets, engine.config, engine.options)
        (logprobs.sum() + entropies.sum()).backward()

    rows = (engine.options.head_chunk_mib << 18) // engine.config.vocabulary
    ours_s, checkpoint_s, whole_s = fastest(ours, partial(passes, rows), partial(passes, 1024))
    show("chunks by prl to whole logits", ours_s / whole_s, f"{-(-1024 // rows)} chunks of 1,024 tokens x 9,500, one layer")
    show("chunks by checkpoint to whole logits", checkpoint_s / whole_s, "the same chunks")


def memory() -> None:
    batch = microbatch(lognormal_lengths(MEMORY_TOKENS, 512), WIDE.config.vocabulary)

    def whole(engine: Engine) -> None:
        own = to_device(batch, 1)
        engine.chunks[0].zero_grad_buffer()
        logp = whole_logits(engine.chunks[0], own).log_softmax(-1)
        logp.gather(-1, own.targets[:, None]).sum().backward()

    def none(engine: Engine) -> None:
        engine.chunks[0].zero_grad_buffer()
        hidden_states(engine.chunks[0], to_device(batch, 1)).sum().backward()

    peaks_mib = []
    for passes in (none, lambda engine: both_passes(engine, batch), whole):
        with LiveBytes() as live:
            engine = engine_of(WIDE, replace(OPTIONS, recompute="full", head_chunk_mib=1))
            live.peak = live.now  # of the passes, not of loading
            passes(engine)
        peaks_mib.append(live.peak / 2**20)
    own_mib, chunks_mib, whole_mib = peaks_mib
    mib = f"{chunks_mib:.0f} and {whole_mib:.0f} to {own_mib:.0f} MiB"
    show("memory with chunks", chunks_mib / own_mib, f"whole logits {whole_mib / own_mib:.2f}; {mib}, {MEMORY_TOKENS} tokens")


def resume() -> None:
    own_memory_for_each_tensor()
    loads("resume", OPTIONS)
    loads("shared", replace(OPTIONS, distributed_optimizer=True))


def loads(name: str, options: TrainOptions) -> None:
    """In turns, each into memory that this process has not used before."""
    engine = engine_of(DEEP, options)
    batch: MicroBatch = microbatch(np.full(4, 16), engine.config.vocabulary)
    train_step(engine, [batch], facts_of(batch, 1))
    channel = Channel(120.0)
    with tempfile.TemporaryDirectory() as place:  # TMPDIR has to lie on a disk
        folder, one_file = Path(place), Path(place) / "tensors.pt"
        parts = finish_save(begin_save(engine, channel, folder, 1), channel, 600.0)
        parameters = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
        kinds = ["value", "mean", "mean of squares"] + ["the optimizer's value"] * options.distributed_optimizer
        tensors = [parameter.detach().clone() for parameter in parameters for _ in kinds]
        with one_file.open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        files = [folder / part.path for part in parts]
        size = sum(part.bytes for part in parts)
        assert 0.99 < one_file.stat().st_size / size < 1.01
        del engine, parameters, tensors
        best: dict[tuple[bool, str], tuple[float, float]] = {}
        for cold in [True, False] * RESUME_TRIES:
            for what in ("load", "read", "torch.load"):
                gc.collect()
                engine = engine_of(DEEP, options) if what == "load" else None
                if cold:
                    forget([*files, one_file])
                began = time.perf_counter(), time.process_time()
                held: object
                if engine is not None:
                    held = load_checkpoint(engine, folder)
                else:
                    held = list(map(read_into_new, files)) if what == "read" else torch.load(one_file, weights_only=True)
                took = time.perf_counter() - began[0], time.process_time() - began[1]
                del engine, held
                fastest_s, least_s = best.get((cold, what), took)
                best[cold, what] = min(fastest_s, took[0]), min(least_s, took[1])
    for cold, state in ((False, "warm"), (True, "cold")):
        load = best[cold, "load"]
        for what, words in (("read", "reading its files"), ("torch.load", "torch.load")):
            for clock, of, whole in zip(("by the clock", "of the processor"), best[cold, what], load, strict=True):
                show(f"{name} to {words}, {state}", whole / of, f"{whole:.2f} to {of:.2f} s {clock}, {size / 2**20:.0f} MiB")


def own_memory_for_each_tensor() -> None:
    """Have glibc take each from the kernel, and give it back. What it keeps of tensors that are gone has pages already, which
    nothing has in a process that has just begun; and whom it gives that to depends on sizes."""
    if not ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20):
        raise OSError("mallopt: glibc does not take memory from the kernel for each tensor")


def read_into_new(path: Path) -> Tensor:
    """The bytes of a file in a tensor as torch makes it."""
    tensor = torch.empty(path.stat().st_size, dtype=torch.uint8)
    left = tensor.numpy().data
    with path.open("rb", buffering=0) as file:
        while left:
            left = left[file.readinto(left) :]
    return tensor


def forget(files: Sequence[Path]) -> None:
    """Have the next one who reads them read them from their disk."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


BENCHMARKS = {"step": step, "packing": packing, "head": head, "memory": memory, "resume": resume}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    args = parser.parse_args()
    unknown = set(args.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    start_alone()
    torch.set_num_threads(1)
    for name in args.names or BENCHMARKS:
        BENCHMARKS[name]()
    stop_groups()


if __name__ == "__main__":
    main()
