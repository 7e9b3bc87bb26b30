"""The plan of a run's lanes: who sends which tile to whom. Free of torch.

Most tiles can be sent by several trainer ranks: data-parallel ones, and all of a stage where a tensor is on each. They are
dealt so that the ranks send equally many bytes and that there are few legs, each of which needs a process group of its own:
tiles that the fewest ranks hold come first; what more ranks hold goes to those who serve the lane already, if there are any.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prl.config.hf_config import ModelConfig
from prl.config.layout import Layout
from prl.config.tensors import tensor_shapes
from prl.weights.plan import LanePlan, Leg, TensorSpec, Tile
from prl.weights.shards import places, sampler_shards, trainer_shards

_EVEN = 32  # a rank may send so small a part of its share more or less, where that saves a leg

Holders = tuple[int, ...]


def compile_plan(model: ModelConfig, layout: Layout, trainer_ranks: int, workers: int, dtype: str) -> LanePlan:
    """From `trainer_ranks` ranks in a layout to samplers of `workers` tensor-parallel workers, which hold the model in `dtype`.

    Raises ValueError where ranks or workers cannot share the model so.
    """
    tensors = tuple(TensorSpec(name, dtype, shape) for name, shape in tensor_shapes(model).items())
    plan = LanePlan(tensors, trainer_ranks, workers, ())
    legs: dict[tuple[int, int], list[Tile]] = {}
    sent = [0] * trainer_ranks  # bytes
    pools = _pools(model, layout, plan)
    for holders in sorted(pools, key=lambda ranks: (len(ranks), ranks)):
        lanes_of: dict[Holders, list[int]] = defaultdict(list)
        for lane in pools[holders]:
            serving = tuple(root for root in holders if (root, lane) in legs)
            lanes_of[serving or holders].append(lane)
        for roots, lanes in lanes_of.items():
            for root, lane, tile in _deal(plan, {lane: pools[holders][lane] for lane in lanes}, roots, sent):
                legs.setdefault((root, lane), []).append(tile)
    ordered = (
        Leg(root, lane, tuple(sorted(tiles, key=lambda tile: (tile.tensor, tile.row, tile.column))))
        for (root, lane), tiles in sorted(legs.items())
    )
    return LanePlan(tensors, trainer_ranks, workers, tuple(ordered))


def _pools(model: ModelConfig, layout: Layout, plan: LanePlan) -> dict[Holders, dict[int, list[Tile]]]:
    """What each lane needs, in tiles that are one piece at both ends, by the ranks that hold them."""
    sources = _sources(model, layout, plan.trainer_ranks)
    pools: dict[Holders, dict[int, list[Tile]]] = {}
    for lane, shards in enumerate(sampler_shards(model, plan.lanes)):
        for shard in shards:
            found = 0
            for source, holders in sources[shard.tile.tensor]:
                tile = source.within(shard.tile)
                if tile is not None:
                    pools.setdefault(holders, {}).setdefault(lane, []).append(tile)
                    found += tile.elements
            assert found == shard.tile.elements, f"trainer ranks hold {found} of the elements of {shard}"
    return pools


def _sources(model: ModelConfig, layout: Layout, ranks: int) -> dict[int, list[tuple[Tile, Holders]]]:
    """Each tensor's tiles, which do not overlap, and the ranks that hold them."""
    shards = trainer_shards(model, layout, ranks)
    holders: dict[Tile, list[int]] = defaultdict(list)
    for members in places(layout, ranks).values():
        for held in shards[members[0]]:
            holders[held.tile].extend(members)
    sources: dict[int, list[tuple[Tile, Holders]]] = defaultdict(list)
    for tile, members in holders.items():
        sources[tile.tensor].append((tile, tuple(sorted(members))))
    return sources


def _deal(
    plan: LanePlan, needed: dict[int, list[Tile]], roots: Sequence[int], sent: list[int]
) -> Iterator[tuple[int, int, Tile]]:
    """Deal what lanes need to roots that all hold it, lane after lane and root after root, so that the roots' bytes, added up
    in `sent`, become as equal as can be. Tiles are cut between rows where one root's share ends."""
    lane_ends = list(accumulate(sum(map(plan.tile_bytes, tiles)) for tiles in needed.values()))
    ends = _share_ends([sent[root] for root in roots], lane_ends)
    number, at = 0, 0
    for lane, tiles in needed.items():
        for tile in tiles:
            row_bytes = plan.tile_bytes(tile) // tile.rows
            first = 0
            while first < tile.rows:
                rows = round((ends[number] - at) / row_bytes)
                last = tile.rows if number == len(roots) - 1 else min(max(rows, first), tile.rows)
                if last > first:
                    sent[roots[number]] += (last - first) * row_bytes
                    yield roots[number], lane, tile.band(first, last)
                    first = last
                if first < tile.rows:
                    number += 1
            at += tile.rows * row_bytes


def _share_ends(sent: Sequence[int], lane_ends: Sequence[int]) -> list[int]:
    """Where the share of each root ends in the bytes that lanes need, one lane behind the other: all roots that get something
    then have sent about equally many bytes, and a share ends with a lane where that is near."""
    total = lane_ends[-1]
    level, poured = 0, sorted(sent)
    for count in range(1, len(sent) + 1):
        level = -(-(total + sum(poured[:count])) // count)
        if count < len(sent) and level <= poured[count]:
            break
    tolerance = total // len(sent) // _EVEN
    ends = []
    for end in accumulate(max(0, level - bytes_sent) for bytes_sent in sent):
        nearest = min(lane_ends, key=lambda lane_end: abs(lane_end - end))
        ends.append(nearest if abs(nearest - end) <= tolerance else end)
    return ends
