"""New weights from trainer ranks to sampler workers: the lanes beside a bare broadcast, and beside the way over rank 0.

    python tools/bench/weights.py [--layers 8] [--bucket-mib 32] [--rounds 3]

Four trainer ranks (tensor parallelism 2, twice) and two samplers of two workers, each a process with one thread for torch, over
gloo on this machine's loop-back interface; samplers do nothing else. The model has Qwen2-0.5B's shapes with fewer layers, in
bfloat16. Each round does every way once: in seconds, and in those of all processors, which count where the machine has other
work too. Ratios are of one round: median, and range of all rounds.

    bare     the same bytes from the same roots over the same groups, without packing or unpacking, then the same digests
    lanes    what a version takes: pack, send, receive where it is staged (in memory that stays), digest at both ends
    whole    ranks 0 and 1 put whole tensors together from their shards, as `export_weights` does
    gather   rank 0 sends them to all workers, which take them into new memory; all of these digest the whole
    deltas   by lanes that send what differs from the version before, of which 2 per cent of the values have changed; and back

`gather to lanes` is with `whole`, which is a part of that way, and without. `digest` is of what a worker stages, by processor
time. `links` are counted by the system, connection by connection, in an update over the lanes: what a root sent to a worker, by
what the plan says; over those with deltas as a share of that. `peak` is how much a process's memory rises in an update over the
lanes, in buckets. It wants 7 GiB of memory.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prl.config.hf_config import ModelConfig, model_config
from prl.config.layout import Layout
from prl.config.tensors import Entry, entries
from prl.trainer.table import fill_shard, full_tensors
from prl.weights import digest
from prl.weights import group as groups
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.lane_deltas import Base, leg_digests
from prl.weights.lanes import LaneReceiver, LaneSender
from prl.weights.legs import LegReport, changed_share, lane_digests, version_digest
from prl.weights.options import WeightsOptions
from prl.weights.plan import LanePlan, Tile, lane_buckets, schedule
from prl.weights.shards import sampler_shards
from prl.weights.shipments import Route, Staging
from prl.weights.transport import SamplerEnd, TrainerEnd

HOST = "127.0.0.1"
LIMIT_S = 120.0
TRAINERS, SAMPLERS, LANES = 4, 2, 2
LAYOUT = Layout(2, 1, 1, 1, 1)
WAYS = ("bare", "lanes", "whole", "gather", "deltas")
CHANGED = 0.02  # of the values, from a version to the next
SEED = 7


def qwen2(layers: int) -> ModelConfig:
    shapes = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
    return model_config({"model_type": "qwen2", **shapes, **heads, "rms_norm_eps": 1e-6, "tie_word_embeddings": True})


@dataclass(frozen=True)
class Setting:
    model: ModelConfig
    route: Route
    crew: Crew
    weights: Path  # all tensors, one behind the other, which the trainer ranks share

    @property
    def plan(self) -> LanePlan:
        return self.route.plan

    def wholes(self) -> dict[str, torch.Tensor]:
        size = sum(spec.elements for spec in self.plan.tensors)
        flat = torch.from_file(str(self.weights), shared=True, size=size, dtype=torch.bfloat16)
        parts = flat.split([spec.elements for spec in self.plan.tensors])
        return {spec.name: part.view(spec.shape) for spec, part in zip(self.plan.tensors, parts, strict=True)}


class Bare:
    """The lanes' groups and buckets, filled with anything; and the digests of what would be in them."""

    def __init__(self, setting: Setting, number: int, address: tuple[str, int]) -> None:
        plan, crew, size = setting.plan, setting.crew, setting.route.bucket_bytes
        self._plan = plan
        buckets = {(leg.root, leg.lane): lane_buckets(plan, leg, size) for leg in plan.legs}
        own = {leg: tiles for leg, tiles in buckets.items() if number in crew.members(*leg)}
        self._order = [
            (f"{root}-{lane}", sum(map(plan.tile_bytes, own[root, lane][bucket])))
            for root, lane, bucket in schedule(plan, size)
            if (root, lane) in own
        ]
        self.tiles = [tile for legs in own.values() for tiles in legs for tile in tiles]
        store = groups.scope_of(groups.connect_store(f"bare {number}", *address, LIMIT_S), -1)
        meeting = groups.Meeting(f"bare {number}", store, crew.names, number, "", lambda: "")
        members = {name: crew.members(*map(int, name.split("-"))) for name, _ in self._order}
        self._groups = groups.assemble(meeting, members, HOST, torch.device("cpu"), LIMIT_S)

    def broadcast(self) -> None:
        end = time.monotonic() + LIMIT_S
        buffers = [torch.zeros(max(size for _, size in self._order), dtype=torch.uint8) for _ in range(2)]
        flying: deque[tuple[groups.Group, Any]] = deque()
        for number, (name, size) in enumerate(self._order):
            if len(flying) == 2:
                group, work = flying.popleft()
                group.finish(work, end, lambda: "")
            flying.append((self._groups[name], self._groups[name].begin(buffers[number % 2][:size], end)))
        for group, work in flying:
            group.finish(work, end, lambda: "")

    def digest(self, view: Callable[[Tile], torch.Tensor]) -> int:
        return digest.total(
            digest.rectangle(spec.name, view(tile), tile.row, tile.column, prod(spec.shape[1:]))
            for tile in self.tiles
            for spec in [self._plan.tensors[tile.tensor]]
        )


