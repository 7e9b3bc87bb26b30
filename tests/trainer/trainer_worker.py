"""One rank of the tests' trainer: `trainer_worker.py FOLDER`. Does everything that needs Megatron in one start, for one rank
or for two, and rank 0 writes what came out to FOLDER/ranks_<n>/<name>.npz for the tests to judge."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from trainer_data import RISING_KL, VOCABULARY, facts, merged, microbatches, rewarded, without_reference

from prl.trainer.options import TrainOptions

ARCHITECTURES = ("qwen2", "qwen3", "llama")
SCHEDULE = {"learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.2, "clip_grad": 0.05, "epsilon": 1e-4}
DECAY = {"learning_rate": 0.1, "weight_decay": 0.5, "entropy_coefficient": 0.0, "kl_coefficient": 0.0}
OPTIONS = TrainOptions(learning_rate=1e-3, clip_grad=1e6, entropy_coefficient=0.01, kl_coefficient=0.1, weight_decay=0.01)


def main(folder: Path) -> None:
    from prl.trainer import device

    device.install(1)
    import output_layer
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from torch.nn import functional

    from prl.config.hf_config import read_model_config
    from prl.config.tensors import tensor_shapes
    from prl.trainer.checkpoint import begin_save, finish_save, load_checkpoint
    from prl.trainer.engine import Engine, build_engine
    from prl.trainer.head import Head, logprobs_and_entropies
    from prl.trainer.hf_folder import read_weights, write_folder
    from prl.trainer.mapping import export_weights, load_weights, named_parameters
    from prl.trainer.model import build_model
    from prl.trainer.packing import buckets, packed_sequences
    from prl.trainer.parallel import Channel, start_groups, stop_groups
    from prl.trainer.reference import Reference, build_reference
    from prl.trainer.step import train_step
    from prl.trainer.table import random_weights
    from prl.trainer.value_head import ValueHead
    from prl.weights.digest import digest

    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    results = folder / f"ranks_{ranks}"
    tensor_parallel = replace(OPTIONS, tensor_parallel=ranks)
    start_groups(tensor_parallel, timeout_s=60.0)

    def report(name: str, values: dict[str, np.ndarray]) -> None:
        if rank == 0:
            np.savez(results / f"{name}.npz", **values)

    def arrays(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
        return {name: tensor.float().numpy().copy() for name, tensor in tensors}

    def engine_of(source: str, options: TrainOptions) -> Engine:
        config = read_model_config(folder / source)
        chunks = build_model(config, options)
        load_weights(chunks, config, read_weights(folder / source, config))
        return build_engine(chunks, config, options, reference_of(source, options) if options.reference == "initial" else None)

    def reference_of(source: str, options: TrainOptions) -> Reference:
        config = read_model_config(folder / source)
        return build_reference(config, options, read_weights(folder / source, config))

    def gradients(engine: Engine) -> dict[str, np.ndarray]:
        """Of the step that was just made, in Hugging Face's form."""
        parameters = named_parameters(engine.chunks).values()
        kept = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.main_grad.clone()
        found = arrays(export_weights(engine.chunks, engine.config))
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data
        return found

    def full_logits(engine: Engine, tokens: np.ndarray, lengths: list[int]) -> torch.Tensor:
        ids = torch.from_numpy(tokens.astype(np.int64))
        positions = torch.cat([torch.arange(n) for n in lengths])
        sequences = packed_sequences(np.cumsum([0, *lengths]).astype(np.int32), positions)
        with torch.no_grad():
            logits = engine.chunks[0](ids[None], positions[None], None, packed_seq_params=sequences)
            return gather_from_tensor_model_parallel_region(logits)[0, :, :VOCABULARY]

    def forward_and_export() -> None:
        lengths = [3, 17, 9, 1, 16, 9]
        tokens = np.random.default_rng(3).integers(0, VOCABULARY, sum(lengths))
        for source in ARCHITECTURES:
            engine = engine_of(source, tensor_parallel)
            logits = full_logits(engine, tokens, lengths).numpy()
            report(f"logits_{source}", {"tokens": tokens, "lengths": np.array(lengths), "logits": logits})
            exported = arrays(export_weights(engine.chunks, engine.config))
            assert {name: value.shape for name, value in exported.items()} == tensor_shapes(engine.config)
            report(f"export_{source}", exported)

    def steps_of(name: str, options: TrainOptions, split: Callable[[], list], count: int = 3, source: str = "qwen3") -> Engine:  # type: ignore[type-arg]
        """Metrics of some steps and the gradients of the first; returns the engine after them."""
        engine = engine_of(source, options)
        found: dict[str, np.ndarray] = {}
        for step in range(1, count + 1):
            mine = split()[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
            metrics = train_step(engine, mine, facts(step))
            found.update({f"{step}:{key}": np.array(value) for key, value in metrics.items()})
            if step == 1:
                found.update(gradients(engine))
                if options.value_head:
                    found["value_head"] = engine.gpts[0].value_head.weight.main_grad.numpy().copy()
        report(name, found)
        return engine

    def frozen_logprobs(trained: Engine) -> None:
        """What the reference says after some steps, what one says that is built again, and both digests."""
        batch = without_reference(merged(microbatches()))
        found = {}
        for name, reference in (("kept", trained.reference), ("again", reference_of("qwen3", trained.options))):
            assert reference is not None
            found[name] = reference.logprobs([batch])[0].numpy()
            found[f"{name}_digest"] = np.array(str(reference.digest))
        weights = dict(export_weights(reference.chunks, reference.config))
        found["weights_digest"] = np.array(str(digest(weights)))
        report("frozen", found)

    def drawn() -> None:
        config = read_model_config(folder / "qwen2")
        chunks = build_model(config, tensor_parallel)
        load_weights(chunks, config, random_weights(config, 11))
        report("drawn", arrays(export_weights(chunks, config)))

    def checkpoints() -> None:
        """Two steps, save, two more; then the same two from the checkpoint, and from the one that one rank wrote."""
        engine = engine_of("qwen2", replace(tensor_parallel, reference="initial"))

        def losses(engine: Engine, *steps: int) -> np.ndarray:
            metrics = [train_step(engine, microbatches(), facts(step)) for step in steps]
            return np.array([(m["train/loss"], m["train/grad_norm"]) for m in metrics])

        losses(engine, 1, 2)
        channel = Channel(60.0)
        finish_save(begin_save(engine, channel, results / "step_000002", 2), channel, 120.0)
        found = {"went_on": losses(engine, 3, 4)}
        for name, saved_by in (("resumed", ranks), ("resumed_from_one", 1)):
            fresh = engine_of("qwen2", tensor_parallel)
            assert load_checkpoint(fresh, folder / f"ranks_{saved_by}" / "step_000002") == 2
            found[name] = losses(fresh, 3, 4)
        assert engine.reference is not None
        other = replace(engine, reference=replace(engine.reference, digest=5))
        for name, resumed in (("same_reference", engine), ("other_reference", other)):
            try:
                load_checkpoint(resumed, results / "step_000002")
                found[name] = np.array("loaded")
            except ValueError as error:
                found[name] = np.array(str(error))
        report("checkpoint", found)
        exported(engine)

    def exported(engine: Engine) -> None:
        weights = export_weights(engine.chunks, engine.config)
        if rank == 0:
            write_folder(results / "exported", weights, folder / "qwen2", "float32")
        else:
            list(weights)
        prompts, answers = [[5, 9, 30], [1, 2, 50, 4, 17, 22]], []
        for prompt in prompts:
            tokens = np.array(prompt)
            for _ in range(8):
                tokens = np.append(tokens, int(full_logits(engine, tokens, [len(tokens)])[-1].argmax()))
            answers.append(tokens[-8:])
        report("greedy", {f"prompt_{k}": np.array(p) for k, p in enumerate(prompts)} | {"answers": np.array(answers)})

    def head_values() -> None:
        """What the output layer's chunks make of random hidden states, and the gradients over all ranks."""
        group = parallel_state.get_tensor_model_parallel_group()
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(13, 8, generator=generator, dtype=torch.float64)
        weight = torch.randn(-(-VOCABULARY // ranks) * ranks, 8, generator=generator, dtype=torch.float64)
        targets = torch.arange(13) * 4 % VOCABULARY
        factors = torch.linspace(-1, 2, 13, dtype=torch.float64)
        tensors = {"hidden": hidden, "weight": weight, "targets": targets, "factors": factors}
        found = {name: tensor.numpy() for name, tensor in tensors.items()}

        def measure(
            name: str, dtype: torch.dtype, chunk: int, entropy: float = 1.0, *, buffer: bool, exact: bool = False
        ) -> None:
            inputs = hidden.to(dtype, copy=True).requires_grad_()
            shard = weight.chunk(ranks)[rank].to(dtype, copy=True).requires_grad_()
            if buffer:
                shard.main_grad = torch.ones_like(shard)
                shard.grad_added_to_main_grad = False
            head = Head(VOCABULARY, group, chunk, float32=exact)
            logprobs, entropies = logprobs_and_entropies(inputs, shard, targets, head)
            loss = (logprobs * factors).sum()
            (loss + entropy * (entropies * factors.flip(0)).sum() if entropy else loss).backward()
            if buffer:
                assert shard.grad is None
                assert shard.grad_added_to_main_grad
            gradients = [torch.empty_like(shard) for _ in range(ranks)]
            dist.all_gather(gradients, shard.main_grad - 1 if buffer else shard.grad)
            dist.all_reduce(inputs.grad)
            values = {
                "logprobs": logprobs.detach(),
                "entropies": entropies.detach(),
                "of_hidden": inputs.grad,
                "of_weight": torch.cat(gradients),
            }
            kept = {f"{name}:{part}": value.numpy() for part, value in values.items() if value.dtype is not torch.bfloat16}
            found.update(kept)

        for dtype in ("float64", "float32"):
            for chunk in (1, 4 * VOCABULARY, 1 << 20):
                for kept in ("returned", "main_grad"):
                    measure(f"{dtype}:{chunk}:{kept}", getattr(torch, dtype), chunk, buffer=kept == "main_grad")
        measure("alone", torch.float64, 4 * VOCABULARY, 0.0, buffer=False)
        for exact in (False, True):
            name = f"half:{'float32' if exact else 'same'}"
            measure(name, torch.bfloat16, 4 * VOCABULARY, buffer=False, exact=exact)
        # A value head's, whose gradient is summed over many micro-batches.
        values = ValueHead(8, torch.bfloat16, sequence_parallel=False)
        values.weight.main_grad = torch.zeros(8)
        for shift in range(20):
            (values(hidden.bfloat16()) * factors.roll(shift).bfloat16()).sum().backward()
        assert values.weight.grad is None
        assert values.weight.grad_added_to_main_grad
        found["values:of_weight"] = values.weight.main_grad.numpy()
        report("head", found)

    def packed_attention() -> None:
        from prl.trainer.layers import PackedAttention
        from prl.trainer.model import transformer_config

        lengths = [5, 1, 12, 3, 8, 7, 12]
        config = transformer_config(read_model_config(folder / "qwen3"), tensor_parallel)
        boundaries = np.cumsum([0, *lengths]).astype(np.int32)
        generator = torch.Generator().manual_seed(2)
        heads = (4, 2, 2)
        packed = [torch.randn(sum(lengths), 1, n, 16, generator=generator).requires_grad_() for n in heads]
        plain = [x.detach().clone().requires_grad_() for x in packed]
        sequences = packed_sequences(boundaries, torch.zeros(sum(lengths), dtype=torch.int64))
        ours = PackedAttention(config)(*packed, None, packed_seq_params=sequences)
        loop = []
        for start, end in pairwise(boundaries.tolist()):
            q, k, v = (x[start:end].permute(1, 2, 0, 3) for x in plain)
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            loop.append(attended.permute(2, 0, 1, 3).flatten(2))
        theirs = torch.cat(loop)
        factors = torch.randn(theirs.shape, generator=generator)
        (ours * factors).sum().backward()
        (theirs * factors).sum().backward()
        differences = [(ours - theirs).abs().max().detach()] + [
            (a.grad - b.grad).abs().max() for a, b in zip(packed, plain, strict=True)
        ]
        slots = buckets(boundaries, torch.device("cpu")).token_of_slot.numel()
        report("attention", {"differences": np.array([float(x) for x in differences]), "slots": np.array(slots)})

    def decay(options: TrainOptions, name: str = "decay") -> None:
        """Weights before and after a step without any gradient, whose length is the rate times the decay."""
        engine = engine_of("qwen2", replace(options, **DECAY))
        start = arrays(export_weights(engine.chunks, engine.config))
        batches = [replace(batch, advantages=np.zeros_like(batch.advantages)) for batch in microbatches()]
        metrics = train_step(engine, batches, facts(1))
        assert metrics["train/grad_norm"] == 0
        end = arrays(export_weights(engine.chunks, engine.config))
        report(name, {f"start:{key}": x for key, x in start.items()} | {f"end:{key}": x for key, x in end.items()})

    def all_masked() -> None:
        """A step of which a mask leaves out every token, and nothing else trains."""
        bare = replace(tensor_parallel, entropy_coefficient=0.0, kl_coefficient=0.0, weight_decay=0.0)
        engine = engine_of("qwen3", replace(bare, token_mask_high=1e-6))
        start = arrays(export_weights(engine.chunks, engine.config))
        metrics = train_step(engine, microbatches(), facts(1))
        end = arrays(export_weights(engine.chunks, engine.config))
        same = all(np.array_equal(end[name], values) for name, values in start.items())
        report("all_masked", {"same": np.array(same)} | {key: np.array(value) for key, value in metrics.items()})

    def half_precision() -> None:
        engine = engine_of("qwen3", replace(tensor_parallel, dtype="bfloat16"))
        metrics = train_step(engine, microbatches(), facts(1))
        exported = dict(export_weights(engine.chunks, engine.config))
        assert all(tensor.dtype is torch.bfloat16 for tensor in exported.values())
        report("bfloat16", {key: np.array(value) for key, value in metrics.items()})

    forward_and_export()
    steps_of("step", tensor_parallel, microbatches)
    steps_of("step_merged", tensor_parallel, lambda: [merged(microbatches())], 1)
    steps_of("step_recomputed", replace(tensor_parallel, recompute="full"), microbatches, 1)
    steps_of("step_recomputed_selectively", replace(tensor_parallel, recompute="selective"), microbatches, 1)
    steps_of("step_untied", tensor_parallel, microbatches, 1, "llama")
    steps_of("step_reinforce", replace(tensor_parallel, loss="reinforce", truncate=1.1, peak_tflops=2.0), microbatches, 1)
    values = replace(tensor_parallel, value_head=True, learning_rate=3e-3, value_rate_factor=10.0)
    steps_of("step_values", values, rewarded, 25 if ranks == 1 else 1)
    steps_of("step_proximal", replace(tensor_parallel, loss="decoupled_ppo", proximal="previous"), microbatches)
    sequences = replace(tensor_parallel, loss="gspo", clip_low=0.05, clip_high=0.05, sequence_mask_high=1.1, kl_place="reward")
    steps_of("step_sequences", sequences, microbatches, 1)
    steps_of("step_sequences_merged", sequences, lambda: [merged(microbatches())], 1)
    with_reference = replace(tensor_parallel, reference="initial", **RISING_KL)
    bare = [without_reference(batch) for batch in microbatches()]
    steps_of("step_without_kl", replace(tensor_parallel, kl_coefficient=0.0), lambda: bare, 1)
    steps_of("step_own_logprobs", with_reference, microbatches, 1)
    frozen_logprobs(steps_of("step_reference", with_reference, lambda: bare))
    drawn()
    checkpoints()
    head_values()
    report("head_memory", output_layer.memory(tensor_parallel))
    report("head_digits", output_layer.digits(engine_of, tensor_parallel))
    decay(tensor_parallel)
    all_masked()
    half_precision()
    steps_of("step_scheduled", replace(tensor_parallel, **SCHEDULE), microbatches)
    if ranks == 1:
        packed_attention()
    else:
        steps_of("step_sequence_parallel", replace(tensor_parallel, sequence_parallel=True), microbatches, 1)
        steps_of("step_reference_sequence_parallel", replace(with_reference, sequence_parallel=True), lambda: bare)
        told = Channel(60.0).broadcast({"ä": [1, None], "b": 2.5} if rank == 0 else None)
        assert told == {"ä": [1, None], "b": 2.5}
        parallel_state.destroy_model_parallel()
        start_groups(OPTIONS, timeout_s=60.0)  # the same two ranks as data parallelism
        decay(replace(OPTIONS, distributed_optimizer=True), "decay_shared")
        steps_of("step_two_data_ranks", replace(OPTIONS, peak_tflops=2.0), microbatches, 3)
        steps_of("step_one_rank_idle", replace(OPTIONS, peak_tflops=2.0), lambda: [merged(microbatches())], 1)
        steps_of("step_reference_one_rank_idle", replace(OPTIONS, reference="initial", **RISING_KL), lambda: [merged(bare)])
    stop_groups()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
