"""One rank of the tests of model families: `families_worker.py FOLDER`. Loads every model, computes and exports it, for one
rank or two; rank 0 writes what came out to FOLDER/ranks_<n>/<layout>_<model>.npz."""

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from families import CONFIGS, EXPERT_MODELS, LENGTHS, microbatch, routings
from trainer_data import VOCABULARY, facts, microbatches

from prl.trainer.options import TrainOptions

SEED = 11


@dataclass
class Counted:
    """A tensor in a file, and what is read of it."""

    tensor: Any
    reads: list[int] = field(default_factory=list)  # bytes
    memory: list[int] = field(default_factory=list)  # of this process, at each read

    def __getitem__(self, index: Any) -> Any:
        part = self.tensor[index]
        self.reads.append(part.nbytes)
        self.memory.append(own_memory())
        return part


def own_memory() -> int:
    """Bytes of this process that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main(folder: Path) -> None:
    from prl.trainer import device

    device.install(1)
    import gpu_attention
    import torch
    from lanes_received import sent_by_lanes
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from regroup import leave_groups

    from prl.config.hf_config import read_model_config
    from prl.trainer.batch import to_device
    from prl.trainer.checkpoint import begin_save, finish_save, load_checkpoint
    from prl.trainer.engine import Engine, build_engine
    from prl.trainer.head import hidden_states, token_logprobs
    from prl.trainer.hf_folder import read_weights, write_folder
    from prl.trainer.lora import add_adapters
    from prl.trainer.mapping import export_weights, load_weights
    from prl.trainer.model import build_model, unwrap
    from prl.trainer.packing import packed_sequences
    from prl.trainer.parallel import Channel, start_groups, stop_groups
    from prl.trainer.step import train_step
    from prl.trainer.table import random_weights
    from prl.weights.digest import digest

    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    results = folder / f"ranks_{ranks}"

    def report(name: str, values: dict[str, np.ndarray]) -> None:
        if rank == 0:
            np.savez(results / f"{name}.npz", **values)

    def arrays(tensors: Iterable[tuple[str, torch.Tensor]], prefix: str = "") -> dict[str, np.ndarray]:
        return {prefix + name: tensor.float().numpy().copy() for name, tensor in tensors}

    def loaded(name: str, options: TrainOptions) -> tuple[Any, Any]:
        config = read_model_config(folder / name)
        chunks = build_model(config, options)
        load_weights(chunks, config, read_weights(folder / name, config))
        return config, chunks

    def logits_of(model: Any, experts: np.ndarray | None = None) -> torch.Tensor:
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        tokens = torch.from_numpy(np.random.default_rng(3).integers(0, VOCABULARY, len(positions)))
        given = None if experts is None else torch.from_numpy(experts.astype(np.int64))
        sequences = packed_sequences(np.cumsum([0, *LENGTHS]).astype(np.int32), positions, given)
        logits = model(tokens[None], positions[None], None, packed_seq_params=sequences)
        return gather_from_tensor_model_parallel_region(logits)[0, :, :VOCABULARY]

    def parity(layout: str, name: str, options: TrainOptions) -> None:
        config, chunks = loaded(name, options)
        chunks[0].eval()
        with torch.no_grad():
            found = {"logits": logits_of(chunks[0]).numpy()}
        report(f"{layout}_{name}", found | arrays(export_weights(chunks, config)))

    def gradients(label: str, name: str, options: TrainOptions, experts: np.ndarray | None = None) -> None:
        """Of weighted log-probs, as the trainer has them."""
        config, chunks = loaded(name, options)
        batch = to_device(replace(microbatch(), routings=experts), 1)
        logprobs, _ = token_logprobs(chunks[0], hidden_states(chunks[0], batch), batch.targets, config, options)
        (logprobs * batch.weights).sum().backward()
        for parameter in chunks[0].parameters():
            parameter.data = parameter.grad
        report(f"{label}_{name}", arrays(export_weights(chunks, config)))

    def replayed(layout: str, name: str, options: TrainOptions) -> None:
        _, chunks = loaded(name, options)
        with torch.no_grad():
            found = {"given": logits_of(chunks[0], routings()), "own": logits_of(chunks[0])}
            found["evaluated"] = logits_of(chunks[0].eval(), routings())
        report(f"replayed_{layout}_{name}", {key: logits.numpy() for key, logits in found.items()})

    def routed() -> None:
        """A micro-batch's routings as the model is given them, for a number of tokens that ranks can share."""
        batch = microbatches()[0]
        given = routings()[: len(batch.tokens)]
        sequences = to_device(replace(batch, routings=given), 4).sequences
        report("routed", {"given": given, "found": sequences.routings.numpy()})

    def adapted(layout: str, options: TrainOptions) -> None:
        """Three steps that train adapters (and a value head); the last one also from a checkpoint of the first two: one rank's,
        but where the optimizer is distributed or there is a value head."""
        config, chunks = loaded("qwen2_linear", options)
        report(f"adapted_start_{layout}", arrays(export_weights(chunks, config)))
        engine, channel, losses = build_engine(chunks, config, options), Channel(60.0), []
        for step in (1, 2, 3):
            mine = microbatches()[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
            metrics = train_step(engine, mine, facts(step))
            losses.append((metrics["train/loss"], metrics["train/grad_norm"]))
            if step == 2:
                finish_save(begin_save(engine, channel, results / f"adapted_{layout}", 2), channel, 120.0)
                report(f"adapted_saved_{layout}", arrays(export_weights(engine.chunks, config)))
        found = {"losses": np.array(losses), "trained": np.array(sum(p.requires_grad for p in chunks[0].parameters()))}
        resumed = build_engine(loaded("qwen2_linear", options)[1], config, options)
        own = options.distributed_optimizer or options.value_head
        saved = results / f"adapted_{layout}" if own else folder / "ranks_1" / "adapted_one"
        assert load_checkpoint(resumed, saved) == 2
        metrics = train_step(resumed, mine, facts(3))
        found["resumed"] = np.array([metrics["train/loss"], metrics["train/grad_norm"]])
        if parallel_state.get_tensor_model_parallel_world_size() == ranks:
            with torch.no_grad():
                found["logits"] = logits_of(chunks[0]).numpy()
        if ranks == 1:
            for name, linear in adapted_linears(chunks[0]).items():
                found |= {f"{name}_a": linear.lora_a.detach().numpy(), f"{name}_b": linear.lora_b.detach().numpy()}
        report(f"adapted_{layout}", found | arrays(export_weights(engine.chunks, config)))
        sent(layout, "qwen2_linear", engine, channel)

    def sent(layout: str, name: str, engine: Engine, channel: Channel) -> None:
        """What workers of a sampler are sent by lanes: of which tensors it is unlike what is gathered, and unlike the model's
        own, in which adapters are not merged."""
        trained = getattr(torch, engine.options.dtype)
        for workers, dtype in product((1, 2), ("float32", "bfloat16")):
            kind = getattr(torch, dtype)
            gathered = dict(export_weights(engine.chunks, engine.config, kind))
            version = sent_by_lanes(engine, channel, workers, dtype)
            if version is None:
                continue
            own = {key: x[:].to(trained).to(kind) for key, x in read_weights(folder / name, engine.config)}
            found = {
                "unlike": sorted({piece.name for piece in version.pieces if not piece.is_of(gathered)}),
                "merged": sorted({piece.name for piece in version.pieces if not piece.is_of(own)}),
                "elements": sum(piece.tile.elements for piece in version.pieces if piece.counted),
                "digest": str(version.digest),
                "gathered": str(digest(gathered)),
                "buckets": version.buckets,
            }
            whole = [(piece.name, piece.content) for piece in version.pieces if ".1." in piece.name and layout == "one"]
            report(f"sent_{layout}_{workers}_{dtype}", {key: np.array(x) for key, x in found.items()} | arrays(whole))

    def sent_in_buckets(name: str, options: TrainOptions) -> None:
        """The same of a larger model with adapters as if they had been trained."""
        config, chunks = loaded(name, options)
        generator = torch.Generator().manual_seed(SEED)  # the same on all ranks, which hold some of them whole
        for key, parameter in chunks[0].named_parameters():
            if key.endswith("lora_b"):
                parameter.data.normal_(0.0, 0.01, generator=generator)
        sent(name, name, build_engine(chunks, config, options), Channel(60.0))

    def adapted_linears(chunk: Any) -> dict[str, Any]:
        """Of the last layer those whose weights are one tensor of Hugging Face's each."""
        layer = chunk.decoder.layers[1]
        return {"o": layer.self_attention.linear_proj, "down": layer.mlp.linear_fc2}

    def adapter_gradients(options: TrainOptions) -> None:
        _, chunks = loaded("qwen2_linear", options)
        (logits_of(chunks[0]).log_softmax(-1)[:, 7]).sum().backward()
        found = {}
        for name, linear in adapted_linears(chunks[0]).items():
            found |= {f"{name}_a": linear.lora_a, f"{name}_of_a": linear.lora_a.grad, f"{name}_of_b": linear.lora_b.grad}
        report("adapter_gradients", {name: tensor.detach().numpy() for name, tensor in found.items()})

    def refused_adapters() -> None:
        """What is said of adapters in a model with experts, and in a dense one where Transformer Engine is found."""
        words = {}
        for name, engine in (("qwen3_moe", False), ("qwen2_linear", True)):
            gpt = unwrap(loaded(name, one)[1][0])
            with mock.patch.object(device, "has_transformer_engine", return_value=engine):
                try:
                    add_adapters(gpt, adapters.lora_rank)
                except ValueError as error:
                    words[name] = np.array(str(error))
            assert all(parameter.requires_grad for parameter in gpt.parameters())
        report("refused_adapters", words)

    def drawn(layout: str, name: str, options: TrainOptions) -> None:
        config = read_model_config(folder / name)
        chunks = build_model(config, options)
        load_weights(chunks, config, random_weights(config, SEED))
        report(f"drawn_{layout}_{name}", arrays(export_weights(chunks, config)))

    def save(layout: str, name: str, options: TrainOptions) -> None:
        config, chunks = loaded(name, options)
        channel = Channel(60.0)
        finish_save(
            begin_save(build_engine(chunks, config, options), channel, results / f"saved_{layout}_{name}", 1), channel, 120.0
        )

    def counted(layout: str, name: str, options: TrainOptions) -> None:
        """Of each rank: bytes that it reads of each tensor, and its memory."""
        config = read_model_config(folder / name)
        chunks = build_model(config, options)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.zero_()  # so that the pages are there
        before, tensors = own_memory(), {}

        def source() -> Iterator[tuple[str, Counted]]:
            for key, tensor in read_weights(folder / name, config):
                tensors[key] = Counted(tensor)
                yield key, tensors[key]

        load_weights(chunks, config, source())
        parameters = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
        peak = max(memory for tensor in tensors.values() for memory in tensor.memory)
        found = {"before": before, "parameters": parameters, "peak": peak}
        found |= {key: sum(tensor.reads) for key, tensor in tensors.items()}
        of_ranks = Channel(60.0).gather(found)
        report(f"counted_{layout}_{name}", {key: np.array([one[key] for one in of_ranks]) for key in found})

    def restart(options: TrainOptions) -> None:
        leave_groups()
        start_groups(options, timeout_s=60.0)

    one = TrainOptions(learning_rate=1e-3)
    adapters = TrainOptions(learning_rate=1e-2, clip_grad=0.05, lora_rank=4)
    if ranks == 1:
        start_groups(one, timeout_s=60.0)
        for name in [*CONFIGS, "qwen3_moe_fused"]:
            parity("one", name, one)
        for name in CONFIGS:
            gradients("gradients", name, one)
        for attention in (gpu_attention.varlen, gpu_attention.transformer_engine):
            with attention():
                for name in ("mistral", "llama_yarn"):
                    gradients(f"{attention.__name__}_gradients", name, one)
        for name in EXPERT_MODELS:
            replayed("one", name, one)
            gradients("replayed_gradients", name, replace(one, recompute="full"), routings())
        routed()
        adapted("one", adapters)
        adapted("values", replace(adapters, value_head=True))
        adapted("recomputed", replace(adapters, recompute="full"))
        adapter_gradients(adapters)
        refused_adapters()
        config, chunks = loaded("qwen3_moe", one)
        write_folder(results / "written", export_weights(chunks, config), folder / "qwen3_moe", "float32", 20_000)
    else:
        split = replace(one, tensor_parallel=2)
        start_groups(split, timeout_s=60.0)
        for name in CONFIGS:
            parity("tensor", name, split)
        for name in ("qwen3_moe", "llama_yarn"):
            parity("sequence", name, replace(split, sequence_parallel=True))
        replayed("sequence", "qwen3_moe", replace(split, sequence_parallel=True))
        drawn("tensor", "qwen3_moe", split)
        save("tensor", "mistral", split)
        counted("tensor", "large", split)
        adapted("tensor", replace(adapters, tensor_parallel=2))
        adapted("sequence", replace(adapters, tensor_parallel=2, sequence_parallel=True))
        sent_in_buckets("large", replace(adapters, tensor_parallel=2, sequence_parallel=True, dtype="bfloat16"))
        experts = replace(one, expert_parallel=2)
        restart(experts)
        for name in EXPERT_MODELS:
            parity("experts", name, experts)
        replayed("experts", "qwen3_moe", experts)
        drawn("experts", "qwen3_moe", experts)
        save("experts", "qwen3_moe", experts)
        for name in ("qwen3_moe", "qwen3_moe_fused"):
            counted("experts", name, experts)
        restart(adapters)
        adapted("data", replace(adapters, distributed_optimizer=True))
        stages = replace(one, pipeline_parallel=2)
        restart(stages)
        drawn("stages", "qwen3_moe", stages)
        save("stages", "llama_yarn", stages)
        for name in ("large", "llama_yarn"):
            counted("stages", name, stages)
        adapted("stages", replace(adapters, pipeline_parallel=2))
        both = replace(split, sequence_parallel=True, expert_parallel=2)
        restart(both)
        counted("tensor_experts", "qwen3_moe", both)
    stop_groups()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
