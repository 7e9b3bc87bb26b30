#!/usr/bin/env python3
"""What the trainer does on one GPU: exact against Hugging Face's models, and how fast. One table, and JSON.

    python tools/gpu_check.py [--json FILE] [--budget-s 400] [--deadline-s 480]
    python tools/gpu_check.py --toy            tiny shapes, also on a CPU

It wants torch, megatron-core and, for the comparison, transformers; no vLLM. Models have random weights, nothing is downloaded.

1. `parity`: logits and gradients of a small Qwen2.5-shaped model in float32 and bfloat16 against transformers', and packed
   sequences against each alone. In bfloat16 the yardstick is how far transformers' own are from its float32 ones.
2. `step`: seconds of both passes and of the optimizer, MFU, memory, and the share of a step that is spent outside of both, for
   Qwen2.5-0.5B- and 7B-shaped models at 4k, 16k and 32k tokens of log-normal lengths.
3. `head`: passes and step with the output layer in chunks, with all tokens in one, and (passes alone) with the model's whole
   logits in torch's own operations: seconds and memory.
4. `padded`: the step's sequences, each filled up to the longest, against the same packed.
5. `weights`: GB/s of the digest and of a copy in place of a model's tensors.

A measurement that does not fit into memory says so and is no fault; one that fails otherwise, or would begin after the time
budget, does not keep the next ones from being made. At the deadline, counted like the budget from the start of the program, it
ends in the middle of what it does. FILE has at any time what was measured, and the names of what was not. Ends with 1 where a
comparison is off, or a measurement failed or came too late.
"""

import argparse
import faulthandler
import gc
import importlib.metadata
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
DEADLINE_S = 480.0
GRACE_S = 20.0  # after the deadline, until a process ends in which no Python runs any more
if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S + GRACE_S, exit=True)

# ruff: noqa: E402 - the clock runs from the start, and Megatron is imported after device.install

# A 7B model with all of its optimizer leaves little memory to waste on gaps between blocks.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from trainer_shapes import (  # before all that imports Megatron
    Shape,
    both_passes,
    cut,
    engine_of,
    facts_of,
    lognormal_lengths,
    microbatch,
    qwen,
    random_tensors,
    start_alone,
    whole_logits,
)

# isort: split
import numpy as np
import torch
from gpu_report import Check, Report, Row
from torch import Tensor

from prl.config.hf_config import ModelConfig
from prl.streams.records import MicroBatch
from prl.trainer import device
from prl.trainer.batch import Batch, to_device
from prl.trainer.engine import Engine
from prl.trainer.flops import peak_flops, step_flops
from prl.trainer.head import hidden_states, token_logprobs
from prl.trainer.mapping import export_weights, load_weights, named_parameters
from prl.trainer.model import DTYPES, build_model
from prl.trainer.options import TrainOptions
from prl.trainer.parallel import stop_groups
from prl.trainer.step import train_step
from prl.weights.digest import digest


@dataclass(frozen=True)
class Measurement:
    shape: Shape
    tokens: int
    recompute: str

    @property
    def words(self) -> str:
        return f"{self.shape.name} at {self.tokens} tokens, recompute {self.recompute}"


@dataclass(frozen=True)
class Plan:
    parity: Shape
    parity_lengths: tuple[int, ...]
    steps: tuple[Measurement, ...]
    head: Measurement  # whose logits fit into memory at once
    padded: Measurement
    longest: int  # tokens of a sequence
    weights: Shape


HALF_B = qwen("0.5B", 896, 4864, 24, 14, 2, 151936, tied=True)
SEVEN_B = qwen("7B", 3584, 18944, 28, 28, 4, 152064, tied=False)
SMALL = qwen("small", 512, 1536, 4, 8, 2, 8192, tied=True)
TINY = qwen("tiny", 64, 96, 2, 4, 2, 250, tied=True)

