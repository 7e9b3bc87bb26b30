"""Sampling while new weights arrive, on a real vLLM server: tokens/s during transfers, and the length of pauses.

    python tools/bench/inflight.py [--rounds 5] [--window-s 4] [--sequences 8] [--bucket-mib 8]

Two trainer ranks, in a process of their own, send a model of 105 MB (float32) by lanes to a sampler, which is asked for some
sequences all the time. Each round lasts `--window-s` four times over:

    alone      nothing else
    transfer   one update after another; what counts are the times from the first byte sent to the verified version
    burnt      processes burn the processor time that the transfers of this round took a second: two that of the trainer's
               process, two that of the sampler's threads which receive, as at each end one thread computes while another one
               is at the wire
    copied     the same, but that they copy memory all the time, as a transfer mostly does

`transfer to burnt`: tokens/s, the share that is left where a transfer costs nothing but its processor time; `transfer to
copied`: and what that takes of the memory's bandwidth. `pause to transfer`: the sampler's pause for a version, as it reports
it, to the time of the version's transfer. It wants two cores that do nothing else, as the sampler's own start does.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sampler"))
from lab import Lab
from launch import HOST, TRAIN, WEIGHTS, sampler
from tiny_models import EOS, Weights, weights_of

from prl.config.hf_config import read_model_config
from prl.config.layout import layout_of
from prl.control.token import authorization
from prl.sampler.options import SampleOptions
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.digest import digest
from prl.weights.lanes import LaneSender
from prl.weights.plan import Tile, to_json
from prl.weights.shards import sampler_shards
from prl.weights.shipments import Route

LIMIT_S = 300.0
RANKS = 2
BURNERS = 2  # for each end: one process alone gets no share of two busy cores that two threads at work get
COPIED_BYTES, COPY_BYTES = 2**28, 2**20
LONGEST_TOKENS = 900


def small_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=12,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).to(torch.float32)


class Trainer:
    """The sending ranks, each in a thread."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._pool = ThreadPoolExecutor(RANKS)

    def join(self, route: Route, crew: Crew, port: int) -> None:
        matrices = [self._weights[spec.name].reshape(spec.shape[0], -1) for spec in route.plan.tensors]
        join = partial(LaneSender, route, crew, address=HOST, port=port, group_s=LIMIT_S)
        self._senders = list(self._pool.map(lambda rank: join(rank=rank), range(RANKS)))

        def source(tile: Tile) -> torch.Tensor:
            return matrices[tile.tensor][tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns]

        self._source = source

    def send(self) -> float:
        """The monotonic time at which it began."""
        began = time.monotonic()
        list(self._pool.map(lambda sender: sender.send(self._source, LIMIT_S), self._senders))
        return began


