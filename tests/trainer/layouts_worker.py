"""One rank of a trainer in one layout after another: `layouts_worker.py FOLDER`. Rank 0 writes what came out of each to
FOLDER/ranks_<n>/<layout>.npz, for the tests to compare with those of one rank."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from layouts import LAYOUTS, MODELS, OPTIONS, SHAPES
from trainer_data import alone, facts, merged, microbatches, without_reference

from prl.config.hf_config import ModelConfig
from prl.config.layout import layout_of
from prl.streams.records import MicroBatch
from prl.trainer.options import TrainOptions


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
        elif name.endswith("_alone"):
            batches = alone(batches)
        mine = batches[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
        if ranks == 1 or name == "tensor":
            found["kept_bytes"] = np.array(kept_bytes(engine))
        for step in (1, 2):
            metrics = train_step(engine, mine, facts(step))
            told = channel.gather({key: x for key, x in metrics.items() if not key.endswith(("_s", "/mfu"))})
            assert told == [told[0]] * ranks, told
            found |= {f"{step}:{key}": np.array(value) for key, value in metrics.items()}
            made = gradients(engine) | value_head(engine, channel, "main_grad")
            found |= {f"{'gradient' if step == 1 else 'next_gradient'}:{key}": value for key, value in made.items()}
        found |= {f"end:{key}": value for key, value in (exported(engine) | value_head(engine, channel, "data")).items()}
        for key in ("stage", "parameters", "gradients", "optimizer"):
            found[f"bytes:{key}"] = np.array([held[key] for held in channel.gather(held_bytes(engine))])
        if rank == 0:
            np.savez(results / f"{model}_{name}.npz", **found)

    def shapes() -> None:
        """What Megatron says to models of these shapes, as tensor-parallel ranks."""
        options = replace(OPTIONS, tensor_parallel=ranks)
        start_groups(options, timeout_s=120.0)
        said = {}
        for shape, config in SHAPES.items():
            try:
                build_model(config, options)
                said[shape] = np.array("")
            except (ValueError, AssertionError) as error:
                said[shape] = np.array(str(error) or "refused")
        if rank == 0:
            np.savez(results / "shapes.npz", **said)

    if ranks == 4:
        shapes()
        leave_groups()
    for model, layouts in LAYOUTS[ranks].items():
        for name, changes in layouts.items():
            if len(sys.argv) < 3 or sys.argv[2] in f"{model}_{name}":
                steps_of(model, name, replace(OPTIONS, **changes))  # type: ignore[arg-type]
                leave_groups()
    stop_groups()


def routed(batch: MicroBatch, seed: int) -> MicroBatch:
    """With two of four experts for each token and layer, as if a sampler had recorded them; none for the first tokens."""
    every = np.tile(np.arange(4, dtype=np.int16), (len(batch.tokens), 2, 1))
    found = np.random.default_rng(seed).permuted(every, axis=-1)[:, :, :2]
    found[:3] = -1
    return replace(batch, routings=found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
