"""The model on a node's own disk: what is copied and what is a link, what a node does where it cannot be copied, and that its
processes find it."""

import asyncio
import json
import os
import re
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from agent_rig import Orchestrator, run_of
from empty_weights import write_tensors

from prl.cluster.options import PreflightOptions
from prl.config.load import replace as with_options
from prl.config.schema import Config
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.metrics import names
from prl.metrics.events import read_events
from prl.orchestrator.node import run_agent
from prl.orchestrator.staging import (
    GivenUp,
    Staged,
    StageOrders,
    cache_environment,
    local_folder,
    stage,
    stage_model,
    stage_orders,
)
from prl.report.read import read_run
from prl.runfolder.paths import RunFolder

SMALL = ("config.json", "model.safetensors.index.json", "tokenizer.json")
SHARDS = ("model-1.safetensors", "model-2.safetensors")
ORDERS = StageOrders(folder=None, stage="always", weights=True, limit_s=60.0, spare_bytes=0)
NETWORK, DISK, MEMORY = ("/shared", "lustre"), ("/local", "xfs"), ("/local", "tmpfs")


@pytest.fixture
def model(tmp_path):
    """Weights in two files, beside those in another form."""
    folder = tmp_path / "model"
    (folder / "original").mkdir(parents=True)
    (folder / "original/consolidated.pth").write_bytes(b"0" * 1000)
    (folder / "pytorch_model.bin").write_bytes(b"0" * 2000)
    for name in SMALL:
        (folder / name).write_text(json.dumps({"of": name}))
    for name in SHARDS:
        write_tensors(folder / name, {name: ("F32", (1000,))})
    (folder / SMALL[1]).write_text(json.dumps({"weight_map": {name: name for name in SHARDS}}))
    return folder


def staged(model, tmp_path, orders=ORDERS, mounts=(), *, weights=True):
    return stage_model(
        model, tmp_path / "disk/model", orders, lambda: list(mounts), weights=weights, given_up=threading.Event()
    )


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def links(folder):
    return {path.name for path in folder.iterdir() if path.is_symlink()}


@pytest.mark.parametrize(
    ("trains", "reads", "copied"), [(True, True, (*SMALL, *SHARDS)), (True, False, SMALL), (False, True, SMALL)]
)
def test_what_a_node_reads_is_copied_and_the_rest_are_links(model, disk, tmp_path, trains, reads, copied):
    found = staged(model, tmp_path, replace(ORDERS, weights=reads), weights=trains)
    assert found == Staged(disk / "model", sum((model / name).stat().st_size for name in copied))
    assert links(disk / "model") == {path.name for path in model.iterdir()} - set(copied)
    for path in model.rglob("*"):
        if path.is_file():
            assert (disk / "model" / path.relative_to(model)).read_bytes() == path.read_bytes()
    assert os.listdir(disk) == ["model"]


def test_a_link_to_a_model_of_links_is_followed(model, disk, tmp_path):
    (tmp_path / "blobs").mkdir()
    for name in SHARDS:
        (model / name).rename(tmp_path / "blobs" / name)
        (model / name).symlink_to(f"../blobs/{name}")
    (tmp_path / "run_model").symlink_to(model)
    assert staged(tmp_path / "run_model", tmp_path).model == disk / "model"
    assert not links(disk / "model") & set(SHARDS)


@pytest.mark.parametrize(
    ("source", "own", "copies", "words"),
    [
        (NETWORK, DISK, True, ""),
        (("/shared", "nfs4"), DISK, True, ""),
        (("/shared", "ext4"), DISK, False, ""),
        (NETWORK, MEMORY, False, r"/disk lies on no disk of the node \(tmpfs\): see cluster.local_folder"),
        (NETWORK, ("/local", "nfs"), False, r"on no disk of the node \(nfs\): see cluster.local_folder"),
        (NETWORK, ("/elsewhere", "xfs"), False, r"on no disk of the node \(unknown\): see cluster.local_folder"),
    ],
)
def test_by_itself_a_node_copies_from_the_network_to_a_disk_alone(model, disk, tmp_path, source, own, copies, words):
    at = {"/shared": model, "/local": disk, "/elsewhere": tmp_path / "elsewhere"}
    mounts = [(str(at[place]), kind) for place, kind in (source, own)]
    found = staged(model, tmp_path, replace(ORDERS, stage="auto"), mounts)
    assert (found.copied_bytes > 0, found.model) == (copies, disk / "model" if copies else model)
    assert re.search(f"{words}$", found.obstacle)
    assert bool(words) == bool(found.obstacle)