FULL = Plan(
    parity=SMALL,
    parity_lengths=(700, 33, 1, 512, 250),
    steps=(
        Measurement(HALF_B, 4096, "none"),
        Measurement(HALF_B, 16384, "none"),
        Measurement(HALF_B, 32768, "none"),
        Measurement(SEVEN_B.cut(8), 16384, "none"),
        Measurement(SEVEN_B.cut(8), 16384, "selective"),
        Measurement(SEVEN_B.cut(8), 32768, "none"),
        Measurement(SEVEN_B, 4096, "full"),
        Measurement(SEVEN_B, 16384, "full"),
    ),
    head=Measurement(HALF_B, 16384, "none"),
    padded=Measurement(HALF_B, 16384, "none"),
    longest=8192,
    weights=HALF_B,
)
TOY = Plan(
    parity=TINY,
    parity_lengths=(7, 12, 1, 9),
    steps=(Measurement(TINY, 64, "none"), Measurement(TINY.cut(1), 128, "full")),
    head=Measurement(TINY, 64, "none"),
    padded=Measurement(TINY, 64, "none"),
    longest=48,
    weights=TINY,
)


def main() -> int:
    args = arguments()
    if not args.toy and not torch.cuda.is_available():
        print("gpu_check: no GPU is visible here; --toy runs tiny shapes on a CPU", file=sys.stderr)
        return 1
    faulthandler.dump_traceback_later(left_s(args.deadline_s) + GRACE_S, exit=True)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    facts = {**versions(), "attention": device.attention(DTYPES[dtype]), "dtype": dtype, "toy": args.toy}
    checks = checks_of(TOY if args.toy else FULL, dtype)
    report = Report(facts, checks, args.json)
    deadline = threading.Timer(left_s(args.deadline_s), report.give_up, [args.deadline_s])
    deadline.daemon = True
    deadline.start()
    start_alone()
    for check in [check for check in checks if check.name in (args.only or NAMES)]:
        report.add(check, attempt(check.measure, args.budget_s))
    stop_groups()
    deadline.cancel()
    return report.end()


NAMES = ("parity", "step", "head", "padded", "weights")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    parser.add_argument("--budget-s", type=float, default=400.0, help="measurements begin no later than this, in seconds (400)")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="the program ends by then, in seconds (480)")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these measurements alone")
    parser.add_argument("--toy", action="store_true", help="tiny shapes")
    return parser.parse_args()


def checks_of(plan: Plan, dtype: str) -> list[Check]:
    longest = plan.longest
    return [
        Check("parity", lambda: parity(plan)),
        *(Check("step", partial(measure_step, one, dtype, longest), one.words) for one in plan.steps),
        Check("head", lambda: measure_head(plan.head, dtype, longest), plan.head.words),
        Check("padded", lambda: measure_padded(plan.padded, dtype, longest), plan.padded.words),
        Check("weights", lambda: measure_weights(plan.weights, dtype), plan.weights.name),
    ]


def left_s(seconds: float) -> float:
    """Of so many since the program began."""
    return max(0.0, BEGAN + seconds - time.monotonic())


def attempt(measure: Callable[[], list[Row]], budget_s: float) -> list[Row]:
    if not left_s(budget_s):
        return [{"failed": f"not begun, as {budget_s:g} s were over", "ok": False}]
    gc.collect()  # of what the measurement before has left
    torch.cuda.empty_cache()
    try:
        return measure()
    except torch.OutOfMemoryError as error:
        return [{"skipped": f"out of memory: {str(error).splitlines()[0][:160]}"}]
    except Exception as error:  # those to come may be all that a short loan of a GPU gives
        traceback.print_exc()
        return [{"failed": f"{type(error).__name__}: {error}".splitlines()[0][:160], "ok": False}]


def versions() -> dict[str, str]:
    found = {"accelerator": device.name() or "CPU", "CUDA": str(torch.version.cuda)}
    for package in ("torch", "megatron-core", "transformers", "transformer-engine"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def timed(work: Callable[[], object], tries: int = 3) -> tuple[float, float]:
    """Seconds of the fastest try after a first one, and the memory in GiB of all of them."""
    work()
    device.take_peak_memory_bytes()
    best_s = float("inf")
    for _ in range(tries):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - began)
    return best_s, device.take_peak_memory_bytes() / 2**30


