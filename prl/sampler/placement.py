"""Where each tensor of Hugging Face's naming lies in a sampler's live parameters.

vLLM fuses q, k, v and gate, up into one parameter each, pads the vocabulary and, with tensor parallelism, holds a shard of
rows or columns; experts of a layer it stacks. A placement is a view of that part of a live parameter which a tensor (or a shard
of it) fills, so that new weights are copied in and the live state is digested under the names that the trainer knows. Where it
is not known how a module keeps its weights (it quantises them, say) its tensors go as whole ones to vLLM's own loader
(prl/sampler/reload.py). What does not fit the model is refused: half a model must never be served.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from prl.sampler.experts import ExpertWeights, expert_weights
from prl.weights import digest
from prl.weights.folder import Slab
from prl.weights.plan import TensorSpec

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Part:
    """What a worker takes of a tensor: elements [start, start + size) along `dim`, all of the other dimension.
    `counted`: this worker adds it to the digest (of parts that several workers take, one does)."""

    spec: TensorSpec
    dim: int
    start: int
    size: int
    counted: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """As a part of the whole tensor."""
        return tuple(self.size if dim == self.dim else size for dim, size in enumerate(self.spec.shape))

    @property
    def held_shape(self) -> tuple[int, ...]:
        """As this worker holds it."""
        return self.shape

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.narrow(self.dim, self.start, self.size).reshape(self.held_shape) if whole.dim() else whole

    def digest_of(self, elements: torch.Tensor) -> torch.Tensor:
        """What they add to the version's digest in this place."""
        return digest.slab(self.spec.name, elements, self.spec.shape, self.dim, self.start)


@dataclass(frozen=True)
class Placement(Part):
    """The part lies in `live`, in its order; but that may have more dimensions, where a kernel wants rows and columns in
    tiles."""

    live: torch.Tensor

    @property
    def held_shape(self) -> tuple[int, ...]:
        return tuple(self.live.shape)


@dataclass(frozen=True)
class Loaded(Part):
    """All of a tensor, for vLLM's loader to make what `module` needs of it."""

    module: str
    why: str  # it is not written directly


def slab(part: Part) -> Slab:
    """As files name it."""
    return Slab(part.spec, part.dim, part.start, part.size)


def direct_share(parts: Sequence[Part]) -> float:
    """Of the bytes of a version: what is written directly where it lies. 0 to 1."""
    specs = {part.spec: isinstance(part, Placement) for part in parts}
    return sum(spec.bytes * direct for spec, direct in specs.items()) / max(1, sum(spec.bytes for spec in specs))


@dataclass(frozen=True)
class _Target:
    """Where a tensor goes in one parameter: rows [at, at + size) of it (dim 0), or all of it."""

    whole_shape: tuple[int, ...]  # the full tensor as the trainer has it
    at: int
    size: int
    dim: int
    start: int
    counted: bool


def place(model: torch.nn.Module, tied: bool, specs: Sequence[TensorSpec]) -> list[Part]:
    """What this worker takes of all tensors of a version, and where. Raises ValueError that names the tensors or parameters
    which do not fit: unknown names, other dtypes or shapes, parameters that no tensor fills."""
    modules = dict(model.named_modules(remove_duplicate=False))
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    whole_of = {part: (fusion, number) for fusion, parts in fused.items() for number, part in enumerate(parts)}
    experts, unknown = _experts(modules)
    parts: list[Part] = []
    faults = []
    for spec in specs:
        try:
            parts.append(_place_expert(experts, unknown, spec) or _place_one(modules, whole_of, spec))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError(f"{len(faults)} of {len(specs)} tensors do not fit the sampler's model: {'; '.join(faults[:5])}")
    parts += _untied_copies(modules, tied, [part for part in parts if isinstance(part, Placement)])
    _check_complete(model, parts, experts.values())
    return parts


