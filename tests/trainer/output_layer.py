"""What a trainer rank makes of its output layer, for the worker: the memory that logits take, and the digits that they keep."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from trainer_data import merged, microbatches

from prl.trainer.batch import to_device
from prl.trainer.engine import Engine
from prl.trainer.head import hidden_states, token_logprobs
from prl.trainer.mapping import export_weights
from prl.trainer.model import unwrap
from prl.trainer.options import TrainOptions
from prl.trainer.reference import build_reference
from prl.trainer.step import train_step

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import trainer_shapes
from live_bytes import LiveBytes

WIDE_VOCABULARY = trainer_shapes.qwen("wide vocabulary", 16, 16, 1, 2, 1, 4095, tied=False)


def memory(options: TrainOptions) -> dict[str, np.ndarray]:
    """Most bytes at one time, and in one tensor, of a whole step and of both passes of the output layer alone: with logits in
    chunks of 1 MiB of float32 (also those of a bfloat16 model), and in one."""
    config = WIDE_VOCABULARY.config
    batch = trainer_shapes.microbatch(np.full(64, 32), config.vocabulary)
    own = to_device(batch, options.tensor_parallel)
    found = {}
    for name, chunk_mib, dtype in (("chunks", 1, "float32"), ("half", 1, "bfloat16"), ("whole", 1024, "float32")):
        chosen = replace(options, head_chunk_mib=chunk_mib, dtype=dtype, reference="initial")
        reference = build_reference(config, chosen, trainer_shapes.random_tensors(config))
        engine = replace(trainer_shapes.engine_of(WIDE_VOCABULARY, chosen), reference=reference)
        train_step(engine, [batch], trainer_shapes.facts_of(batch, 1))  # from here on the optimizer's state is there
        with LiveBytes() as step:
            train_step(engine, [batch], trainer_shapes.facts_of(batch, 2))
        hidden = hidden_states(engine.chunks[0], own).detach().requires_grad_()
        with LiveBytes() as head:
            logprobs, entropies = token_logprobs(engine.chunks[0], hidden, own.targets, config, chosen)
            (logprobs.sum() + entropies.sum()).backward()
        for part, live in (("step", step), ("head", head)):
            found |= {f"{name}:{part}:peak": np.array(live.peak), f"{name}:{part}:largest": np.array(live.largest)}
    return found


def digits(engine_of: Callable[[str, TrainOptions], Engine], options: TrainOptions) -> dict[str, np.ndarray]:
    """Of a bfloat16 model, for both dtypes of the output layer: log-probs, entropies and gradients, with what they are made
    of and their dtypes."""
    found = {}
    for head_dtype in ("same", "float32"):
        chosen = replace(options, dtype="bfloat16", head_dtype=head_dtype)
        engine = engine_of("qwen3", chosen)
        own = to_device(merged(microbatches()), options.tensor_parallel)
        hidden = hidden_states(engine.chunks[0], own).detach().requires_grad_()
        logprobs, entropies = token_logprobs(engine.chunks[0], hidden, own.targets, engine.config, chosen)
        factors = torch.linspace(-1, 2, len(logprobs))
        (logprobs * factors + entropies * factors.flip(0)).sum().backward()
        exported = dict(export_weights(engine.chunks, engine.config))
        shard = unwrap(engine.chunks[0]).shared_embedding_or_output_weight().main_grad
        group = parallel_state.get_tensor_model_parallel_group()
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard, group=group)
        dtypes = {"logprobs": logprobs.dtype, "entropies": entropies.dtype, "of_hidden": hidden.grad.dtype}
        values = {
            "hidden": hidden.detach().squeeze(1),
            "weight": exported["model.embed_tokens.weight"],
            "targets": own.targets,
            "factors": factors,
            "logprobs": logprobs.detach(),
            "entropies": entropies.detach(),
            "of_hidden": hidden.grad.squeeze(1),
            "of_weight": torch.cat(shards)[: engine.config.vocabulary],
        }
        found |= {f"{head_dtype}:{part}": (x if part == "targets" else x.double()).numpy().copy() for part, x in values.items()}
        found |= {f"{head_dtype}:dtype:{part}": np.array(str(dtype)) for part, dtype in dtypes.items()}
        found[f"{head_dtype}:exported"] = np.array(sorted({str(tensor.dtype) for tensor in exported.values()}))
    return found