class Burner:
    """Takes a share of a core, with counting or with copies of memory that no cache holds."""

    def __init__(self) -> None:
        self._memory = torch.zeros(2, COPIED_BYTES // 2, dtype=torch.uint8)

    def burn(self, share: float, seconds: float, copies: bool) -> None:
        began, spent_s, at = time.monotonic(), time.process_time(), 0
        one, other = self._memory.view(2, -1, COPY_BYTES)
        while (passed_s := time.monotonic() - began) < seconds:
            if time.process_time() - spent_s > share * passed_s:
                time.sleep(0.001)
            elif copies:
                at = (at + 1) % len(one)
                one[at].copy_(other[at])


class Load:
    """Asks for some sequences all the time, each in a connection of its own."""

    def __init__(self) -> None:
        self._arrivals: list[tuple[float, int]] = []  # monotonic time, tokens
        self._failed: list[BaseException] = []

    def start(self, url: str, token: str, sequences: int) -> None:
        threading.Thread(target=lambda: asyncio.run(self._run(url, token, sequences)), daemon=True).start()

    def tokens(self, spans: Sequence[tuple[float, float]]) -> int:
        """How many came in these spans of monotonic time."""
        if self._failed:
            raise self._failed[0]
        return sum(count for at, count in list(self._arrivals) if any(begin < at <= end for begin, end in spans))

    async def _run(self, url: str, token: str, sequences: int) -> None:
        try:
            async with aiohttp.ClientSession(headers=authorization(token)) as session:
                await asyncio.gather(*(self._ask(session, url, number) for number in range(sequences)))
        except BaseException as error:  # `tokens` tells of it
            self._failed.append(error)

    async def _ask(self, session: aiohttp.ClientSession, url: str, number: int) -> None:
        sampling = {"temperature": 1.0, "detokenize": False, "ignore_eos": True, "max_tokens": LONGEST_TOKENS}
        body = {"token_ids": [number + 1], "sampling_params": sampling, "stream": True}
        while True:
            async with session.post(url + "/inference/v1/generate", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        tokens = len(json.loads(line[6:])["choices"][0]["token_ids"])
                        self._arrivals.append((time.monotonic(), tokens))


class Process:
    """Does what it is told. Forked before this one has threads."""

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def answer(self) -> tuple[Any, float]:
        """With the processor seconds that it took."""
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"a process did not do within {LIMIT_S:.0f} s what it was told")
        answer, spent_s = self._pipe.recv()
        return answer, spent_s

    def do(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        return self.answer()[0]

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _live(pipe: Connection, make: Callable[[], Any]) -> None:
    os.setsid()  # a session of its own, as each process of a run has: systems share processors out between sessions
    torch.set_num_threads(1)  # anew behind the fork, before it has threads
    actor = make()
    while True:
        name, arguments = pipe.recv()
        spent_s = time.process_time()
        answer = getattr(actor, name)(*arguments)
        pipe.send((answer, time.process_time() - spent_s))


class Updates:
    """Both ends of the lanes, driven as the orchestrator would."""

    def __init__(self, lab: Lab, trainer: Process, weights: Weights, bucket_bytes: int) -> None:
        self._lab, self._trainer, self._digest = lab, trainer, digest(weights)
        model = read_model_config(lab.folder.model)
        plan = compile_plan(model, layout_of(TRAIN), RANKS, 1, "float32")
        route = Route(plan, sampler_shards(model, 1), bucket_bytes)
        lab.epoch += 1
        self._order = {"lineage": 0, "epoch": lab.epoch, "tensors": to_json(plan.tensors), "bucket_bytes": bucket_bytes}
        self._others = set(self._threads())
        facts = lab.facts(os.environ, plan=plan.digest(), bucket_bytes=bucket_bytes)
        who = {"facts": facts, "lanes": {"trainer_ranks": RANKS, "samplers": [0]}, "timeout_s": LIMIT_S}
        self._post("connect", lab.meeting(lab.epoch) | who)
        trainer.do("join", route, Crew(lab.epoch, RANKS, (0,), 1), lab.trainer.master_port)

    def update(self) -> "Update":
        lab = self._lab
        lab.step += 1
        received_s = self._received_s()
        self._post("receive", self._order | {"step": lab.step})
        armed = time.monotonic()
        self._trainer.tell("send")
        began, sent_s = self._trainer.answer()
        staged = lab.staged.get(timeout=LIMIT_S)
        assert "error" not in staged, staged
        ended = min(time.monotonic(), armed + staged["receive_s"])
        received_s = self._received_s() - received_s
        commit = {"lineage": 0, "step": lab.step, "digest": str(self._digest), "clear_cache": False}
        pause_s = self._post("commit", commit)["pause_s"]
        return Update((began, ended), pause_s, sent_s, received_s)

    def _post(self, what: str, body: dict[str, Any]) -> Any:
        reply = self._lab.request("POST", f"/prl/weights/{what}", body, timeout_s=LIMIT_S)
        assert reply.status == 200, reply
        return reply.body

    def _received_s(self) -> float:
        """Processor time of the sampler's threads that came with the lanes."""
        return sum(spent_s for thread, spent_s in self._threads().items() if thread not in self._others)

    def _threads(self) -> dict[int, float]:
        """Processor time of each of the sampler's, in all of its processes."""
        server = psutil.Process(self._lab.process.pid)
        threads = [thread for process in (server, *server.children(recursive=True)) for thread in process.threads()]
        return {thread.id: thread.user_time + thread.system_time for thread in threads}


@dataclass(frozen=True)
class Update:
    span: tuple[float, float]  # from the first byte sent to the verified version
    pause_s: float
    sent_s: float  # processor time of the trainer's end
    received_s: float  # and of the sampler's

    @property
    def transfer_s(self) -> float:
        return self.span[1] - self.span[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=4.0)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=8)
    args = parser.parse_args()
    model = small_model()
    weights = weights_of(model)
    options = SampleOptions(dtype="float32", max_model_len=1024, max_num_seqs=32, kv_cache_mib=256)
    transfers = replace(WEIGHTS, bucket_mib=args.bucket_mib, group_s=LIMIT_S, update_s=LIMIT_S)
    processes = [Process(make) for make in (partial(Trainer, weights), Load, *2 * BURNERS * [Burner])]
    try:
        with tempfile.TemporaryDirectory() as folder, sampler(Path(folder), options, model, transfers) as lab:
            measure(lab, processes, weights, args)
    finally:
        for process in processes:
            process.end()


def measure(lab: Lab, processes: Sequence[Process], weights: Weights, args: argparse.Namespace) -> None:
    trainer, load, *burners = processes
    updates = Updates(lab, trainer, weights, args.bucket_mib * 2**20)
    updates.update()  # the first version, and the first use of everything
    load.do("start", lab.url, lab.token, args.sequences)
    rates: dict[str, list[float]] = {"alone": [], "transfer": [], "burnt": [], "copied": []}
    done: list[Update] = []
    print(
        f"{'tokens/s':10}"
        + "".join(f"{name:>10}" for name in rates)
        + "   of a core for sender and receiver: transfer, burnt, copied",
        flush=True,
    )
    for number in range(-1, args.rounds):  # the first one is not counted
        began = time.monotonic()
        time.sleep(args.window_s)
        alone = began, time.monotonic()
        found = [updates.update()]
        while time.monotonic() < alone[1] + args.window_s:
            found.append(updates.update())
        transfer_s = sum(one.transfer_s for one in found)
        shares = sum(one.sent_s for one in found) / transfer_s, sum(one.received_s for one in found) / transfer_s
        spans = {"alone": [alone], "transfer": [one.span for one in found]}
        burns = {"transfer": f"{shares[0]:.2f} {shares[1]:.2f}"}
        for name in ("burnt", "copied"):
            began = time.monotonic()
            for burner, share in zip(burners, BURNERS * shares, strict=True):
                burner.tell("burn", share / BURNERS, max(transfer_s, args.window_s), name == "copied")
            spent = [burner.answer()[1] for burner in burners]
            spans[name] = [(began, time.monotonic())]
            burns[name] = " ".join(f"{sum(spent[end::2]) / (spans[name][0][1] - began):.2f}" for end in range(2))
        for name, some in spans.items():
            rate = load.do("tokens", some) / sum(end - begin for begin, end in some)
            if number >= 0:
                rates[name].append(rate)
        if number >= 0:
            done += found
            row = "".join(f"{of_rounds[-1]:10.0f}" for of_rounds in rates.values())
            print(f"{number + 1:<10}{row}   {', '.join(burns.values())}", flush=True)
    for name in ("burnt", "copied"):
        ratios = [transfer / other for transfer, other in zip(rates["transfer"], rates[name], strict=True)]
        print(f"transfer to {name:8} {spread(ratios)} of {len(ratios)} rounds")
    print(f"pause to transfer    {spread([one.pause_s / one.transfer_s for one in done])} of {len(done)} updates")
    print(f"pause                {spread([1e3 * one.pause_s for one in done], 1)} ms")
    size_mb = sum(tensor.nbytes for tensor in weights.values()) / 1e6
    print(f"transfer             {spread([1e3 * one.transfer_s for one in done], 0)} ms, {size_mb:.0f} MB")


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