def _experts(modules: Mapping[str, torch.nn.Module]) -> tuple[dict[str, ExpertWeights], dict[str, str]]:
    """The experts of each layer of which it is known how they lie, and why it is not of others. Raises ValueError for those on
    CPUs: vLLM does not pack them anew when it loads them again."""
    known, unknown = {}, {}
    for name, layer in modules.items():
        if isinstance(layer, RoutedExperts):
            try:
                known[name] = expert_weights(name, layer)
            except ValueError as error:
                if next(layer.parameters()).device.type == "cpu":
                    raise
                unknown[name] = str(error)
    return known, unknown


def _place_expert(experts: Mapping[str, ExpertWeights], unknown: Mapping[str, str], spec: TensorSpec) -> Part | None:
    """None where the tensor is of no expert."""
    match = _EXPERT.fullmatch(spec.name)
    layer = f"{match[1]}.routed_experts" if match else ""
    if layer in unknown:
        return _loaded(spec, layer, unknown[layer])
    weights = experts.get(layer)
    if match is None or weights is None:
        return None
    stacked = {"gate": weights.gate, "up": weights.up, "down": weights.down}[match[3]]
    number, width = int(match[2]), weights.width
    if number >= len(stacked):
        raise ValueError(f"{spec.name}: the sampler has {len(stacked)} experts a layer")
    inner, dim = width * weights.ranks, int(match[3] == "down")
    _check(spec, (weights.hidden, inner) if dim else (inner, weights.hidden), stacked.dtype)
    return Placement(spec, dim, weights.rank * width, width, True, stacked[number])


def _place_one(modules: Mapping[str, torch.nn.Module], whole_of: Mapping[str, tuple[str, int]], spec: TensorSpec) -> Part:
    path, _, leaf = spec.name.rpartition(".")
    parent, _, last = path.rpartition(".")
    part: int | None = None
    if path not in modules and last in whole_of:
        fusion, part = whole_of[last]
        path = f"{parent}.{fusion}" if parent else fusion
    module = modules.get(path)
    parameter = getattr(module, leaf, None)
    if module is None or not isinstance(parameter, torch.nn.Parameter):
        raise ValueError(f"{spec.name} is no parameter of {type(modules['']).__name__}")
    why = _unknown(module)
    if why:
        return _loaded(spec, path, why)
    target = _target(module, parameter, part, spec)
    _check(spec, target.whole_shape, parameter.dtype)
    live = parameter.data.narrow(0, target.at, target.size) if parameter.dim() else parameter.data
    return Placement(spec, target.dim, target.start, live.shape[target.dim] if live.dim() else 1, target.counted, live)


def _unknown(module: torch.nn.Module) -> str:
    """Why it is not known how a module keeps its weights; empty where it is."""
    method = getattr(module, "quant_method", None)
    if isinstance(module, LinearBase | VocabParallelEmbedding):
        plain = UnquantizedLinearMethod if isinstance(module, LinearBase) else UnquantizedEmbeddingMethod
        return "" if type(method) is plain else f"{type(module).__name__} keeps them as {type(method).__name__} makes them"
    return ""


def _loaded(spec: TensorSpec, module: str, why: str) -> Loaded:
    """Every worker takes all of it, and the first one counts it."""
    return Loaded(spec, 0, 0, spec.shape[0] if spec.shape else 1, _tensor_parallel_rank() == 0, module, why)


