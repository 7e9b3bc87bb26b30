"""Real samplers for the tests of this folder: `python -m prl.sampler` on CPU, with a control server in this process that
stands for the orchestrator and a sending end that stands for the trainer."""

import asyncio
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import Lab
from tiny_models import save, tiny_model
from transformers import PreTrainedModel

from prl.config.load import dump
from prl.config.schema import Config
from prl.control.ports import free_port
from prl.control.server import ControlServer, Member
from prl.control.token import create_token
from prl.domains.options import DomainOptions
from prl.metrics.options import MetricsOptions
from prl.runfolder.paths import RunFolder
from prl.sampler.options import SampleOptions
from prl.trainer.options import TrainOptions
from prl.weights.options import WeightsOptions
from prl.weights.transport import TrainerEnd

HOST = "127.0.0.1"
START_S = 180.0
WEIGHTS = WeightsOptions(bucket_mib=1, group_s=30.0, update_s=30.0)
METRICS = MetricsOptions(report_s=0.5, flush_s=0.1)
TRAIN = TrainOptions(tensor_parallel=2)  # of the ranks that send by lanes
OPTIONS = SampleOptions(
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=32,
    kv_cache_mib=64,
    engine_args={
        "worker-extension-cls": "faulty_extension.FaultyExtension",
        "enable-prompt-tokens-details": True,  # how much of a prompt came out of the prefix cache
    },
)


@dataclass(frozen=True)
class Started:
    """A sampler's process."""

    process: "subprocess.Popen[bytes]"
    log: Path
    sockets: Path

    def words(self) -> str:
        return self.log.read_text()[-4000:]

    def check_end(self) -> None:
        """It was told to end; it must do so by itself, and leave nothing behind."""
        assert self.process.wait(60) == 0, self.words()
        assert list(self.sockets.iterdir()) == []


@contextmanager
def started(run: RunFolder, index: int, control_url: str) -> Iterator[Started]:
    sockets = Path(tempfile.mkdtemp(prefix="prl-test-"))  # not in pytest's own folders: the paths of sockets must be short
    environment = os.environ | {
        "PRL_RUN": str(run),
        "PRL_ATTEMPT": "1",
        "PRL_ROLE": "sampler",
        "PRL_INDEX": str(index),
        "PRL_CONTROL_URL": control_url,
        "PRL_HOST": HOST,
        "PRL_PORT": str(free_port(HOST)),
        "PYTHONPATH": str(Path(__file__).parent),  # where the faulty extension lies
        "VLLM_RPC_BASE_PATH": str(sockets),
        "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, for the extension, and more routes that must be guarded
    }
    log = run.path.parent / f"sampler_{index}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "prl.sampler"],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            umask=0,  # as open as a site may leave it
        )
    try:
        yield Started(process, log, sockets)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait(10)
        shutil.rmtree(sockets)


def wait_for_join(joined: "queue.Queue[Member]", samplers: Sequence[Started]) -> Member:
    """The next one that joins, while all of these live."""
    end = time.monotonic() + START_S
    while True:
        try:
            return joined.get(timeout=0.5)
        except queue.Empty:
            for one in samplers:
                assert one.process.poll() is None, f"a sampler ended with {one.process.returncode}:\n{one.words()}"
                assert time.monotonic() < end, f"no sampler after {START_S} s:\n{one.words()}"


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """In a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)


def run_folder(folder: Path, options: SampleOptions, model: PreTrainedModel, weights: WeightsOptions) -> RunFolder:
    run = RunFolder(folder / "run")
    run.create()
    save(model, run.model)
    config = Config(sample=options, weights=weights, train=TRAIN, metrics=METRICS, domains=(DomainOptions(name="digits"),))
    run.config.write_text(dump(config))
    return run


@contextmanager
def sampler(
    folder: Path, options: SampleOptions = OPTIONS, model: PreTrainedModel | None = None, weights: WeightsOptions = WEIGHTS
) -> Iterator[Lab]:
    """A sampler (of `tiny_model`s, unless one is given) that has joined; it is told to end afterwards, and must then end by
    itself and have reported no failure, unless a test ended it before."""
    run = run_folder(folder, options, model or tiny_model(0), weights)
    token = create_token(run.token)
    staged: queue.Queue[Mapping[str, Any]] = queue.Queue()
    stored: queue.Queue[Mapping[str, Any]] = queue.Queue()
    joined: queue.Queue[Member] = queue.Queue()
    failed: queue.Queue[str] = queue.Queue()

    async def on_staged(member: Member, body: Mapping[str, Any]) -> Mapping[str, Any]:
        staged.put(body)
        return {}

    async def on_stored(member: Member, body: Mapping[str, Any]) -> Mapping[str, Any]:
        stored.put(body)
        return {}

    def on_fail(member: Member, error: str, trace: str) -> None:
        failed.put(f"{member.name}: {error}\n{trace}")

    server = ControlServer(token, {"staged": on_staged, "stored": on_stored}, on_join=joined.put, on_fail=on_fail)
    with event_loop() as loop:
        control_url = asyncio.run_coroutine_threadsafe(server.start(HOST), loop).result(10)
        began = time.monotonic()
        try:
            with started(run, 0, control_url) as one:
                facts = wait_for_join(joined, [one]).facts
                trainer, start_s = TrainerEnd(HOST, weights), time.monotonic() - began
                ends = facts["url"], one.process, trainer, token, loop, staged, failed
                yield Lab(*ends, facts, one.log, start_s, one.sockets, run, stored, options.dtype)
                if one.process.poll() is None:
                    server.stopping = True  # told with the next heartbeat
                    one.check_end()
                    assert failed.empty()
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