def test_whoever_wants_none_gets_none(model, disk, tmp_path):
    assert staged(model, tmp_path, replace(ORDERS, stage="never"), [("/", "nfs")]) == Staged(model)
    assert os.listdir(disk) == []


def test_where_room_is_short_the_shared_model_is_read(model, disk, tmp_path):
    found = staged(model, tmp_path, replace(ORDERS, spare_bytes=2**60))
    assert found.model == model
    assert re.search(r"GiB are free in .*/disk, and 0.00 GiB are wanted, with 1073741824.00 GiB to spare", found.obstacle)
    assert os.listdir(disk) == []


def test_a_model_without_its_weights_is_not_copied(model, disk, tmp_path):
    (model / SHARDS[1]).unlink()
    found = staged(model, tmp_path)
    assert (found.model, found.copied_bytes) == (model, 0)
    assert "FileNotFoundError" in found.obstacle
    assert SHARDS[1] in found.obstacle
    assert os.listdir(disk) == []


def test_a_copy_that_nobody_wants_any_more_leaves_nothing(model, disk):
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(GivenUp):
        stage_model(model, disk / "model", ORDERS, list, weights=True, given_up=given_up)
    assert os.listdir(disk) == []


@pytest.mark.parametrize(("limit_s", "words"), [(0.05, "the copy was not done within 0 s"), (60.0, "the run stops")])
def test_a_copy_ends_at_its_deadline_and_with_the_run(model, disk, limit_s, words):
    os.truncate(model / SHARDS[0], 2 << 30)  # a file with a hole

    async def main():
        client = ControlClient("http://127.0.0.1:1", "token", "agent", 0, ControlOptions())
        if limit_s > 1:
            asyncio.get_running_loop().call_later(0.05, client.stopping.set)
        found = await stage(client, model, disk / "model", replace(ORDERS, limit_s=limit_s), weights=True)
        assert found == Staged(model, obstacle=words)
        async with asyncio.timeout(20):
            while os.listdir(disk):  # noqa: ASYNC110 (another thread's doing)
                await asyncio.sleep(0.02)

    asyncio.run(main())


def test_caches_that_somebody_has_placed_stay_there():
    found = cache_environment(Path("/local/prl/caches"), {"TRITON_CACHE_DIR": "/mine"})
    assert found["VLLM_CACHE_ROOT"] == "/local/prl/caches/vllm"
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/local/prl/caches/inductor"
    assert "TRITON_CACHE_DIR" not in found


def test_where_the_disk_is(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("ME", "ann")
    for named, environment, parent in (
        (None, {}, "temporary"),
        (None, {"SLURM_TMPDIR": str(tmp_path / "slurm")}, "slurm"),
        (f"{tmp_path}/local/$ME", {}, "local/ann"),
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with local_folder(replace(ORDERS, folder=named), "prl-7-0-") as folder:
            assert Path(folder).parent == tmp_path / parent
            assert Path(folder).name.startswith("prl-7-0-")
        assert not Path(folder).exists()
    for named in ("/local/$NOT_SET_ANYWHERE", "$ME/local"):
        with pytest.raises(FileNotFoundError, match=r"cluster.local_folder = .*: is no absolute path on this node"):
            local_folder(replace(ORDERS, folder=named), "prl-7-0-")


@pytest.mark.parametrize(
    ("options", "resumes", "weights"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"train": {"reference": "initial"}}, True, True),
        ({"model": {"init": "random"}}, False, False),
    ],
)
def test_orders_say_whether_trainers_read_weights_and_how_long_that_may_take(model, options, resumes, weights):
    config = with_options(Config(), **options)
    assert stage_orders(config, model, resumes=resumes) is None
    config = with_options(config, cluster={"nodes": 2, "local_folder": "/local", "preflight": PreflightOptions(disk_gib=3.0)})
    read = (*SMALL, *SHARDS) if weights else SMALL
    size_bytes = sum((model / name).stat().st_size for name in read)
    found = stage_orders(config, model, resumes=resumes)
    assert found == StageOrders("/local", "auto", weights, pytest.approx(60 + size_bytes / 25e6), 3 * 2**30)