class Shards:
    """What a rank of the first tensor-parallel group holds, by Megatron's parameters."""

    def __init__(self, setting: Setting, rank: int, address: tuple[str, int]) -> None:
        self._model, wholes = setting.model, setting.wholes()
        self._held: list[tuple[Entry, torch.Tensor]] = []
        for entry in entries(self._model):
            shard = torch.empty(self._shape(entry), dtype=torch.bfloat16)
            fill_shard(shard, entry, [wholes[name] for name in entry.tensors], self._model, LAYOUT.tensor, rank)
            self._held.append((entry, shard))
        store = groups.connect_store(f"tensor-parallel rank {rank}", *address, LIMIT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=LAYOUT.tensor)

    def _shape(self, entry: Entry) -> list[int]:
        rows, *rest = sum(shape[0] for shape in entry.shapes), *entry.shapes[0][1:]
        match entry.kind:
            case "whole":
                return [rows, *rest]
            case "columns":
                return [rows, rest[0] // LAYOUT.tensor]
            case "vocab":
                return [self._model.padded_vocabulary(LAYOUT.tensor) // LAYOUT.tensor, *rest]
        return [rows // LAYOUT.tensor, *rest]

    def gathered(self) -> dict[str, torch.Tensor]:
        """On every rank, as `prl.trainer.mapping.export_weights` does it."""
        found: dict[str, torch.Tensor] = {}
        for entry, shard in self._held:
            shards = [shard]
            if entry.kind != "whole":
                shards = [torch.empty_like(shard) for _ in range(LAYOUT.tensor)]
                dist.all_gather(shards, shard)
            found |= zip(entry.tensors, full_tensors(entry.kind, shards, self._model), strict=True)
        return found


class Process:
    """A rank: first the trainer's, then the samplers' workers."""

    def __init__(self, setting: Setting, number: int) -> None:
        torch.set_num_threads(1)
        self._setting, self._number = setting, number
        self._trains = number < TRAINERS
        if self._trains:
            matrices = [whole.view(whole.shape[0], -1) for whole in setting.wholes().values()]
            for matrix in matrices:
                matrix.sum()  # so that its pages are there before anything is measured
            self._view: Callable[[Tile], torch.Tensor] = lambda tile: matrices[tile.tensor][
                tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns
            ]
        else:
            place, self._lane = divmod(number - TRAINERS, LANES)
            self._worker = setting.crew.samplers[place], self._lane
            staging = Staging(setting.plan, setting.route.shards[self._lane])
            for tensor in staging.tensors.values():
                tensor.zero_()
            self._view = staging

    def host(self) -> tuple[str, int]:
        self._trainer = TrainerEnd(HOST, WeightsOptions(bucket_mib=self._setting.route.bucket_bytes // 2**20))
        return self._trainer.master_address, self._trainer.master_port

    def join(self, address: tuple[str, int]) -> None:
        setting, number = self._setting, self._number
        self._port = address[1]
        self._bare = Bare(setting, number, address)
        self._shards = Shards(setting, number, address) if number < LAYOUT.tensor else None
        self._gathered: dict[str, torch.Tensor] = {}
        if self._trains:
            self._sender = LaneSender(setting.route, setting.crew, number, *address, group_s=LIMIT_S)
        else:
            self._receiver = LaneReceiver(setting.route, setting.crew, *self._worker, *address, group_s=LIMIT_S)
        with_deltas = replace(setting.route, deltas=True), replace(setting.crew, epoch=setting.crew.epoch + 1)
        if self._trains:
            self._delta_sender = LaneSender(*with_deltas, number, *address, group_s=LIMIT_S)
        else:
            self._delta_receiver = LaneReceiver(*with_deltas, *self._worker, *address, group_s=LIMIT_S)
            self._base: Base | None = None
        ranks = 1 + SAMPLERS * LANES
        if number == 0:
            self._trainer.join(0, ranks)
        elif not self._trains:
            self._whole = SamplerEnd(*address, 1 + number - TRAINERS, ranks, 0, LIMIT_S)

    def bare(self) -> dict[str, Any]:
        self._bare.broadcast()
        began = time.thread_time()
        self._bare.digest(self._view)
        return {"digest_s": time.thread_time() - began, "bytes": sum(map(self._setting.plan.tile_bytes, self._bare.tiles))}

    def count(self) -> None:
        """Links and memory from here on."""
        self._links = dict(_links(self._port))
        Path("/proc/self/clear_refs").write_text("5")  # its peak is that of now
        self._memory = _memory("VmRSS")

    def lanes(self) -> tuple[LegReport, ...]:
        if self._trains:
            return self._sender.send(self._view, LIMIT_S).legs
        return self._receiver.receive(self._view, LIMIT_S).legs

    def deltas(self) -> tuple[LegReport, ...]:
        """All of the first version; of the others what differs from the one before, over which they are written."""
        if self._trains:
            return self._delta_sender.send(self._view, LIMIT_S, held=True).legs
        legs = self._delta_receiver.receive(self._view, LIMIT_S, base=self._base).legs
        self._base = Base(leg_digests(legs), self._view)
        return legs

    def counted(self) -> dict[str, Any]:
        links = {ends: count - self._links.get(ends, 0) for ends, count in _links(self._port)}
        return {"peak": _memory("VmHWM") - self._memory, "links": links}

    def whole(self) -> None:
        if self._shards is not None:
            self._gathered = self._shards.gathered()

    def gather(self) -> int | None:
        """The digest of what is there then."""
        setting = self._setting
        if self._number == 0:
            report, self._gathered = self._trainer.send(self._gathered), {}
            return report.digest
        self._gathered = {}
        if self._trains:
            return None
        return digest.digest(self._whole.receive(setting.plan.tensors, setting.route.bucket_bytes, LIMIT_S))


def _links(store_port: int) -> Iterator[tuple[tuple[int, int], int]]:
    """((port there, port here), bytes received) of each connection of this process but for those to the store."""
    for name in os.listdir("/proc/self/fd"):
        if not os.path.realpath(f"/proc/self/fd/{name}").rpartition("/")[2].startswith("socket:"):
            continue
        try:
            link = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # gone
        with link:
            try:
                ends = link.getpeername()[1], link.getsockname()[1]
                information = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            except (OSError, IndexError):
                continue  # a socket without a peer, or of another kind
            if store_port not in ends:
                yield ends, struct.unpack_from("Q", information, 128)[0]  # tcpi_bytes_received of <linux/tcp.h>


def _memory(key: str) -> int:
    """Bytes, of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def live(pipe: Connection, setting: Setting, number: int) -> None:
    process = Process(setting, number)
    while (call := pipe.recv()) is not None:
        name, arguments = call
        began, processors_s = time.monotonic(), time.process_time()
        answer = getattr(process, name)(*arguments)
        pipe.send((began, time.monotonic(), time.process_time() - processors_s, answer))


class Cast:
    """All processes."""

    def __init__(self, setting: Setting) -> None:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["prl.weights.lanes", "prl.weights.transport"])
        self._pipes, self._processes = [], []
        for number in range(len(setting.crew.names)):
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(theirs, setting, number), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def do(self, name: str, *arguments: Any, only: int | None = None) -> tuple[float, float, list[Any]]:
        """Seconds from the first one's begin to the last one's end, seconds of all processors, and the answers."""
        pipes = self._pipes if only is None else [self._pipes[only]]
        for pipe in pipes:
            pipe.send((name, arguments))
        answers = [pipe.recv() for pipe in pipes]
        seconds = max(answer[1] for answer in answers) - min(answer[0] for answer in answers)
        return seconds, sum(answer[2] for answer in answers), [answer[3] for answer in answers]

    def end(self) -> None:
        for pipe, process in reversed(list(zip(self._pipes, self._processes, strict=True))):  # the store's host is the last
            pipe.send(None)
            process.join(10)
            process.kill()


def check(legs: Sequence[Sequence[LegReport]]) -> int:
    """Every worker has what was sent; the version's digest."""
    sent = [leg for of_one in legs[:TRAINERS] for leg in of_one]
    for of_one in legs[TRAINERS:]:
        for lane, value in lane_digests(of_one).items():
            assert value == lane_digests(sent)[lane], f"lane {lane} does not hold what was sent"
    return version_digest(sent)


def link_bytes(lanes: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], int]:
    """(root, rank of a worker) -> bytes over all their connections in that direction."""
    owner = {ends: number for number, answer in enumerate(lanes) for ends in answer["links"]}
    found: dict[tuple[int, int], int] = {}
    for number, answer in enumerate(lanes):
        for ends, count in answer["links"].items():
            pair = owner[ends[::-1]], number
            found[pair] = found.get(pair, 0) + count
    return found


def flip(setting: Setting, seed: int) -> None:
    """Another bit in so many values of the weights, each alike; a second time it is the one of before."""
    generator = torch.Generator().manual_seed(seed)
    for whole in setting.wholes().values():
        bits = whole.view(-1).view(torch.int16)
        for part in bits.split(2**24):
            part ^= (torch.rand(len(part), generator=generator) < CHANGED).short()


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = qwen2(args.layers)
    plan = compile_plan(model, LAYOUT, TRAINERS, LANES, "bfloat16")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # shared memory
        weights = Path(folder) / "weights"
        size = sum(spec.elements for spec in plan.tensors)
        torch.from_file(str(weights), shared=True, size=size, dtype=torch.bfloat16).normal_(
            0.0, 0.02, generator=torch.Generator().manual_seed(SEED)
        )
        route = Route(plan, sampler_shards(model, LANES), args.bucket_mib * 2**20)
        setting = Setting(model, route, Crew(1, TRAINERS, tuple(range(SAMPLERS)), LANES), weights)
        cast = Cast(setting)
        try:
            measure(setting, cast, args.rounds)
        finally:
            cast.end()


def measure(setting: Setting, cast: Cast, rounds: int) -> None:
    plan, crew = setting.plan, setting.crew
    _, _, (address,) = cast.do("host", only=0)
    join_s, _, _ = cast.do("join", address)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    processors: dict[str, list[float]] = {way: [] for way in WAYS}
    rates, peaks, links = [], [], {}
    shares, delta_peaks, delta_links = [], [], {}
    cast.do("deltas")  # all of it
    for round_ in range(rounds):
        versions = set()
        for way in WAYS:
            if way == "deltas":
                flip(setting, round_)
            if way in ("lanes", "deltas"):
                cast.do("count")
            took_s, processors_s, answers = cast.do(way)
            seconds[way].append(took_s)
            processors[way].append(processors_s)
            if way == "bare":
                rates += [answer["bytes"] / answer["digest_s"] for answer in answers[TRAINERS:]]
            elif way == "lanes":
                versions.add(check(answers))
                _, _, counted = cast.do("counted")
                peaks += [answer["peak"] / setting.route.bucket_bytes for answer in counted]
                links = link_bytes(counted)
            elif way == "gather":
                versions |= {answer for answer in answers if answer is not None}
            elif way == "deltas":
                assert check(answers) not in versions, "nothing has changed"
                shares.append(changed_share(leg for of_one in answers[:TRAINERS] for leg in of_one))
                _, _, counted = cast.do("counted")
                delta_peaks += [answer["peak"] / setting.route.bucket_bytes for answer in counted]
                delta_links = link_bytes(counted)
                flip(setting, round_)
                versions.add(check(cast.do("deltas")[2]))
        assert len(versions) == 1, "what came by lanes is not what came whole, or not what came as deltas"
    legs = {(leg.root, leg.lane): plan.leg_bytes(leg) for leg in plan.legs}
    wire = {(root, crew.worker(sampler, lane)): count for (root, lane), count in legs.items() for sampler in crew.samplers}
    over = {pair: links.get(pair, 0) / count for pair, count in wire.items()}
    besides = sum(count for pair, count in links.items() if pair not in wire)
    sent = [sum(count for (root, _), count in legs.items() if root == rank) for rank in range(TRAINERS)]
    print(f"{sum(spec.bytes for spec in plan.tensors) / 1e6:.0f} MB, {len(plan.legs)} groups, all built in {join_s:.2f} s")
    print(f"each root sends {min(sent) / 1e6:.0f} to {max(sent) / 1e6:.0f} MB to each of {SAMPLERS} samplers")
    for kind, table in (("seconds", seconds), ("seconds of processors", processors)):
        print(f"{kind}: {', '.join(f'{way} {spread(table[way])}' for way in WAYS)}")
        together = [whole + gather for whole, gather in zip(table["whole"], table["gather"], strict=True)]
        for words, these, those in (
            ("lanes to bare", table["lanes"], table["bare"]),
            ("gather to lanes", together, table["lanes"]),
            ("gather to lanes, without putting together", table["gather"], table["lanes"]),
            ("deltas to lanes", table["deltas"], table["lanes"]),
        ):
            ratios = [this / that for this, that in zip(these, those, strict=True)]
            print(f"    {words} {spread(ratios)}; of the least ones {min(these) / min(those):.2f}")
    print(f"digest   {statistics.median(rates) / 1e9:.2f} GB/s a core, the slowest {min(rates) / 1e9:.2f}")
    print(f"links    {min(over.values()):.4f} to {max(over.values()):.4f} of the plan's bytes; {besides} bytes besides")
    part = sum(delta_links.get(pair, 0) for pair in wire) / sum(wire.values())
    print(f"deltas   {part:.2%} of the plan's bytes, where {statistics.median(shares):.2%} of the values have changed")
    print(f"peak     {max(peaks):.2f} buckets, with deltas {max(delta_peaks):.2f}")


if __name__ == "__main__":
    main()