def _check(spec: TensorSpec, whole_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if whole_shape != spec.shape:
        raise ValueError(f"{spec.name} has shape {spec.shape}, the sampler needs {whole_shape}")
    if str(dtype) != f"torch.{spec.dtype}":
        raise ValueError(f"{spec.name} is {spec.dtype}, the sampler holds {dtype}: send sample.dtype")


def _target(module: torch.nn.Module, parameter: torch.nn.Parameter, part: int | None, spec: TensorSpec) -> _Target:
    rest = tuple(parameter.shape[1:])
    rows = parameter.shape[0] if parameter.dim() else 1
    match module:
        case VocabParallelEmbedding():
            if module.num_added_embeddings:
                raise ValueError(f"{spec.name}: added (LoRA) vocabulary is not supported")
            indices = module.shard_indices
            return _Target((module.org_vocab_size, *rest), 0, indices.num_org_elements, 0, indices.org_vocab_start_index, True)
        case QKVParallelLinear() if part is not None and type(module) is QKVParallelLinear:
            heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
            widths = (module.head_size, module.head_size, module.v_head_size)
            sizes = [count * width for count, width in zip(heads, widths, strict=True)]
            replicas = 1 if part == 0 else module.num_kv_head_replicas
            total = (module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads)[part] * widths[part]
            _check_rows(spec, rows, sum(sizes))
            start = module.tp_rank // replicas * sizes[part]
            return _Target((total, *rest), sum(sizes[:part]), sizes[part], 0, start, module.tp_rank % replicas == 0)
        case MergedColumnParallelLinear() if part is not None and type(module) is MergedColumnParallelLinear:
            sizes = [size // module.tp_size for size in module.output_sizes]
            _check_rows(spec, rows, sum(sizes))
            return _Target(
                (module.output_sizes[part], *rest), sum(sizes[:part]), sizes[part], 0, module.tp_rank * sizes[part], True
            )
        case RowParallelLinear() if parameter.dim() == 2:
            start = module.tp_rank * parameter.shape[1]
            return _Target((rows, parameter.shape[1] * module.tp_size), 0, rows, 1, start, True)
        case ColumnParallelLinear() if part is None and type(module) is ColumnParallelLinear:
            return _Target((rows * module.tp_size, *rest), 0, rows, 0, module.tp_rank * rows, True)
        case _ if part is None and (
            type(module).__name__.endswith("Norm") or isinstance(module, ReplicatedLinear | RowParallelLinear)
        ):
            rank = getattr(module, "tp_rank", None)
            return _Target(tuple(parameter.shape), 0, rows, 0, 0, (_tensor_parallel_rank() if rank is None else rank) == 0)
        case _:
            raise ValueError(f"{spec.name}: writing into a {type(module).__name__} is not supported")


def _check_rows(spec: TensorSpec, rows: int, expected: int) -> None:
    if rows != expected:
        raise ValueError(f"{spec.name}: the fused parameter has {rows} rows where {expected} were expected")


def _tensor_parallel_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _untied_copies(modules: Mapping[str, torch.nn.Module], tied: bool, placements: Sequence[Placement]) -> list[Placement]:
    """With tied embeddings the trainer sends one tensor; where vLLM holds the head apart it is filled from the same one."""
    head = modules.get("lm_head")
    weight = getattr(head, "weight", None)
    if not tied or weight is None or any(p.live.data_ptr() == weight.data_ptr() for p in placements):
        return []
    embedding = [p for p in placements if p.spec.name.endswith("embed_tokens.weight")]
    return [Placement(p.spec, 0, p.start, p.size, False, weight.data.narrow(0, 0, p.size)) for p in embedding]


def _check_complete(model: torch.nn.Module, parts: Sequence[Part], experts: Iterable[ExpertWeights]) -> None:
    """Every live parameter is filled, but for what pads a vocabulary or the width of experts. What vLLM's loader makes of whole
    tensors cannot be counted: of each module that it fills, its own loading tells (prl/sampler/reload.py)."""
    filled: dict[int, int] = {}
    loaded = set()
    for part in parts:
        if isinstance(part, Placement):
            storage = part.live.untyped_storage().data_ptr()
            filled[storage] = filled.get(storage, 0) + part.live.numel()
        elif isinstance(part, Loaded):
            loaded.add(part.module)
    padding = {
        module.weight.untyped_storage().data_ptr(): (module.weight.shape[0] - module.shard_indices.num_org_elements)
        * module.weight.shape[1]
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
    }
    for weights in experts:
        padding |= weights.padding
    lacking = []
    for name, parameter in model.named_parameters():
        storage = parameter.untyped_storage().data_ptr()
        if name.rpartition(".")[0] not in loaded and filled.get(storage, 0) < parameter.numel() - padding.get(storage, 0):
            lacking.append(name)
    if lacking:
        raise ValueError(f"no tensor fills these parameters of the sampler: {', '.join(lacking[:5])} ({len(lacking)} in all)")
