"""`python -m prl.trainer` as the node agent starts it, against the real control plane, step files and weight transfer. What
answers its calls here stands in for the orchestrator and one sampler."""

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from ranks import rank_environment
from trainer_data import RISING_KL, facts, microbatches, without_reference

from prl.config.hf_config import read_model_config
from prl.config.layout import layout_of
from prl.config.load import dump
from prl.config.schema import Config
from prl.control.options import ControlOptions
from prl.control.ports import free_port
from prl.control.server import ControlServer, Member
from prl.control.token import create_token
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.orchestrator.options import RunOptions
from prl.runfolder.manifest import part_of
from prl.runfolder.paths import RunFolder
from prl.sampler.options import SampleOptions
from prl.streams.steps import write_step
from prl.trainer.options import TrainOptions
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.digest import MODULUS
from prl.weights.folder import Slab, VersionReader
from prl.weights.lane_deltas import Base, leg_digests
from prl.weights.lanes import LaneReceiver
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec, from_json
from prl.weights.shards import sampler_shards
from prl.weights.shipments import Route, Staging
from prl.weights.transport import SamplerEnd, Whole

RANKS = 2
ENDS_S = 120.0  # that the trainer may take
WORKERS = 2  # of the sampler that takes versions by lanes
TRAIN = TrainOptions(
    learning_rate=1e-3,
    clip_grad=1e6,
    entropy_coefficient=0.01,
    reference="initial",
    weight_decay=0.01,
    **RISING_KL,
)


LAYOUTS = {
    "tensor": {"tensor_parallel": RANKS},
    "stages": {"pipeline_parallel": RANKS, "distributed_optimizer": True},
}
TRANSPORTS = {"tensor": "gather", "stages": "lanes"}


@dataclass
class Run:
    """A run folder with what the orchestrator would know of it."""

    folder: RunFolder
    train: TrainOptions
    transport: str
    files: dict[int, dict[str, Any]] = field(default_factory=dict)  # announced step files
    stop_after: int = 3
    save_after: int = 2
    versions: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # what the sampler got, by lineage:step
    digests: dict[str, str] = field(default_factory=dict)  # what the trainer said it sent
    shares: dict[str, float | None] = field(default_factory=dict)  # of values that had changed, as the trainer said it
    gathered: dict[str, int] = field(default_factory=dict)  # bytes that rank 0 said it had put together
    lanes: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)  # by lanes: what it and the workers said
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    data: dict[int, dict[str, float]] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ending: list[bool] = field(default_factory=list)  # whether each of these is to end the run
    joined: list[int] = field(default_factory=list)
    has_samplers: bool = True
    offered: list[str] = field(default_factory=list)  # versions, by lineage:step
    breaks: str = ""  # a version of whose group a sampler is missing at first
    slow_s: dict[tuple[str, int], float] = field(default_factory=dict)  # before an answer to an offer (from 0), or to a
    # next_step; and before the sampler receives what was offered
    resend: int = -1  # a step behind which the trainer is asked for its version once more
    by_files: str = ""  # a version that goes by files
    holds: str = ""  # a version of which the sampler takes nothing before the trainer has ended
    over: threading.Event = field(default_factory=threading.Event)  # it has
    heard: list[str] = field(default_factory=list)  # calls, in their order, each with its version or step
    unsent: list[dict[str, Any]] = field(default_factory=list)  # what the trainer said of transfers that failed


