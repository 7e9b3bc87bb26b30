"""What a test does to a real sampler: as the orchestrator, the trainer and an actor."""

import asyncio
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tiny_models import Weights

from prl.config.hf_config import read_model_config
from prl.config.tensors import tensor_shapes
from prl.control.token import authorization
from prl.flow.versions import Version
from prl.runfolder.paths import RunFolder
from prl.runfolder.weights import MODULUS, StoredFile, StoredVersion, new_folder, publish_version
from prl.weights.agreement import facts
from prl.weights.digest import digest
from prl.weights.plan import TensorSpec, to_json
from prl.weights.transport import SendReport, TrainerEnd, libraries, spec_of


@dataclass
class Reply:
    status: int
    body: Any
    headers: Mapping[str, str]


@dataclass
class Lab:
    """The sampler and both ends of its world."""

    url: str
    process: subprocess.Popen[bytes]
    trainer: TrainerEnd
    token: str
    loop: asyncio.AbstractEventLoop
    staged: "queue.Queue[Mapping[str, Any]]"
    failed: "queue.Queue[str]"
    joined: Mapping[str, Any]
    log: Path
    start_s: float
    sockets: Path  # where the sampler makes the folder for vLLM's sockets
    folder: RunFolder
    stored: "queue.Queue[Mapping[str, Any]]"
    dtype: str
    epoch: int = 0
    step: int = -1
    before: list[Reply] = field(
        default_factory=list
    )  # to generation, state, health and the actors' route, before the first version

    def run(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def request(self, method: str, path: str, body: Any = None, *, token: str | None = None, timeout_s: float = 60.0) -> Reply:
        return self.start(method, path, body, token=token, timeout_s=timeout_s).result(timeout_s + 5)

    def start(
        self, method: str, path: str, body: Any = None, *, token: str | None = None, timeout_s: float = 60.0
    ) -> "Future[Reply]":
        headers = authorization(self.token if token is None else token)

        async def ask() -> Reply:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, self.url + path, json=body, headers=headers) as response,
            ):
                text = await response.text()
                try:
                    parsed = json.loads(text)
                except ValueError:
                    parsed = text
                return Reply(response.status, parsed, response.headers)

        return self.run(ask())

    def connect(self) -> None:
        """A new epoch: both ends build a group."""
        self.epoch += 1
        reply = self.request("POST", "/prl/weights/connect", self.meeting(self.epoch))
        assert reply.status == 200, reply
        self.trainer.join(self.epoch, 1 + self.joined["workers"])

    def meeting(self, epoch: int) -> dict[str, Any]:
        return {
            "master_address": self.trainer.master_address,
            "master_port": self.trainer.master_port,
            "rank_offset": 1,
            "world_size": 1 + self.joined["workers"],
            "epoch": epoch,
            "timeout_s": 30.0,
            "facts": self.facts(os.environ),
        }

    def facts(self, environment: Mapping[str, str], **others: Any) -> dict[str, Any]:
        """The trainer's, whose environment is this one."""
        shapes = tensor_shapes(read_model_config(self.folder.model))
        usual: dict[str, Any] = {
            "libraries": libraries("cpu"),
            "dtype": self.dtype,
            "tensors": [TensorSpec(name, self.dtype, shape) for name, shape in shapes.items()],
            "bucket_bytes": 2**20,
        }
        return facts("the trainer", "node7", **usual | others, environment=environment).to_json()

    def offer(self, weights: Weights) -> Reply:
        """Arm the receiver for the next version."""
        self.step += 1
        specs = [spec_of(name, tensor) for name, tensor in weights.items()]
        body = {"lineage": 0, "step": self.step, "epoch": self.epoch, "tensors": to_json(specs), "bucket_bytes": 2**20}
        return self.request("POST", "/prl/weights/receive", body)

    def send(self, weights: Weights, held: int | None = None) -> tuple[SendReport, Mapping[str, Any]]:
        """Offer, send, and wait for every worker's report; the last one is returned. `held`: send what differs from that."""
        reply = self.offer(weights)
        assert reply.status == 200, reply
        report = self.trainer.send(weights, held)
        staged = [self.staged.get(timeout=30) for _ in range(self.joined["workers"])]
        assert {one["worker"] for one in staged} == set(range(self.joined["workers"]))
        return report, staged[-1]

    def commit(self, expected: int, *, clear_cache: bool = False) -> Reply:
        body = {"lineage": 0, "step": self.step, "digest": str(expected), "clear_cache": clear_cache}
        return self.request("POST", "/prl/weights/commit", body)

    def update(self, weights: Weights, *, clear_cache: bool = False) -> Reply:
        """All of it, as the orchestrator would drive it."""
        if self.epoch == 0:
            self.connect()
        report, staged = self.send(weights)
        assert staged["digest"] == str(report.digest) == str(digest(weights))
        reply = self.commit(report.digest, clear_cache=clear_cache)
        assert reply.status == 200, reply
        return reply

    def store(self, weights: Weights) -> StoredVersion:
        """Have the sampler write the live version, which has these tensors, to files, and make it count."""
        version = Version(0, self.step)
        folder = new_folder(self.folder.weights, version)
        tensors = to_json(spec_of(name, tensor) for name, tensor in weights.items())
        body = {"lineage": 0, "step": self.step, "seed": 1, "folder": str(folder), "tensors": tensors}
        reply = self.request("POST", "/prl/weights/store", body)
        assert reply.status == 200, reply
        reports = [self.stored.get(timeout=30) for _ in range(self.joined["workers"])]
        assert all(report["seed"] == 1 and "error" not in report for report in reports), reports
        files = [StoredFile.from_json(file) for report in reports for file in report["files"]]
        stored = StoredVersion(version, sum(piece.digest for file in files for piece in file.pieces) % MODULUS, files)
        publish_version(folder, stored)
        return stored

    def load(self, stored: StoredVersion, weights: Weights) -> list[Mapping[str, Any]]:
        """Have the sampler read a version from files; every worker's report."""
        tensors = to_json(spec_of(name, tensor) for name, tensor in weights.items())
        body = {"lineage": 0, "step": stored.version.step, "epoch": self.epoch, "seed": 2, "tensors": tensors}
        reply = self.request("POST", "/prl/weights/load", body)
        assert reply.status == 200, reply
        return [self.staged.get(timeout=30) for _ in range(self.joined["workers"])]

    def take(self, stored: StoredVersion, weights: Weights) -> None:
        """Read a version from files and commit it."""
        reports = self.load(stored, weights)
        assert sum(int(report["digest"]) for report in reports) % MODULUS == stored.digest == digest(weights)
        body = {"lineage": 0, "step": stored.version.step, "digest": str(stored.digest), "clear_cache": False}
        reply = self.request("POST", "/prl/weights/commit", body)
        assert reply.status == 200, reply

    def generate(self, prompt: list[int], **sampling: Any) -> "Future[Reply]":
        parameters = {"n": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False, **sampling}
        return self.start("POST", "/inference/v1/generate", {"token_ids": prompt, "sampling_params": parameters})

    def ask(self, prompt: list[int], *, timeout_s: float = 60.0, **sampling: Any) -> "Future[Reply]":
        """By the route that actors ask."""
        body = {"token_ids": prompt, "sampling_params": {"n": 1, "temperature": 0.0, **sampling}}
        return self.start("POST", "/prl/generate", body, timeout_s=timeout_s)

    def stream(self, prompt: list[int], **sampling: Any) -> "Stream":
        """An answer token by token; returns when the first one is there."""
        parameters = {"temperature": 1.0, "detokenize": False, "ignore_eos": True, **sampling}
        body = {"token_ids": prompt, "sampling_params": parameters, "stream": True}
        begun = threading.Event()

        async def read() -> list[tuple[float, Any]]:
            chunks = []
            async with (
                aiohttp.ClientSession(headers=authorization(self.token)) as session,
                session.post(self.url + "/inference/v1/generate", json=body) as response,
            ):
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        chunks.append((time.perf_counter(), json.loads(line[6:])))
                        begun.set()
            return chunks

        chunks = self.run(read())
        assert begun.wait(60), "no token within 60 s"
        return Stream(chunks)


@dataclass(frozen=True)
class Stream:
    """The chunks of an answer with their times of arrival."""

    chunks: "Future[list[tuple[float, Any]]]"

    @property
    def times(self) -> list[float]:
        return [time_s for time_s, _ in self.chunks.result(60)]

    @property
    def last(self) -> dict[str, Any]:
        """The choice of the last chunk: it carries the versions of all tokens."""
        return self.chunks.result(60)[-1][1]["choices"][0]