def parity(plan: Plan) -> list[Row]:
    try:
        from transformers import Qwen2Config, Qwen2ForCausalLM
    except ImportError:
        return [{"skipped": "no transformers to compare with"}]
    config, lengths = plan.parity.config, np.array(plan.parity_lengths)
    batch = to_device(microbatch(lengths, config.vocabulary), 1)
    raw = {key: value for key, value in plan.parity.raw.items() if key != "model_type"}
    theirs: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for name, dtype in DTYPES.items():
        model = Qwen2ForCausalLM(Qwen2Config(**raw, attn_implementation="sdpa")).to(device.device(), dtype)
        model.load_state_dict(dict(random_tensors(config)), strict=not config.tied)
        theirs[name] = transformers_values(model, batch, lengths)
    exact_logits, exact_gradients = theirs["float32"]
    rows = []
    for name, dtype in DTYPES.items():
        chunks = build_model(config, TrainOptions(dtype=name))  # type: ignore[arg-type]
        load_weights(chunks, config, random_tensors(config))
        logits, gradients = our_values(chunks, config, batch, TrainOptions(dtype=name))  # type: ignore[arg-type]
        off = distances(logits, gradients, exact_logits, exact_gradients)
        yardstick = distances(*theirs[name], exact_logits, exact_gradients) if dtype is torch.bfloat16 else (1e-4, 5e-4)
        alone = separately(chunks, config, lengths, batch)
        packing = float((logits - alone).abs().max() / exact_logits.abs().max())
        ok = all(a <= 2 * b for a, b in zip(off, yardstick, strict=True)) and packing <= 2 * yardstick[0]
        rows.append(
            {
                "dtype": name,
                "attention": device.attention(dtype),
                "logits_off": off[0],
                "gradients_off": off[1],
                "packed_off_alone": packing,
                "allowed_logits": 2 * yardstick[0],
                "allowed_gradients": 2 * yardstick[1],
                "ok": ok,
            }
        )
    return rows


def distances(
    logits: Tensor, gradients: Mapping[str, Tensor], exact_logits: Tensor, exact_gradients: Mapping[str, Tensor]
) -> tuple[float, float]:
    """Largest distance of logits as a share of the largest logit, and of a gradient's norm from that of the exact one's."""
    of_logits = float((logits - exact_logits).abs().max() / exact_logits.abs().max())
    shares = [float((gradients[key] - value).norm() / value.norm()) for key, value in exact_gradients.items()]
    return of_logits, max(shares)


