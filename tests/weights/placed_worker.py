"""Real models of vLLM, one for each tensor-parallel rank, in one process and without an engine: what their own loaders make of
full tensors, where `place` finds it, and what a plan brings there. `placed_worker.py FOLDER` prints, as JSON, what is wrong."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PRL_ROLE": "sampler",  # for the plug-in
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from lane_cases import RAW, TENSOR, Staged, transfer
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, get_tp_group, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from prl.config.hf_config import ARCHITECTURES, model_config
from prl.config.layout import Layout
from prl.config.tensors import entries, tensor_shapes
from prl.sampler.placement import Placement, direct_share, place
from prl.trainer.table import fill_shard
from prl.weights.compile import compile_plan
from prl.weights.plan import Tile
from prl.weights.shards import Shard, sampler_shards, trainer_shards

Weights = dict[str, torch.Tensor]
LAYOUT, RANKS = Layout(tensor=4, pipeline=2, virtual=2, context=1, expert=2), 8


def config_of(folder: Path, workers: int) -> VllmConfig:
    arguments = EngineArgs(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=workers,
    )
    return arguments.create_engine_config()


def loaded(config: VllmConfig, workers: int, worker: int, weights: Weights) -> torch.nn.Module:
    """The model of one of so many workers. Nothing in building and loading it is a collective, so that this process can be each
    of them in turn: layers ask only for their rank and the number of ranks."""
    group = get_tp_group()
    group.rank_in_group, group.world_size = worker, workers
    with set_current_vllm_config(config):
        model = initialize_model(config)
        model.load_weights(iter(weights.items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def bits_of(model: torch.nn.Module) -> Weights:
    return {name: parameter.data.clone().view(torch.int32) for name, parameter in model.named_parameters()}


def trainer_parameters(raw: dict[str, Any], layout: Layout, ranks: int, weights: Weights) -> list[dict[str, Any]]:
    """Filled as the trainer fills them, by the names that the plan gives."""
    model = model_config(raw)
    found = []
    for rank, held in enumerate(trainer_shards(model, layout, ranks)):
        names = {name for one in held for name in one.parameters}
        parameters = {}
        for entry in entries(model):
            own = [entry.parameters[0]] if entry.parameters[0] in names else []
            if model.tied and "embedding" in entry.parameters[0] and "output_layer.weight" in names:
                own.append("output_layer.weight")
            split = 1 if entry.expert is not None else layout.tensor
            rows, columns = {
                "whole": (1, 1),
                "vocab": (split, 1),
                "columns": (1, split),
                "gate_up": (split, 1),
                "qkv": (split, 1),
            }[entry.kind]
            height = sum(shape[0] for shape in entry.shapes)
            height = model.padded_vocabulary(layout.tensor) if entry.kind == "vocab" else height
            shape = [height // rows, *(size // columns for size in entry.shapes[0][1:])]
            for name in own:
                parameter = torch.full(shape, float("nan"))
                fill_shard(
                    parameter, entry, [weights[tensor] for tensor in entry.tensors], model, layout.tensor, rank % layout.tensor
                )
                parameters[name] = parameter.numpy()
        found.append(parameters)
    return found


def shard_of(placement: Placement, numbers: dict[str, int]) -> Shard:
    """A placement in the plan's words."""
    rows, columns = placement.spec.shape[0], placement.spec.elements // placement.spec.shape[0]
    number, start, size = numbers[placement.spec.name], placement.start, placement.size
    tile = Tile(number, 0, rows, start, size) if placement.dim else Tile(number, start, size, 0, columns)
    return Shard(tile, placement.counted)


def check_worker(model: torch.nn.Module, tied: bool, specs: Any, expected: tuple[Shard, ...], staged: Staged) -> list[str]:
    """What differs between vLLM's own loading, the shards as planned, and the live parameters once the plan's were written."""
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    own = bits_of(model)
    parts = place(model, tied, specs)
    wrong = [] if direct_share(parts) == 1 else ["not all of it is written directly"]
    placements = [placement for placement in parts if placement.live.numel()]
    if {shard_of(placement, numbers) for placement in placements} != set(expected):
        wrong.append("shards")
    for placement in placements:
        placement.live.fill_(float("nan"))
    if not any(torch.isnan(parameter).any() for parameter in model.parameters()):
        wrong.append("nothing was overwritten")
    for placement in placements:
        content = torch.from_numpy(staged.contents[numbers[placement.spec.name]])
        placement.live.copy_(content.reshape(placement.live.shape))
    return wrong + [name for name, bits in bits_of(model).items() if not torch.equal(bits, own[name])]


def check(folder: Path, name: str, workers: int) -> list[str]:
    raw = RAW[name]
    model = model_config(raw)
    config = raw | {"architectures": [ARCHITECTURES[raw["model_type"]]], "hidden_act": "silu", "rope_theta": 10000.0}
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {tensor: torch.randn(shape, generator=generator) for tensor, shape in tensor_shapes(model).items()}
    layout = LAYOUT if model.experts else Layout(LAYOUT.tensor, LAYOUT.pipeline, LAYOUT.virtual, 1, 1)
    plan = compile_plan(model, layout, RANKS, workers, "float32")
    shards = sampler_shards(model, workers)
    parameters = trainer_parameters(raw, layout, RANKS, weights)
    staged = transfer(plan, parameters, trainer_shards(model, layout, RANKS), shards, 4096)
    wrong = []
    for worker in range(workers):
        built = loaded(config_of(folder / name, workers), workers, worker, weights)
        found = check_worker(built, model.tied, plan.tensors, shards[worker], staged[worker])
        wrong += [f"{name}, worker {worker} of {workers}: {what}" for what in found]
    return wrong


def main(folder: Path) -> None:
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        checked = {}
        for name in RAW:
            for workers in TENSOR:
                checked[f"{name}_{workers}"] = check(folder, name, workers)
    print(json.dumps(checked))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