class LanesIn:
    """The workers of a sampler that takes versions by lanes; where parts of them lie is what the plan says."""

    def __init__(self, run: Run, body: dict[str, Any], epoch: int) -> None:
        model = read_model_config(run.folder.model)
        plan = compile_plan(model, layout_of(run.train), RANKS, WORKERS, "float32")
        assert body["facts"]["settings"]["plan"] == plan.digest()
        assert body["senders"] == RANKS
        self.route = Route(plan, sampler_shards(model, WORKERS), 256 * 2**20, deltas=True)
        self.pool = ThreadPoolExecutor(WORKERS)
        crew, place = Crew(epoch, RANKS, (0,), WORKERS), (body["master_address"], body["master_port"])
        self.ends = list(self.pool.map(lambda k: LaneReceiver(self.route, crew, 0, k, *place, group_s=60.0), range(WORKERS)))
        self.digests: list[str] = []
        self.bases: list[Base | None] = [None] * WORKERS

    def receive(self, specs: list[TensorSpec]) -> dict[str, torch.Tensor]:
        staged = [Staging(self.route.plan, shards) for shards in self.route.shards]
        took = self.pool.map(lambda end, *given: end.receive(given[0], 60.0, base=given[1]), self.ends, staged, self.bases)
        reports = list(took)
        self.bases = [Base(leg_digests(report.legs), staging) for report, staging in zip(reports, staged, strict=True)]
        self.digests = [str(sum(leg.digest for leg in report.legs) % MODULUS) for report in reports]
        whole = [torch.full((spec.shape[0], spec.elements // spec.shape[0]), torch.nan) for spec in specs]
        for shards, staging in zip(self.route.shards, staged, strict=True):
            for tile in (shard.tile for shard in shards):
                rows, columns = slice(tile.row, tile.row + tile.rows), slice(tile.column, tile.column + tile.columns)
                whole[tile.tensor][rows, columns] = staging(tile)
        return {spec.name: tensor.view(spec.shape) for spec, tensor in zip(specs, whole, strict=True)}

    def close(self) -> None:
        for end in self.ends:
            end.close()


def new_run(
    path: Path,
    model_folders: Path,
    train: TrainOptions,
    name: str = "original",
    replay: str = "",
    transport: str = "gather",
    **weights: Any,
) -> Run:
    folder = RunFolder(path)
    folder.create()
    os.symlink(model_folders / "qwen3", folder.model)
    config = Config(
        run=RunOptions(name=name, folder=str(folder), replay=replay),
        train=train,
        sample=SampleOptions(dtype="float32", tensor_parallel=WORKERS if transport == "lanes" else 1),
        control=ControlOptions(wait_s=60.0, start_s=60.0, heartbeat_s=0.2),
        weights=WeightsOptions(transport=transport, delta=True, anchor_every_steps=2, **weights),
    )
    folder.config.write_text(dump(config))
    create_token(folder.token)
    return Run(folder, train, transport)


def step_file(folder: RunFolder, step: int, name: str) -> dict[str, Any]:
    """The announcement of a step file, by a run of that name."""
    batches = [_with_ids(without_reference(batch), step) for batch in microbatches()]
    metrics = {"reward_mean": step / 4}
    file = write_step(folder.steps, batches, facts(step), run=name, attempt=1, sequence=step, metrics=metrics)
    path = str(file.path.relative_to(folder.path))
    return {"step": step, "path": path, "bytes": file.bytes, "checksum": file.checksum}


def _with_ids(batch, step):
    return replace(batch, rollouts=tuple(RolloutId(0, "digits/1", step, k, 0) for k in range(len(batch.boundaries) - 1)))


async def start_and_serve(run: Run, *, resumes: bool = False) -> list[int]:
    """Start the ranks, answer their calls, and return their exit codes."""
    port = free_port("127.0.0.1")
    sampler: dict[int, SamplerEnd | LanesIn] = {}  # by epoch
    tasks = []
    specs: list[TensorSpec] = []  # of the version that goes by files

    async def offer(member, body):
        assert member.index == 0
        number = len(run.offered)
        await asyncio.sleep(run.slow_s.get(("offer", number), 0.0))
        run.offered.append(f"{body['lineage']}:{body['step']}")
        if not run.has_samplers:
            return {"epoch": 0, "world_size": 1, "send": False}

        if run.offered[-1] == run.breaks and not run.unsent:
            return {"epoch": 2, "world_size": 3, "samplers": [0, 1], "send": True, "transport": run.transport, "held": None}
        if run.offered[-1] == run.by_files and not body["whole"]:
            return {"epoch": 3, "world_size": 0, "send": False, "later": True}
        if run.offered[-1] == run.by_files:
            specs.extend(from_json(body["tensors"]))
            where = {"epoch": 3, "world_size": 2, "samplers": [0]}
            return {**where, "send": True, "transport": "filesystem", "held": None}
        epoch = 3 if run.unsent else 1
        newest = list(run.versions)[-1:]
        held = [Whole({name: tensor.clone() for name, tensor in run.versions[k].items()}, int(run.digests[k])) for k in newest]

        def receive():
            if epoch not in sampler and run.transport == "lanes":
                sampler[epoch] = LanesIn(run, body, epoch)
            elif epoch not in sampler:
                sampler[epoch] = SamplerEnd(body["master_address"], body["master_port"], 1, 2, epoch, 60.0)
            if run.offered[-1] == run.holds:
                run.over.wait()
                return {}
            time.sleep(run.slow_s.get(("receive", number), 0.0))
            specs = from_json(body["tensors"])
            assert sum(spec.bytes for spec in specs) == body["bytes"]
            end = sampler[epoch]
            if isinstance(end, LanesIn):
                return end.receive(specs)
            return end.receive(specs, 256 * 2**20, deltas=True, held=held[0] if held else None)

        async def keep():
            run.versions[f"{body['lineage']}:{body['step']}"] = await asyncio.to_thread(receive)

        tasks.append(asyncio.create_task(keep()))
        base = str(held[0].digest) if held else None
        where = {"epoch": epoch, "world_size": 2, "samplers": [0]}
        return {**where, "send": True, "transport": run.transport, "held": base}

    async def sending(member, body):
        return {"broken": "sampler 1 left the group" if body["epoch"] == 2 else ""}

    async def unsent(member, body):
        run.heard.append(f"unsent {body['lineage']}:{body['step']}")
        run.unsent.append(body)
        return {}

    async def sent(member, body):
        label = f"{body['lineage']}:{body['step']}"
        run.heard.append(f"sent {label}")
        await tasks[-1]
        if label == run.by_files:
            reader = VersionReader(run.folder.weights, Version.parse(label), specs, 0.0)
            run.versions[label] = {spec.name: reader.read(Slab.whole(spec), verify=True) for spec in specs}
        elif run.transport == "lanes":
            run.lanes[label] = body["lanes"], sampler[body["epoch"]].digests
        run.digests[label] = body["digest"]
        run.shares[label] = body["changed_share"]
        run.gathered[label] = body["gathered_bytes"]
        return {}

    async def next_step(member, body):
        await asyncio.sleep(run.slow_s.get(("next_step", body["step"]), 0.0))
        run.heard.append(f"next_step {body['step']}")
        if body["step"] == run.resend and body["sends"]:
            return {"file": None, "send": False, "stop": False}
        if body["step"] == run.resend:
            run.resend = -1
            return {"file": None, "send": True, "stop": False}
        return {"file": run.files.get(body["step"]), "stop": False}

    async def trained(member, body):
        run.heard.append(f"trained {body['step']}")
        run.metrics[body["step"]] = body["metrics"]
        run.data[body["step"]] = body["data"]
        return {"stop": body["step"] >= run.stop_after, "save": body["step"] == run.save_after}

    async def checkpoint(member, body):
        run.checkpoints.append(body["step"])
        folder = run.folder.checkpoint(body["step"])
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        assert sorted(body["parts"], key=lambda part: part["path"]) == [asdict(part_of(folder, path)) for path in found]
        return {"saved": True}

    async def training(member, body):
        return {"lineage": int(resumes), "resumes": resumes, "port": port}

    async def resume(member, body):
        return {"checkpoint": str(run.folder.checkpoint(2)) if resumes else None}

    async def finished(member, body):
        run.heard.append(f"finished {body['step']}")
        run.finished.append(body["step"])
        return {}

    handlers = {
        "offer_version": offer,
        "version_sent": sent,
        "sending": sending,
        "version_unsent": unsent,
        "next_step": next_step,
        "trained": trained,
        "checkpoint": checkpoint,
        "finished": finished,
        "resume": resume,
        "training": training,
    }

    def failed(member: Member, error: str, _trace: str) -> None:
        run.failures.append(error)
        run.ending.append(member.ends_run)

    server = ControlServer(
        run.folder.token.read_text(),
        handlers,
        on_join=lambda member: run.joined.append(member.index),
        on_fail=failed,
    )
    url = await server.start("127.0.0.1")
    shared = {
        "PRL_RUN": str(run.folder),
        "PRL_ATTEMPT": "1",
        "PRL_ROLE": "trainer",
        "PRL_CONTROL_URL": url,
        "PRL_HOST": "127.0.0.1",
    }
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "prl.trainer", env={**rank_environment(rank, RANKS, 0), **shared, "PRL_INDEX": str(rank)}
        )
        for rank in range(RANKS)
    ]
    try:
        return [await asyncio.wait_for(process.wait(), ENDS_S) for process in processes]
    finally:
        run.over.set()
        for process in processes:
            if process.returncode is None:
                process.kill()
        for end in sampler.values():
            end.close()
        await server.close()
