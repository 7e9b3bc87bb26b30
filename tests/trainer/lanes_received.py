"""What the ranks of a trainer send by lanes, taken by the workers of a sampler, which are threads of the first rank."""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist

from prl.config.layout import layout_of
from prl.trainer.engine import Engine
from prl.trainer.lanes_out import LanesOut, failures
from prl.trainer.parallel import Channel
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.group import StoreHost
from prl.weights.lanes import LaneReceiver
from prl.weights.legs import LaneReport, version_digest
from prl.weights.options import WeightsOptions
from prl.weights.plan import Tile, schedule
from prl.weights.shards import sampler_shards
from prl.weights.shipments import Route, Staging

HOST = "127.0.0.1"
LIMIT_S = 120.0
BUCKET_MIB = 1
_epochs = itertools.count(1)


@dataclass(frozen=True)
class Piece:
    """What a worker holds of a tensor, as a matrix."""

    name: str
    tile: Tile
    content: torch.Tensor
    counted: bool  # the pieces that are counted are all of the version, each element once

    def is_of(self, wholes: Mapping[str, torch.Tensor]) -> bool:
        """Whether it has these bits."""
        whole, tile = wholes[self.name], self.tile
        rows, columns = slice(tile.row, tile.row + tile.rows), slice(tile.column, tile.column + tile.columns)
        part = whole.reshape(len(whole), -1)[rows, columns].contiguous()
        return part.dtype == self.content.dtype and torch.equal(part.view(torch.uint8), self.content.view(torch.uint8))


@dataclass(frozen=True)
class Version:
    pieces: Sequence[Piece]
    digest: int
    buckets: int


def sent_by_lanes(engine: Engine, channel: Channel, workers: int, dtype: str) -> Version | None:
    """The present version, sent by all ranks to one sampler of so many workers that hold the model in `dtype`: as these have
    it, on rank 0. A collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options = WeightsOptions(transport="lanes", bucket_mib=BUCKET_MIB, group_s=LIMIT_S, update_s=LIMIT_S)
    plan = compile_plan(engine.config, layout_of(engine.options), ranks, workers, dtype)
    route = Route(plan, sampler_shards(engine.config, workers), BUCKET_MIB * 2**20)
    host = StoreHost(HOST, LIMIT_S) if rank == 0 else None
    port = channel.broadcast(None if host is None else {"port": host.port})["port"]
    crew = Crew(next(_epochs), ranks, (0,), workers)

    def take(worker: int) -> tuple[Staging, LaneReport]:
        staging = Staging(plan, route.shards[worker])
        with closing(LaneReceiver(route, crew, 0, worker, HOST, port, group_s=LIMIT_S)) as receiver:
            return staging, receiver.receive(staging, LIMIT_S)

    with closing(LanesOut(engine, options, workers, dtype)) as out, ThreadPoolExecutor(workers) as pool:
        taking = [pool.submit(take, worker) for worker in range(workers if rank == 0 else 0)]
        parts = out.send(channel, crew.epoch, crew.samplers, HOST, port)
        taken = [one.result(LIMIT_S) for one in taking]
    channel.barrier()  # the store stays until all have left
    assert not failures(parts), parts
    if rank != 0:
        return None
    pieces = [
        Piece(plan.tensors[shard.tile.tensor].name, shard.tile, staging.tensors[shard.tile.tensor], shard.counted)
        for worker, (staging, _) in enumerate(taken)
        for shard in route.shards[worker]
    ]
    sent, got = ([leg for part in some for leg in part.legs] for some in (parts, [report for _, report in taken]))
    assert version_digest(sent) == version_digest(got)
    return Version(pieces, version_digest(sent), len(schedule(plan, route.bucket_bytes)))
