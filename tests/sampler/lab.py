"""Real samplers for the tests of this folder: `python -m prl.sampler` on CPU, with a control server in this process that
stands for the orchestrator and a sending end that stands for the trainer."""

import asyncio
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from prl.config.hf_config import read_model_config
from prl.config.load import dump
from prl.config.schema import Config
from prl.config.tensors import tensor_shapes
from prl.control.server import ControlServer, Member
from prl.control.token import authorization, create_token
from prl.domains.options import DomainOptions
from prl.flow.versions import Version
from prl.runfolder.paths import RunFolder
from prl.runfolder.weights import MODULUS, StoredFile, StoredVersion, new_folder, publish_version
from prl.sampler.options import SampleOptions
from prl.trainer.options import TrainOptions
from prl.weights.agreement import facts
from prl.weights.digest import digest
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec, to_json
from prl.weights.transport import SendReport, TrainerEnd, libraries, spec_of

torch.set_num_threads(1)  # the sampler needs a core too
HOST = "127.0.0.1"
EOS = 11
START_S = 180.0
Weights = dict[str, torch.Tensor]


def tiny_model(seed: int, *, tied: bool = True, vocabulary: int = 16) -> Qwen2ForCausalLM:
    """The digits model, with weights large enough that every greedy choice depends on all that came before."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=12,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
            elif seed:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def one_word_model(token: int, seed: int, **like: Any) -> Qwen2ForCausalLM:
    """A `tiny_model` that says this token whatever it is asked: its layers add little to the direction that all embeddings
    share, and the head's row of the token lies along that. All of its tensors depend on the seed."""
    model = tiny_model(seed, **like)
    with torch.no_grad():
        direction = torch.full((model.config.hidden_size,), 2.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        model.model.embed_tokens.weight.add_(direction)
        model.lm_head.weight[token].add_(direction)
        model.model.norm.weight.fill_(1.0)
    return model


def tiny_experts(seed: int, width: int = 48) -> Qwen3MoeForCausalLM:
    """Two of four experts a token, far apart; a width of 48 is a multiple of vLLM's tiles on CPUs, but is padded to 64."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=width,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=12,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def weights_of(model: PreTrainedModel) -> Weights:
    """Under the names that files have, a tied head once; transformers itself holds the experts of a layer in one tensor."""
    found: Weights = {}
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        if not path.endswith(".experts"):
            found[name] = parameter.detach()
            continue
        for number, expert in enumerate(parameter.detach()):
            parts = dict(zip(("gate", "up"), expert.chunk(2), strict=True)) if last == "gate_up_proj" else {"down": expert}
            found |= {f"{path}.{number}.{part}_proj.weight": tensor for part, tensor in parts.items()}
    return found


def save(model: PreTrainedModel, folder: Path) -> None:
    """Config and tokenizer alone: a sampler starts without weights."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    vocabulary = {character: number for number, character in enumerate("0123456789=")} | {"<eos>": EOS, "<pad>": 12}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


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


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


WEIGHTS = WeightsOptions(bucket_mib=1, group_s=30.0, update_s=30.0)
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
        "PRL_PORT": str(free_port()),
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
    run.config.write_text(dump(Config(sample=options, weights=weights, train=TRAIN, domains=(DomainOptions(name="digits"),))))
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
