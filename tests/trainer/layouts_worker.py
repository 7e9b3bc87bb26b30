"""One rank of a trainer in one layout after another: `layouts_worker.py FOLDER`. Rank 0 writes what came out of each to
FOLDER/ranks_<n>/<layout>.npz, for the tests to compare with those of one rank."""

import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from trainer_data import BASE, facts, merged, microbatches, without_reference

from prl.config.hf_config import ModelConfig, model_config
from prl.config.layout import layout_of
from prl.streams.records import MicroBatch
from prl.trainer.options import TrainOptions

OPTIONS = TrainOptions(
    learning_rate=1e-3,
    clip_grad=1e6,
    entropy_coefficient=0.01,
    kl_coefficient=0.1,
    weight_decay=0.01,
    reference="initial",
    peak_tflops=1.0,
)
TIED = model_config(BASE | {"model_type": "qwen3", "tie_word_embeddings": True})
EXPERTS = model_config(
    BASE
    | {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_hidden_layers": 2}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
)
BIASED = model_config(
    {key: value for key, value in BASE.items() if key != "head_dim"} | {"model_type": "qwen2", "tie_word_embeddings": False}
)
MODELS: dict[str, ModelConfig] = {
    "tied": TIED,
    "values": TIED,  # with a value head
    "biased": BIASED,
    "sequences": BIASED,  # with a loss of whole sequences
    "untied": model_config(BASE | {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 4}),
    "experts": EXPERTS,
    "routed": EXPERTS,  # tokens go to experts that were recorded
}
SPLIT = {"tensor_parallel": 2, "sequence_parallel": True}
STAGES = {"pipeline_parallel": 2}
TURNS = STAGES | {"virtual_pipeline": 2}
SHARED = {"distributed_optimizer": True}
CONTEXT = {"context_parallel": 2}  # without Transformer Engine: see gathered_attention.py
SEQUENCES = {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.1, "sequence_mask_low": 0.9, "sequence_mask_high": 1.2}
VALUES = {"value_head": True, "gae_gamma": 0.99, "gae_lambda": 0.9, "value_rate_factor": 10.0, "kl_place": "reward"}

# Ranks, then the model, then its layouts. "merged" is one micro-batch of the same tokens, "idle" too: it leaves ranks none.
LAYOUTS: dict[int, dict[str, dict[str, dict[str, object]]]] = {
    1: {
        "tied": {"one": {}, "one_merged": {}, "one_recomputed": {"recompute": "full"}, "one_half": {"dtype": "bfloat16"}},
        "untied": {"one": {}, "one_recomputed": {"recompute": "selective"}},
        "biased": {"one": {}},
        "experts": {"one": {}, "one_recomputed": {"recompute": "selective"}},
        "routed": {"one": {}, "one_recomputed": {"recompute": "full"}},
        "sequences": {"one": SEQUENCES},
        "values": {
            "one": VALUES,
            "one_merged": VALUES,
            "one_half": VALUES | {"dtype": "bfloat16"},
            "one_stopped": VALUES | {"value_stop_gradient": True},
            "one_slight": VALUES | {"value_coefficient": 1e-9},
        },
    },
    2: {
        "tied": {
            "tensor": {"tensor_parallel": 2},
            "sequence": SPLIT,
            "stages": STAGES,
            "stages_merged": STAGES,
            "turns": TURNS,
            "data": {},
            "data_idle": {},
            "data_shared": SHARED,
            "context": CONTEXT,
            "context_merged": CONTEXT | {"recompute": "full"},
            "context_shared": CONTEXT | SHARED,
        },
        "untied": {"stages": STAGES},
        "biased": {"tensor": {"tensor_parallel": 2}, "sequence": SPLIT, "stages": STAGES, "data_shared": SHARED},
        "sequences": {"context": SEQUENCES | CONTEXT},
        "experts": {
            "sequence": SPLIT,
            "experts": {"expert_parallel": 2},
            "experts_recomputed": {"expert_parallel": 2, "recompute": "full"},
            "experts_idle": {"expert_parallel": 2},
            "context_experts": CONTEXT | {"expert_parallel": 2},
            "sequence_experts": SPLIT | {"expert_parallel": 2},
        },
        "routed": {
            "sequence_experts": SPLIT | {"expert_parallel": 2},
            "stages_recomputed": STAGES | {"recompute": "full"},
            "data": {},
            "context": CONTEXT,
        },
        "values": {
            "tensor": VALUES | {"tensor_parallel": 2},
            "sequence": VALUES | SPLIT,
            "stages": VALUES | STAGES,
            "data_shared_idle": VALUES | SHARED,
            "context": VALUES | CONTEXT,
        },
    },
    4: {
        "tied": {
            "sequence_stages": SPLIT | STAGES,
            "sequence_data_shared": SPLIT | SHARED,
            "stages_data_shared": STAGES | SHARED,
            "turns_data": TURNS,
            "half_shared": STAGES | SHARED | {"dtype": "bfloat16"},
            "sequence_context": SPLIT | CONTEXT,
            "stages_context": STAGES | CONTEXT,
            "context_data_shared": CONTEXT | SHARED,
            "context": {"context_parallel": 4},
        },
        "sequences": {"context_data_idle": SEQUENCES | CONTEXT},
        "untied": {"four_stages": {"pipeline_parallel": 4}},
        "experts": {
            "experts_data_shared": SHARED | {"expert_parallel": 2},
            "sequence_experts": SPLIT | {"expert_parallel": 4},
            "stages_experts": STAGES | {"expert_parallel": 2},
            "all": SPLIT | STAGES | SHARED | {"expert_parallel": 2},
            "sequence_context_experts": SPLIT | CONTEXT | {"expert_parallel": 4},
        },
        "values": {
            "sequence_turns": VALUES | SPLIT | TURNS,
            "sequence_data_shared": VALUES | SPLIT | SHARED,
            "sequence_context": VALUES | SPLIT | CONTEXT,
        },
    },
    8: {
        "tied": {"all": SPLIT | TURNS | SHARED, "all_merged": SPLIT | STAGES | {"recompute": "selective"}},
        "experts": {"all": SPLIT | STAGES | SHARED | {"expert_parallel": 2}},
    },
}


def main(folder: Path) -> None:
    from prl.trainer import device

    device.install(1)
    import torch
    import torch.distributed as dist
    from gathered_attention import attention_of
    from megatron.core import parallel_state
    from regroup import leave_groups

    from prl.trainer.batch import to_device
    from prl.trainer.engine import Engine, build_engine
    from prl.trainer.head import hidden_states
    from prl.trainer.mapping import export_weights, load_weights, named_parameters
    from prl.trainer.model import build_model, unwrap
    from prl.trainer.parallel import Channel, shares_weights, start_groups, stop_groups
    from prl.trainer.reference import build_reference
    from prl.trainer.step import train_step
    from prl.trainer.table import random_weights
    from prl.weights.shards import trainer_shards

    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    results = folder / f"ranks_{ranks}"

    def weights(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Larger than fresh ones, so that all of them matter."""
        for name, tensor in random_weights(config, 3):
            whole = tensor[...]
            yield name, whole if whole.ndim == 1 else whole * 5

    def unlike_the_plan(chunks: list[torch.nn.Module], config: ModelConfig, options: TrainOptions) -> list[str]:
        """Parameters of this rank that differ, in name, size or contents, from what plans of lanes take from it."""
        parameters = {name: parameter.detach() for name, parameter in named_parameters(chunks).items()}
        full = [tensor.reshape(len(tensor), -1) for _, tensor in weights(config)]
        rows: Counter[str] = Counter()
        wrong = []
        for held in trainer_shards(config, layout_of(options), ranks)[rank]:
            name = next((name for name in held.parameters if name in parameters), None)
            if name is None:
                wrong.append(f"no {' or '.join(held.parameters)}")
                continue
            matrix, tile = parameters[name].reshape(len(parameters[name]), -1), held.tile
            expected = full[tile.tensor][tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns]
            if not torch.equal(matrix[held.index(tile)], expected.to(matrix.dtype)) or matrix.shape[1] != tile.columns:
                wrong.append(name)
            rows[name] += tile.rows
        for name, parameter in parameters.items():
            if rows[name] != len(parameter) and (parameter[rows[name] :] != 0).any():  # zeros pad the vocabulary
                wrong.append(f"{name} has {len(parameter)} rows, not {rows[name]}")
        return wrong

    def exported(engine: Engine) -> dict[str, np.ndarray]:
        if not shares_weights():
            return {}
        return {name: tensor.float().numpy().copy() for name, tensor in export_weights(engine.chunks, engine.config)}

    def gradients(engine: Engine) -> dict[str, np.ndarray]:
        """Of the step that was just made, in Hugging Face's form."""
        for chunk in engine.chunks if engine.options.distributed_optimizer else ():
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:  # of which each rank has summed a part
                    own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
        parameters = named_parameters(engine.chunks).values()
        kept = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.main_grad.to(parameter.dtype, copy=True)  # of another it would lose Megatron's hook
        found = exported(engine)
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data
        return found

    def value_head(engine: Engine, channel: Channel, attribute: str) -> dict[str, np.ndarray]:
        """Of a value head's weight, if there is one: what the last pipeline stage holds."""
        weights = [gpt.value_head.weight for gpt in engine.gpts if hasattr(gpt, "value_head")]
        told = channel.gather([getattr(weight, attribute).tolist() for weight in weights])
        held = [values for of_rank in told for values in of_rank]
        return {"value_head": np.array(held[0], np.float32)} if held else {}

    def held_bytes(engine: Engine) -> dict[str, int]:
        """Parameters, gradients and optimizer state of this rank, counted."""
        parameters = [p for chunk in engine.chunks for p in chunk.parameters()]
        buffers = [b for chunk in engine.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
        state = 0
        for optimizer in optimizers:
            for parameter, moments in optimizer.optimizer.state.items():
                state += sum(x.nbytes for x in moments.values() if torch.is_tensor(x) and x.ndim)
                state += parameter.nbytes if engine.options.dtype == "bfloat16" else 0  # the copy in float32
        return {
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "parameters": sum(p.nbytes for p in parameters),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": state,
        }

    def kept_bytes(engine: Engine) -> int:
        """Of the activations that one micro-batch of equally long sequences leaves for the backward pass."""
        batch = to_device(merged([microbatches()[2]] * 4), 1)
        own = {p.untyped_storage().data_ptr() for p in engine.chunks[0].parameters()}
        found: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and tensor.dtype is torch.float32:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = hidden_states(engine.chunks[0], batch)
        del output
        return sum(found.values())

    def steps_of(model: str, name: str, options: TrainOptions) -> None:
        start_groups(options, timeout_s=120.0)
        channel = Channel(120.0)
        config = MODELS[model]
        with attention_of(options):
            chunks = build_model(config, options)
            reference = build_reference(config, options, weights(config))
        load_weights(chunks, config, weights(config))
        for gpt in map(unwrap, chunks):
            if hasattr(gpt, "value_head"):
                gpt.value_head.weight.data.copy_(torch.linspace(-0.4, 0.5, config.hidden_size))
        unlike = [
            f"rank {number}: {wrong}" for number, wrong in enumerate(channel.gather(unlike_the_plan(chunks, config, options)))
        ]
        engine = build_engine(chunks, config, options, reference)
        found = {f"start:{key}": value for key, value in (exported(engine) | value_head(engine, channel, "data")).items()}
        found["unlike_the_plan"] = np.array([words for words in unlike if not words.endswith(": []")], dtype=str)
        found["reference"] = np.array(str(engine.reference.digest if engine.reference else None))
        batches = [without_reference(batch) for batch in microbatches()]
        if model == "routed":
            batches = [routed(batch, seed) for seed, batch in enumerate(batches)]
        if name.endswith(("_merged", "_idle")):
            batches = [merged(batches)]
        mine = batches[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
        if ranks == 1:
            found["kept_bytes"] = np.array(kept_bytes(engine))
        for step in (1, 2):
            metrics = train_step(engine, mine, facts(step))
            told = channel.gather({key: x for key, x in metrics.items() if not key.endswith(("_s", "/mfu"))})
            assert all(other == told[0] or _nearly(other, told[0]) for other in told)
            found |= {f"{step}:{key}": np.array(value) for key, value in metrics.items()}
            if step == 1:
                made = gradients(engine) | value_head(engine, channel, "main_grad")
                found |= {f"gradient:{key}": value for key, value in made.items()}
        found |= {f"end:{key}": value for key, value in (exported(engine) | value_head(engine, channel, "data")).items()}
        for key in ("stage", "parameters", "gradients", "optimizer"):
            found[f"bytes:{key}"] = np.array([held[key] for held in channel.gather(held_bytes(engine))])
        if rank == 0:
            np.savez(results / f"{model}_{name}.npz", **found)
        leave_groups()

    for model, layouts in LAYOUTS[ranks].items():
        for name, changes in layouts.items():
            if len(sys.argv) < 3 or sys.argv[2] in f"{model}_{name}":
                steps_of(model, name, replace(OPTIONS, **changes))  # type: ignore[arg-type]
    stop_groups()


def routed(batch: MicroBatch, seed: int) -> MicroBatch:
    """With two of four experts for each token and layer, as if a sampler had recorded them; none for the first tokens."""
    every = np.tile(np.arange(4, dtype=np.int16), (len(batch.tokens), 2, 1))
    found = np.random.default_rng(seed).permuted(every, axis=-1)[:, :, :2]
    found[:3] = -1
    return replace(batch, routings=found)


def _nearly(one: dict[str, float], other: dict[str, float]) -> bool:
    return one.keys() == other.keys() and all(math.isclose(one[key], other[key], rel_tol=1e-6) for key in one)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