CHILD = """
import json, os, time
names = ("PRL_MODEL", "VLLM_CACHE_ROOT", "TMPDIR")
print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
time.sleep(600)
"""


def test_a_nodes_processes_find_the_copy_which_goes_with_the_agent(model, tmp_path):
    run = run_of(tmp_path, CHILD)
    run.model.symlink_to(model)

    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=0)
        orchestrator.local = asdict(replace(ORDERS, folder=str(tmp_path / "disk")))
        orchestrator.devices = [[], [0]]
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.2)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        logs = [run.logs(1) / f"sampler-{index}.log" for index in (0, 1)]
        async with asyncio.timeout(20):
            while not all(log.exists() and log.read_text() for log in logs):  # noqa: ASYNC110 (written by other processes)
                await asyncio.sleep(0.02)
        with_none, with_one = [json.loads(log.read_text()) for log in logs]
        (folder,) = (tmp_path / "disk").iterdir()
        assert folder.name.startswith("prl-local-1-")
        assert with_none["PRL_MODEL"] == with_one["PRL_MODEL"] == str(folder / "model")
        assert links(folder / "model") >= set(SHARDS)  # nobody trains there
        assert with_none["VLLM_CACHE_ROOT"] is None
        assert with_one["VLLM_CACHE_ROOT"] == str(folder / "caches/vllm")
        recorded = json.loads((Path(with_one["TMPDIR"]) / "agent.json").read_text())
        assert recorded["folders"] == [str(folder)]
        orchestrator.server.stopping, orchestrator.server.grace_s = True, 0.2
        orchestrator.bell.ring()
        await asyncio.wait_for(agent, 20)
        assert os.listdir(tmp_path / "disk") == []
        await orchestrator.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    (event,) = [event for event in read_events(run.metrics / "agent-1.jsonl")[0] if event.kind == names.MODEL]
    assert event.values[names.MODEL_COPIED_BYTES] == sum((model / name).stat().st_size for name in SMALL)
    assert event.labels == {"obstacle": ""}


def test_without_a_copy_they_read_the_runs_model_whatever_is_set_around_the_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("PRL_MODEL", "/another/model")
    run = run_of(tmp_path, CHILD)
    log = run.logs(1) / "sampler-0.log"

    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=0)
        orchestrator.devices = [[]]
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.2)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        async with asyncio.timeout(20):
            while not (log.exists() and log.read_text()):  # noqa: ASYNC110 (written by another process)
                await asyncio.sleep(0.02)
        orchestrator.server.stopping, orchestrator.server.grace_s = True, 0.2
        orchestrator.bell.ring()
        await asyncio.wait_for(agent, 20)
        await orchestrator.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert json.loads(log.read_text())["PRL_MODEL"] == str(run.model)


def test_the_report_says_which_nodes_read_the_shared_model(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.config.write_text("run: {name: one}\n")
    for node, words in enumerate(("full", "", "full")):
        event = {"time": 1e9, "role": "agent", "index": node, "attempt": 2, "kind": "model", "step": None, "values": {}}
        (run.metrics / f"agent-{node}.jsonl").write_text(json.dumps({**event, "labels": {"obstacle": words}}) + "\n")
    assert "attempt 2: 2 nodes did not copy the model to an own disk: full" in read_run(run.path).notes
