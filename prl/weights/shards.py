"""Which parts of which tensors each trainer rank and each sampler worker holds. Free of torch.

Tensors are those of `prl.config.tensors`, numbered in its order; a part is a tile, see `prl.weights.plan`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from prl.config.hf_config import ModelConfig
from prl.config.layout import Layout, tensor_misfit
from prl.config.tensors import EMBEDDING, OUTPUT, Entry, entries
from prl.weights.plan import Tile

VOCABULARY_PADDING = 64  # to a multiple of which vLLM rounds the rows of embeddings


@dataclass(frozen=True, slots=True)
class Held:
    """A tile as a trainer rank has it: `tile.rows` rows of a Megatron parameter, from row `at_row` on, in all their width."""

    tile: Tile
    parameters: tuple[str, ...]  # of which the rank has one, as `Entry.parameters`
    at_row: int

    def index(self, part: Tile) -> tuple[slice, slice]:
        """Rows and columns of the parameter, seen as a matrix, that are this part of the tile."""
        return _index(part, self.tile, self.at_row)


@dataclass(frozen=True, slots=True)
class Shard:
    """All that a sampler worker holds of a tensor. `counted`: this worker adds it to the version's digest (of workers that
    hold the same, one does)."""

    tile: Tile
    counted: bool

    def index(self, part: Tile) -> tuple[slice, slice]:
        """Rows and columns of the shard, seen as a matrix, that are this part of its tile."""
        return _index(part, self.tile, 0)


@dataclass(frozen=True, order=True)
class Place:
    """What decides on the part of the model that a trainer rank holds."""

    stage: int
    tensor: int
    expert: int


def places(layout: Layout, ranks: int) -> dict[Place, list[int]]:
    """The ranks at each place, in the order in which Megatron deals them: neighbours are tensor-parallel, stages lie farthest
    apart, and experts are dealt to the ranks of a stage one by one."""
    stage_ranks = ranks // layout.pipeline
    found: dict[Place, list[int]] = defaultdict(list)
    for rank in range(ranks):
        stage, number = divmod(rank, stage_ranks)
        found[Place(stage, number % layout.tensor, number % layout.expert)].append(rank)
    return dict(found)


def trainer_shards(model: ModelConfig, layout: Layout, ranks: int) -> list[tuple[Held, ...]]:
    """What each of `ranks` trainer ranks holds. Raises ValueError where they cannot be laid out so."""
    chunks = layout.pipeline * layout.virtual
    misfit = tensor_misfit(model, layout.tensor)
    if misfit:
        raise ValueError(f"train.tensor_parallel = {layout.tensor} {misfit}")
    if ranks % layout.unit or model.layers % chunks or (model.experts or layout.expert) % layout.expert:
        raise ValueError(
            f"{ranks} trainer ranks cannot share {model.layers} layers and {model.experts} experts as {layout}: ranks must be "
            f"a multiple of {layout.unit}, layers of {chunks}, experts of {layout.expert}"
        )
    by_stage: list[list[tuple[int, Entry, tuple[str, ...]]]] = [[] for _ in range(layout.pipeline)]
    for first, entry in _numbered(model):
        for stage, parameters in _stages(entry, model, layout):
            by_stage[stage].append((first, entry, parameters))
    shards: list[tuple[Held, ...]] = [()] * ranks
    for place, members in places(layout, ranks).items():
        held = tuple(
            Held(Tile(first + part.tensor, part.row, part.rows, part.column, part.columns), parameters, at_row)
            for first, entry, parameters in by_stage[place.stage]
            if entry.expert is None or entry.expert // (model.experts // layout.expert) == place.expert
            for at_row, part in trainer_parts(entry, model, layout.tensor, place.tensor)
        )
        for rank in members:
            shards[rank] = held
    return shards


def trainer_parts(entry: Entry, model: ModelConfig, ranks: int, rank: int) -> Iterator[tuple[int, Tile]]:
    """What of an entry's tensors (numbered within it) makes up the shard of one of `ranks` tensor-parallel ranks, one part
    below the other: the row of the parameter where a part begins, and the part. An expert's parameters are whole."""
    at_row = 0
    for part in _parts(entry, model, *((ranks, rank) if entry.expert is None else (1, 0))):
        yield at_row, part
        at_row += part.rows


