"""How the weights of a layer's experts lie in memory once vLLM has made them ready for its kernels.

vLLM stacks the experts of a layer: their gate and up projections in one parameter, their down projections in another. On CPUs
it then pads their width and packs the rows into tiles, once: loading weights again in vLLM's own way leaves them unpacked,
which answers wrongly and says nothing. So they are written where they lie. The layout is never guessed: that of CPUs is found
by letting vLLM's own function pack numbered elements, that of Triton's kernels is the one of loading, and any other is refused.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, X86CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_TILES = ((16, 1), (16, 2))  # rows and columns of the tiles that CPUs' kernels are known to take
_LOADED = (1, 1)


@dataclass(frozen=True)
class ExpertWeights:
    """Views of a layer's live parameters, a row an expert: [experts, tiles of rows, rows, tiles of columns, columns], which
    are the elements of this worker's shards in their order. Shards are rows of gate and up, and columns of down."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    width: int  # of an expert on this worker
    hidden: int
    rank: int
    ranks: int
    padding: dict[int, int]  # elements that no expert has, by the address of the storage


def expert_weights(name: str, layer: RoutedExperts) -> ExpertWeights:
    """Raises ValueError that names the layer where it is not known how its weights lie."""
    config = layer.moe_config
    if layer.use_ep or config.num_experts != config.num_logical_experts:
        raise ValueError(f"{name}: experts that are dealt to workers or held several times cannot be written in place")
    tile = _tile(name, layer)
    gate_up, down = (_untiled(parameter.data, tile) for parameter in (layer.w13_weight, layer.w2_weight))
    width, padded = config.intermediate_size_per_partition, layer.w13_weight.shape[1] // 2
    if width % tile[0] or padded % tile[0] or layer.w2_weight.shape[2] != padded:
        raise ValueError(f"{name}: an expert's width of {width} on a worker is no multiple of {tile[0]}, as its tiles are")
    rows = width // tile[0]
    gate, up = gate_up[:, :rows], gate_up[:, padded // tile[0] :][:, :rows]
    down = down[:, :, :, : width // tile[1]]
    padding = {
        layer.w13_weight.untyped_storage().data_ptr(): layer.w13_weight.numel() - gate.numel() - up.numel(),
        layer.w2_weight.untyped_storage().data_ptr(): layer.w2_weight.numel() - down.numel(),
    }
    return ExpertWeights(gate, up, down, width, layer.hidden_size, config.tp_rank, config.tp_size, padding)


def _tile(name: str, layer: RoutedExperts) -> tuple[int, int]:
    method = layer.quant_method
    kernel: Any = getattr(method.moe_kernel, "fused_experts", None)
    if type(layer) is RoutedExperts and type(method) is UnquantizedFusedMoEMethod:
        weights = (layer.w13_weight, layer.w2_weight)
        if method.unquantized_backend is UnquantizedMoeBackend.TRITON and all(weight.is_contiguous() for weight in weights):
            return _LOADED
        if type(kernel) in (CPUUnquantizedExperts, X86CPUUnquantizedExperts) and not kernel._use_zentorch:
            tiles = {packed_tile(kernel.isa, weight.dtype, tuple(weight.shape[1:])) for weight in weights}
            if len(tiles) == 1:
                return tiles.pop()
    raise ValueError(
        f"{name}: the weights of {type(layer).__name__} with {type(method).__name__} and {type(kernel).__name__} cannot be "
        f"written in place; on GPUs set sample.engine_args: {{moe-backend: triton}}"
    )


@lru_cache
def packed_tile(instructions: str, dtype: torch.dtype, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the tiles into which vLLM packs experts of this shape for a CPU's instructions."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    numbers = (torch.arange(2 * prod(shape)) % 65521 - 32768).to(bits).view(2, *shape)  # a prime: no tile repeats another
    packed = cpu_prepack_moe_weight(numbers.view(dtype), instructions).view(bits)
    for tile in _TILES:
        if (
            not shape[0] % tile[0]
            and not shape[1] % tile[1]
            and torch.equal(_untiled(packed, tile).reshape_as(numbers), numbers)
        ):
            return tile
    raise ValueError(f"vLLM packs experts of shape {shape} in {dtype} for {instructions} in a way that prl does not know")


def _untiled(weight: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """A view of [experts, rows, columns] stored tile by tile, that has its elements in their order."""
    experts, rows, columns = weight.shape
    return weight.view(experts, rows // tile[0], columns // tile[1], *tile).transpose(2, 3)