def transformers_values(model: Any, batch: Batch, lengths: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [T, vocabulary] and gradients of the sum of log p(target) over tokens with weight, sequence by sequence."""
    found, start = [], 0
    for length in lengths.tolist():
        part = slice(start, start + length)
        logits = model(batch.tokens[None, part]).logits[0].float()
        logprobs = logits.log_softmax(-1).gather(-1, batch.targets[part, None]).squeeze(-1)
        (logprobs * batch.weights[part]).sum().backward()
        found.append(logits.detach())
        start += length
    return torch.cat(found), {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def our_values(chunks: list[Any], config: ModelConfig, batch: Batch, options: TrainOptions) -> tuple[Tensor, dict[str, Tensor]]:
    logits = whole_logits(chunks[0], batch)[:, : config.vocabulary].detach()
    logprobs, _ = token_logprobs(chunks[0], hidden_states(chunks[0], batch), batch.targets, config, options)
    (logprobs * batch.weights).sum().backward()
    for parameter in named_parameters(chunks).values():
        parameter.data = parameter.grad
    return logits, {name: tensor.float().clone() for name, tensor in export_weights(chunks, config)}


def separately(chunks: list[Any], config: ModelConfig, lengths: np.ndarray, packed: Batch) -> Tensor:
    """Logits of each sequence as a batch of its own."""
    load_weights(chunks, config, random_tensors(config))  # in the place of what may be gradients
    found, tokens = [], packed.tokens.cpu().numpy().astype(np.int32)
    for start, end in zip(np.cumsum([0, *lengths[:-1]]), np.cumsum(lengths), strict=True):
        alone = replace(microbatch(np.array([end - start]), config.vocabulary), tokens=tokens[start:end])
        with torch.no_grad():
            found.append(whole_logits(chunks[0], to_device(alone, 1))[:, : config.vocabulary])
    return torch.cat(found)


def options_of(measurement: Measurement, dtype: str) -> TrainOptions:
    return TrainOptions(dtype=dtype, recompute=measurement.recompute, loss="reinforce")  # type: ignore[arg-type]


def measure_step(measurement: Measurement, dtype: str, longest: int) -> list[Row]:
    options = options_of(measurement, dtype)
    engine = engine_of(measurement.shape, options)
    lengths = lognormal_lengths(measurement.tokens, longest)
    batch = microbatch(lengths, engine.config.vocabulary)
    metrics: list[dict[str, float]] = []

    def step() -> None:
        metrics.append(train_step(engine, [batch], facts_of(batch, len(metrics) + 1)))

    step_s, memory_gib = timed(step)
    model_s = timed(lambda: both_passes(engine, batch))[0]
    optimizer_s = min(found["train/optimizer_s"] for found in metrics[1:])
    flops = step_flops(engine.config, lengths)
    peak = peak_flops(device.name())
    row = {
        "shape": measurement.shape.name,
        "tokens": measurement.tokens,
        "recompute": measurement.recompute,
        "attention": device.attention(DTYPES[dtype]),
        "step_s": step_s,
        "passes_s": model_s,
        "optimizer_s": optimizer_s,
        "outside": max(0.0, 1 - (model_s + optimizer_s) / step_s),
        "tflops": flops / step_s / 1e12,
        "mfu": flops / step_s / peak if peak else "unknown",
        "memory_gib": memory_gib,
    }
    return [row]


def measure_head(measurement: Measurement, dtype: str, longest: int) -> list[Row]:
    options, config = options_of(measurement, dtype), measurement.shape.config
    batch = microbatch(lognormal_lengths(measurement.tokens, longest), config.vocabulary)
    own = to_device(batch, 1)

    def plain(engine: Engine, batch: MicroBatch) -> None:
        engine.chunks[0].zero_grad_buffer()
        logp = whole_logits(engine.chunks[0], own)[:, : config.vocabulary].log_softmax(-1)
        logp.gather(-1, own.targets[:, None]).sum().backward()

    def row(name: str, passes: Callable[[Engine, MicroBatch], None], chunk_mib: int) -> Row:
        gc.collect()  # of the engine before
        engine = engine_of(measurement.shape, replace(options, head_chunk_mib=chunk_mib))
        passes_s, passes_gib = timed(partial(passes, engine, batch))
        step: Row = {"step_s": "", "step_gib": ""}
        if passes is both_passes:
            step["step_s"], step["step_gib"] = timed(partial(train_step, engine, [batch], facts_of(batch, 1)))
        what = {"shape": measurement.shape.name, "tokens": measurement.tokens, "logits": name}
        return {**what, "passes_s": passes_s, "passes_gib": passes_gib, **step}

    return [
        row("chunks", both_passes, options.head_chunk_mib),
        row("one chunk", both_passes, 1 + (measurement.tokens * config.vocabulary >> 18)),
        row("torch's", plain, options.head_chunk_mib),
    ]


def measure_padded(measurement: Measurement, dtype: str, longest: int) -> list[Row]:
    engine = engine_of(measurement.shape, options_of(measurement, dtype))
    lengths = lognormal_lengths(measurement.tokens, longest)
    rows: list[Row] = []
    for name, padded in (("packed", lengths), ("padded", np.full_like(lengths, lengths.max()))):
        batches = [microbatch(part, engine.config.vocabulary) for part in cut(padded, max(measurement.tokens, longest))]
        seconds, _ = timed(partial(both_passes, engine, *batches))
        times = seconds / rows[0]["passes_s"] if rows else 1.0
        rows.append({"layout": name, "tokens": int(padded.sum()), "passes_s": seconds, "times_packed": times})
    return rows


def measure_weights(shape: Shape, dtype: str) -> list[Row]:
    tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in random_tensors(shape.config)}
    live = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def copy() -> None:
        for name, tensor in tensors.items():
            live[name].copy_(tensor, non_blocking=True)

    digest_s, _ = timed(partial(digest, tensors))
    copy_s, _ = timed(copy)
    same = digest(tensors) == digest(live)
    row = {
        "shape": shape.name,
        "gb": size / 1e9,
        "digest_gb_s": size / digest_s / 1e9,
        "copy_gb_s": size / copy_s / 1e9,
        "same_digest": same,
        "ok": same,
    }
    return [row]


if __name__ == "__main__":
    sys.exit(main())