def sampler_shards(model: ModelConfig, workers: int) -> list[tuple[Shard, ...]]:
    """What each of a sampler's tensor-parallel workers holds, as vLLM deals it: heads, of which keys and values are repeated
    where there are fewer than workers; the vocabulary in equal parts of its padded length, without the padding; the width of
    feed-forward layers and experts; the rest is on each. A tied head is the embedding.

    Raises ValueError where vLLM could not deal the model so.
    """
    misfit = tensor_misfit(model, workers)
    padded = -(-model.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    if not misfit and padded % workers:
        misfit = f"does not divide the vocabulary padded to {padded}"
    if not misfit and model.experts and model.expert_ffn_size % workers:
        misfit = f"does not divide the width of experts, {model.expert_ffn_size}"
    if not misfit and 0 < model.experts < workers:
        misfit = f"is more than the model's {model.experts} experts"
    if misfit:
        raise ValueError(f"sample.tensor_parallel = {workers} {misfit}")
    table = list(_numbered(model))
    return [tuple(_worker_shards(model, table, padded, workers, worker)) for worker in range(workers)]


def _worker_shards(
    model: ModelConfig, table: Sequence[tuple[int, Entry]], padded: int, workers: int, worker: int
) -> Iterator[Shard]:
    owners = min(workers, model.kv_heads)  # workers with other keys and values
    copies = workers // owners
    for first, entry in table:
        for number, shape in enumerate(entry.shapes):
            whole = _whole(first + number, shape)
            match entry.kind:
                case "whole":
                    yield Shard(whole, worker == 0)
                case "columns":
                    column, columns = _share(whole.columns, workers, worker)
                    yield Shard(Tile(whole.tensor, 0, whole.rows, column, columns), True)
                case "vocab":
                    row, rows = _share(padded, workers, worker)
                    if row < whole.rows:
                        yield Shard(whole.band(row, min(row + rows, whole.rows)), True)
                case "qkv" if number > 0:
                    row, rows = _share(whole.rows, owners, worker // copies)
                    yield Shard(whole.band(row, row + rows), worker % copies == 0)
                case "gate_up" | "qkv":
                    row, rows = _share(whole.rows, workers, worker)
                    yield Shard(whole.band(row, row + rows), True)


def _parts(entry: Entry, model: ModelConfig, ranks: int, rank: int) -> Iterator[Tile]:
    wholes = [_whole(number, shape) for number, shape in enumerate(entry.shapes)]
    match entry.kind:
        case "whole":
            yield wholes[0]
        case "vocab":
            row, rows = _share(model.padded_vocabulary(ranks), ranks, rank)
            if row < wholes[0].rows:
                yield wholes[0].band(row, min(row + rows, wholes[0].rows))
        case "columns":
            column, columns = _share(wholes[0].columns, ranks, rank)
            yield Tile(0, 0, wholes[0].rows, column, columns)
        case "gate_up":
            for whole in wholes:
                row, rows = _share(whole.rows, ranks, rank)
                yield whole.band(row, row + rows)
        case "qkv":
            yield from _fused(model, wholes, *_share(sum(whole.rows for whole in wholes), ranks, rank))


def _fused(model: ModelConfig, wholes: Sequence[Tile], start: int, rows: int) -> Iterator[Tile]:
    """Rows [start, start + rows) of queries, keys and values that are fused by query group."""
    at = 0
    for group in range(model.kv_heads):
        for whole in wholes:
            own = whole.rows // model.kv_heads
            first, last = max(start - at, 0), min(start + rows - at, own)
            if first < last:
                yield whole.band(group * own + first, group * own + last)
            at += own


def _stages(entry: Entry, model: ModelConfig, layout: Layout) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The pipeline stages that hold an entry, and the parameters that it may be there. Chunks of layers are dealt to the stages
    in turns; the last stage has a copy of an embedding that is also the output layer."""
    last = layout.pipeline - 1
    if entry.layer is not None:
        yield entry.layer // (model.layers // (layout.pipeline * layout.virtual)) % layout.pipeline, entry.parameters
    elif EMBEDDING in entry.parameters:
        yield 0, entry.parameters
        if model.tied and last:
            yield last, (OUTPUT,)
    else:
        yield last, entry.parameters


def _numbered(model: ModelConfig) -> Iterator[tuple[int, Entry]]:
    """The table's entries with the number of their first tensor."""
    first = 0
    for entry in entries(model):
        yield first, entry
        first += len(entry.tensors)


def _whole(tensor: int, shape: tuple[int, ...]) -> Tile:
    return Tile(tensor, 0, shape[0], 0, prod(shape[1:]))


def _share(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where a rank's share begins, and how long it is."""
    return rank * size // ranks, size // ranks


def _index(part: Tile, tile: Tile, at_row: int) -> tuple[slice, slice]:
    row, column = at_row + part.row - tile.row, part.column - tile.column
    return slice(row, row + part.rows), slice(column, column + part.columns)
